// SPDX-License-Identifier: Apache-2.0
// Shape rules of the attention nodes.

#include "sdpa_rules.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace jax_cudnn {
namespace {

using Dims = std::vector<int64_t>;

const TensorSpec* Find(const Roles& roles, std::string_view role) {
  const auto found = roles.find(role);
  return found == roles.end() ? nullptr : found->second;
}

// The checks of one node; every message starts with its kind.
class Checker {
 public:
  Checker(const NodeSpec& node, const Roles& roles) : node_(node), roles_(roles) {}

  const TensorSpec& operator[](std::string_view role) const {
    return *roles_.find(role)->second;
  }

  Status Fail(const std::string& what) const {
    return InvalidArgument(node_.kind + ": " + what);
  }

  Status ExpectDims(std::string_view role, const Dims& dims) const {
    const TensorSpec* tensor = Find(roles_, role);
    if (tensor == nullptr || tensor->dims == dims) return {};
    return Fail(std::string(role) + " has dims " + ListText(tensor->dims) + ", not " +
                ListText(dims));
  }

  Status ExpectDType(std::string_view role, DType dtype) const {
    const TensorSpec* tensor = Find(roles_, role);
    if (tensor == nullptr || tensor->dtype == dtype) return {};
    return Fail(std::string(role) + " is " + std::string(DTypeName(tensor->dtype)) +
                ", not " + std::string(DTypeName(dtype)));
  }

  // What forward and backward have in common.
  Status CheckOperands() const {
    if (!std::isfinite(node_.Attribute<double>("scale"))) {
      return Fail("scale is not finite");
    }
    const TensorSpec& query = (*this)["query"];
    for (std::string_view role : {"query", "key", "value"}) {
      const size_t rank = (*this)[role].dims.size();
      if (rank != 4) {
        return Fail(std::string(role) + " has rank " + std::to_string(rank) +
                    ", not 4");
      }
      RETURN_IF_ERROR(ExpectDType(role, query.dtype));
    }
    if (!IsFloat(query.dtype)) {
      return Fail("query dtype " + std::string(DTypeName(query.dtype)) +
                  " is not a float");
    }
    const int64_t b = query.dims[0];
    const int64_t h = query.dims[1];
    const int64_t s = query.dims[2];
    const int64_t d = query.dims[3];
    const Dims& value = (*this)["value"].dims;
    const int64_t k = value[1];
    const int64_t t = value[2];
    RETURN_IF_ERROR(ExpectDims("key", {b, k, t, d}));
    RETURN_IF_ERROR(ExpectDims("value", {b, k, t, value[3]}));
    if ((k == 0) != (h == 0) || (k != 0 && h % k != 0)) {
      return Fail(std::to_string(h) + " query heads do not divide by " +
                  std::to_string(k) + " key heads");
    }
    for (std::string_view role : {"bias", "mask"}) {
      RETURN_IF_ERROR(ExpectBroadcast(role, {b, h, s, t}));
    }
    if (const TensorSpec* bias = Find(roles_, "bias");
        bias != nullptr && !IsFloat(bias->dtype)) {
      return Fail("bias dtype " + std::string(DTypeName(bias->dtype)) +
                  " is not a float");
    }
    RETURN_IF_ERROR(ExpectDType("mask", DType::kBool));
    for (std::string_view role : {"query_lengths", "key_lengths"}) {
      RETURN_IF_ERROR(ExpectDims(role, {b, 1, 1, 1}));
      RETURN_IF_ERROR(ExpectDType(role, DType::kI32));
    }
    return {};
  }

  Status CheckStats(std::string_view role) const {
    const TensorSpec& query = (*this)["query"];
    RETURN_IF_ERROR(ExpectDims(role, {query.dims[0], query.dims[1], query.dims[2], 1}));
    return ExpectDType(role, query.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  }

  // The role has the shape and dtype of the attention's result.
  Status CheckOutput(std::string_view role) const {
    const TensorSpec& query = (*this)["query"];
    RETURN_IF_ERROR(ExpectDims(
        role, {query.dims[0], query.dims[1], query.dims[2], (*this)["value"].dims[3]}));
    return ExpectDType(role, query.dtype);
  }

  // grad_x, where there is one, is like x.
  Status CheckGradient(const std::string& role) const {
    const std::string gradient = "grad_" + role;
    if (Find(roles_, gradient) == nullptr) return {};
    const TensorSpec* tensor = Find(roles_, role);
    if (tensor == nullptr) return Fail(gradient + " without " + role);
    RETURN_IF_ERROR(ExpectDims(gradient, tensor->dims));
    return ExpectDType(gradient, tensor->dtype);
  }

 private:
  Status ExpectBroadcast(std::string_view role, const Dims& shape) const {
    const TensorSpec* tensor = Find(roles_, role);
    if (tensor == nullptr) return {};
    bool fits = tensor->dims.size() == shape.size();
    for (size_t i = 0; fits && i < shape.size(); ++i) {
      fits = tensor->dims[i] == 1 || tensor->dims[i] == shape[i];
    }
    if (fits) return {};
    return Fail(std::string(role) + " dims " + ListText(tensor->dims) +
                " do not broadcast to " + ListText(shape));
  }

  const NodeSpec& node_;
  const Roles& roles_;
};

}  // namespace

Status CheckSdpa(const NodeSpec& node, const Roles& roles) {
  const Checker checker(node, roles);
  RETURN_IF_ERROR(checker.CheckOperands());
  RETURN_IF_ERROR(checker.CheckOutput("output"));
  return checker.CheckStats("stats");
}

Status CheckSdpaBackward(const NodeSpec& node, const Roles& roles) {
  const Checker checker(node, roles);
  RETURN_IF_ERROR(checker.CheckOperands());
  RETURN_IF_ERROR(checker.CheckOutput("output"));
  RETURN_IF_ERROR(checker.CheckOutput("grad_output"));
  for (const char* role : {"query", "key", "value", "bias"}) {
    RETURN_IF_ERROR(checker.CheckGradient(role));
  }
  RETURN_IF_ERROR(checker.CheckStats("stats"));
  return checker.CheckStats("grad_stats");
}

}  // namespace jax_cudnn
