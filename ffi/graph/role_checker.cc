// SPDX-License-Identifier: Apache-2.0
// Checks of single roles, with the messages that Python gives.

#include "graph/role_checker.h"

#include <cstddef>

namespace jax_cudnn {

bool BroadcastsTo(const Dims& dims, const Dims& shape) {
  bool fits = dims.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = dims[i] == 1 || dims[i] == shape[i];
  }
  return fits;
}

const TensorSpec* RoleChecker::Find(std::string_view role) const {
  const auto found = roles_.find(role);
  return found == roles_.end() ? nullptr : found->second;
}

Status RoleChecker::ExpectRank(std::string_view role, size_t rank) const {
  const TensorSpec* tensor = Find(role);
  if (tensor == nullptr || tensor->dims.size() == rank) return {};
  return Fail(std::string(role) + " has rank " + std::to_string(tensor->dims.size()) +
              ", not " + std::to_string(rank));
}

Status RoleChecker::ExpectDims(std::string_view role, const Dims& dims) const {
  const TensorSpec* tensor = Find(role);
  if (tensor == nullptr || tensor->dims == dims) return {};
  return Fail(std::string(role) + " has dims " + ListText(tensor->dims) + ", not " +
              ListText(dims));
}

Status RoleChecker::ExpectBroadcast(std::string_view role, const Dims& shape) const {
  const TensorSpec* tensor = Find(role);
  if (tensor == nullptr || BroadcastsTo(tensor->dims, shape)) return {};
  return Fail(std::string(role) + " dims " + ListText(tensor->dims) +
              " do not broadcast to " + ListText(shape));
}

Status RoleChecker::ExpectDType(std::string_view role, DType dtype) const {
  const TensorSpec* tensor = Find(role);
  if (tensor == nullptr || tensor->dtype == dtype) return {};
  return Fail(std::string(role) + " is " + std::string(DTypeName(tensor->dtype)) +
              ", not " + std::string(DTypeName(dtype)));
}

Status RoleChecker::ExpectNoBool(std::string_view role) const {
  const TensorSpec* tensor = Find(role);
  if (tensor == nullptr || tensor->dtype != DType::kBool) return {};
  return Fail(std::string(role) + " is bool");
}

}  // namespace jax_cudnn
