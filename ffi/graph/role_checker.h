// SPDX-License-Identifier: Apache-2.0
// What the shape rules of several node kinds have in common.

#ifndef JAX_CUDNN_ROLE_CHECKER_H_
#define JAX_CUDNN_ROLE_CHECKER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "graph/graph_spec.h"
#include "graph/node_kinds.h"

namespace jax_cudnn {

using Dims = std::vector<int64_t>;

// Whether each of `dims` is 1 or the entry of `shape` at its place.
bool BroadcastsTo(const Dims& dims, const Dims& shape);

// The checks of one node; every message starts with its kind. Borrows the node and its
// roles. An Expect function lets a role pass that the node does not have.
class RoleChecker {
 public:
  RoleChecker(const NodeSpec& node, const Roles& roles) : node_(node), roles_(roles) {}

  const NodeSpec& node() const { return node_; }

  // The tensor in a role, or null.
  const TensorSpec* Find(std::string_view role) const;
  // The tensor in a role that the node has.
  const TensorSpec& operator[](std::string_view role) const {
    return *roles_.find(role)->second;
  }

  Status Fail(const std::string& what) const {
    return InvalidArgument(node_.kind + ": " + what);
  }

  Status ExpectRank(std::string_view role, size_t rank) const;
  Status ExpectDims(std::string_view role, const Dims& dims) const;
  Status ExpectBroadcast(std::string_view role, const Dims& shape) const;
  Status ExpectDType(std::string_view role, DType dtype) const;
  Status ExpectNoBool(std::string_view role) const;

 private:
  const NodeSpec& node_;
  const Roles& roles_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_ROLE_CHECKER_H_
