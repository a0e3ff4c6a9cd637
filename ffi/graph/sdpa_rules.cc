// SPDX-License-Identifier: Apache-2.0
// Shape rules of the attention nodes.

#include "graph/sdpa_rules.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "graph/role_checker.h"

namespace jax_cudnn {
namespace {

// The checks of one node that forward and backward have in common.
class SdpaChecker : public RoleChecker {
 public:
  using RoleChecker::RoleChecker;

  Status CheckOperands() const {
    if (!std::isfinite(node().Attribute<double>("scale"))) {
      return Fail("scale is not finite");
    }
    const TensorSpec& query = (*this)["query"];
    for (std::string_view role : {"query", "key", "value"}) {
      RETURN_IF_ERROR(ExpectRank(role, 4));
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
    if (const TensorSpec* bias = Find("bias");
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
    if (Find(gradient) == nullptr) return {};
    const TensorSpec* tensor = Find(role);
    if (tensor == nullptr) return Fail(gradient + " without " + role);
    RETURN_IF_ERROR(ExpectDims(gradient, tensor->dims));
    return ExpectDType(gradient, tensor->dtype);
  }
};

}  // namespace

Status CheckSdpa(const NodeSpec& node, const Roles& roles) {
  const SdpaChecker checker(node, roles);
  RETURN_IF_ERROR(checker.CheckOperands());
  RETURN_IF_ERROR(checker.CheckOutput("output"));
  return checker.CheckStats("stats");
}

Status CheckSdpaBackward(const NodeSpec& node, const Roles& roles) {
  const SdpaChecker checker(node, roles);
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
