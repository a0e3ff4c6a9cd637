// SPDX-License-Identifier: Apache-2.0
// The table of node kinds: roles, attributes and shape rule of each.
//
// A new kind is a row in node_kinds.cc, a shape rule beside it and a row in
// graph_builder.cc. The rules repeat those of jax_cudnn/graph, word for word: cuDNN
// trusts the shapes it is given, so a text from elsewhere must not get past them.

#ifndef JAX_CUDNN_NODE_KINDS_H_
#define JAX_CUDNN_NODE_KINDS_H_

#include <functional>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

enum class AttributeType { kBool, kInteger, kNumber, kString, kIntegers };

// A node's tensors, inputs and outputs, by role.
using Roles = std::map<std::string_view, const TensorSpec*>;

struct NodeKind {
  std::string_view name;
  std::vector<std::pair<std::string_view, AttributeType>> attributes;
  std::vector<std::string_view> required_inputs;
  std::vector<std::string_view> optional_inputs;
  std::vector<std::string_view> required_outputs;
  std::vector<std::string_view> optional_outputs;
  std::function<Status(const NodeSpec&, const Roles&)> check;
};

// All kinds, sorted by name.
const std::vector<NodeKind>& NodeKinds();

// The kind of that name, or null.
const NodeKind* FindNodeKind(std::string_view name);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_NODE_KINDS_H_
