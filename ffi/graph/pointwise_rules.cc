// SPDX-License-Identifier: Apache-2.0
// Shape rules of the pointwise, constant and reduction nodes.

#include "graph/pointwise_rules.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "graph/role_checker.h"

namespace jax_cudnn {
namespace {

constexpr std::string_view kUnary[] = {
    "abs",   "ceil",     "cos",  "elu",      "erf",       "exp",
    "floor", "neg",      "log",  "gelu_erf", "gelu_tanh", "relu",
    "relu6", "identity", "sin",  "silu",     "sigmoid",   "reciprocal",
    "rsqrt", "softplus", "sqrt", "tan",      "tanh",
};
constexpr std::string_view kBinary[] = {
    "add",        "div",          "elu_grad",  "gelu_erf_grad", "gelu_tanh_grad",
    "max",        "min",          "mul",       "pow",           "relu_grad",
    "relu6_grad", "sigmoid_grad", "silu_grad", "softplus_grad", "sub",
    "tanh_grad",
};
constexpr std::string_view kComparisons[] = {"eq", "ge", "gt", "le", "lt", "ne"};
// Modes that take an `alpha`.
constexpr std::string_view kWithAlpha[] = {"elu", "elu_grad", "relu", "relu_grad"};

constexpr std::array<std::string_view, 3> kRoles = {"a", "b", "c"};

template <size_t kCount>
bool Contains(const std::string_view (&names)[kCount], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// Inputs of a mode; 0 where there is no such mode.
size_t Arity(std::string_view mode) {
  if (Contains(kUnary, mode)) return 1;
  if (Contains(kBinary, mode) || Contains(kComparisons, mode)) return 2;
  return mode == "select" ? 3 : 0;
}

std::string UnknownMode(const std::string& mode) {
  return "mode '" + mode + "' is not a known one";
}

Status CheckPointwiseAttributes(const RoleChecker& checker) {
  const auto& mode = checker.node().Attribute<std::string>("mode");
  const double alpha = checker.node().Attribute<double>("alpha");
  if (Arity(mode) == 0) return checker.Fail(UnknownMode(mode));
  if (!std::isfinite(alpha)) {
    return checker.Fail("alpha " + std::to_string(alpha) + " is not finite");
  }
  if (alpha != 0 && !Contains(kWithAlpha, mode)) {
    return checker.Fail(mode + " takes no alpha");
  }
  return {};
}

// The inputs that the node has, which must be those of its mode.
StatusOr<std::vector<std::string_view>> PointwiseInputs(const RoleChecker& checker) {
  std::vector<std::string_view> inputs;
  std::string text;
  for (std::string_view role : kRoles) {
    if (checker.Find(role) == nullptr) continue;
    text += (inputs.empty() ? "" : ", ") + std::string(role);
    inputs.push_back(role);
  }
  const auto& mode = checker.node().Attribute<std::string>("mode");
  const size_t arity = Arity(mode);
  if (!std::equal(inputs.begin(), inputs.end(), kRoles.begin(),
                  kRoles.begin() + static_cast<std::ptrdiff_t>(arity))) {
    return checker.Fail(mode + " takes " + std::to_string(arity) + " inputs, not " +
                        text);
  }
  return inputs;
}

Status CheckPointwiseDims(const RoleChecker& checker,
                          const std::vector<std::string_view>& inputs) {
  const Dims& dims = checker["output"].dims;
  for (std::string_view role : inputs) {
    RETURN_IF_ERROR(checker.ExpectBroadcast(role, dims));
  }
  // Of each axis the size that the others broadcast to.
  Dims full(dims.size(), 1);
  for (std::string_view role : inputs) {
    const Dims& each = checker[role].dims;
    for (size_t i = 0; i < full.size(); ++i) {
      if (full[i] == 1) full[i] = each[i];
    }
  }
  if (full != dims) {
    return checker.Fail("output dims " + ListText(dims) +
                        " are not those of the inputs, " + ListText(full));
  }
  return {};
}

Status CheckPointwiseDTypes(const RoleChecker& checker,
                            const std::vector<std::string_view>& inputs) {
  const auto& mode = checker.node().Attribute<std::string>("mode");
  const DType output = checker["output"].dtype;
  if ((output == DType::kBool) != Contains(kComparisons, mode)) {
    return checker.Fail("the output of " + mode + " is " +
                        std::string(DTypeName(output)));
  }
  for (std::string_view role : inputs) {
    const DType dtype = checker[role].dtype;
    const bool wants_bool = mode == "select" && role == "c";
    if ((dtype == DType::kBool) != wants_bool) {
      return checker.Fail(std::string(role) + " of " + mode + " is " +
                          std::string(DTypeName(dtype)));
    }
  }
  return {};
}

}  // namespace

Status CheckPointwise(const NodeSpec& node, const Roles& roles) {
  const RoleChecker checker(node, roles);
  RETURN_IF_ERROR(CheckPointwiseAttributes(checker));
  ASSIGN_OR_RETURN(const std::vector<std::string_view> inputs,
                   PointwiseInputs(checker));
  RETURN_IF_ERROR(CheckPointwiseDims(checker, inputs));
  return CheckPointwiseDTypes(checker, inputs);
}

Status CheckConstant(const NodeSpec& node, const Roles& roles) {
  const RoleChecker checker(node, roles);
  const double value = node.Attribute<double>("value");
  if (!std::isfinite(value)) {
    return checker.Fail("value " + std::to_string(value) + " is not finite");
  }
  const TensorSpec& output = checker["output"];
  if (std::any_of(output.dims.begin(), output.dims.end(),
                  [](int64_t dim) { return dim != 1; })) {
    return checker.Fail("dims " + ListText(output.dims) + " are not all 1");
  }
  if (output.dtype != DType::kF32 && output.dtype != DType::kF64) {
    return checker.Fail("output is " + std::string(DTypeName(output.dtype)) +
                        ", not f32 or f64");
  }
  return {};
}

Status CheckReduction(const NodeSpec& node, const Roles& roles) {
  const RoleChecker checker(node, roles);
  const auto& mode = node.Attribute<std::string>("mode");
  if (mode != "add") return checker.Fail(UnknownMode(mode));
  const Dims& dims = checker["input"].dims;
  const Dims& reduced = checker["output"].dims;
  if (!BroadcastsTo(reduced, dims)) {
    return checker.Fail("output dims " + ListText(reduced) +
                        " are not those of the input, " + ListText(dims) +
                        ", with some set to 1");
  }
  RETURN_IF_ERROR(checker.ExpectNoBool("input"));
  return checker.ExpectNoBool("output");
}

}  // namespace jax_cudnn
