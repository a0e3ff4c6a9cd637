// SPDX-License-Identifier: Apache-2.0
// Checks that the attributes and tensors of a node fit the description of its kind.
//
// The twin of jax_cudnn/graph/shapes.py, word for word: cuDNN trusts the shapes it is
// given, so a text from elsewhere must not get past these checks.

#ifndef JAX_CUDNN_SHAPE_RULES_H_
#define JAX_CUDNN_SHAPE_RULES_H_

#include <map>
#include <string_view>

#include "base/status.h"
#include "graph/graph_spec.h"
#include "graph/node_kinds.h"

namespace jax_cudnn {

// A node's tensors, inputs and outputs, by role.
using Roles = std::map<std::string_view, const TensorSpec*>;

Status CheckAttributes(const NodeKind& kind, const NodeSpec& node);

// `roles` has the tensors that the node has, all of which are well formed.
Status CheckTensors(const NodeKind& kind, const NodeSpec& node, const Roles& roles);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_SHAPE_RULES_H_
