// SPDX-License-Identifier: Apache-2.0
// The kinds of nodes, as jax_cudnn/graph/node_kinds.json describes them.
//
// The table is compiled in and read once. jax_cudnn/graph/description.py says what its
// fields mean; a new kind is a row there and a row in frontend/graph_builder.cc.

#ifndef JAX_CUDNN_NODE_KINDS_H_
#define JAX_CUDNN_NODE_KINDS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "graph/graph_spec.h"

namespace jax_cudnn {

enum class AttributeType { kBool, kInteger, kNumber, kString, kStrings, kIntegers };

struct AttributeField {
  AttributeType type;
  bool has_entry_per_star = false;      // a list with an entry for each starred axis
  std::optional<int64_t> least;         // of an integer, or of each entry of a list
  std::vector<int64_t> entries;         // how many a list may have; empty for any
  std::optional<AttributeValue> value;  // the default, which is not written
};

// An axis of a role: the letters whose sizes it multiplies, none for a 1.
struct Axis {
  std::string letters;
  bool is_optional = false;
  bool is_starred = false;
};

struct Role {
  std::string name;
  bool is_required = true;
  bool is_input = true;
  std::vector<Axis> axes;
  std::string dtype;
  std::string same_as;  // the role whose axes and dtype it has, or empty
};

// A starred letter of a result: how many windows fit along another. The window's size
// is that of a letter, or an entry of the attribute that it names.
struct WindowRule {
  std::string result;
  std::string size;
  std::string window;
};

struct NodeKind {
  std::string name;
  std::vector<Role> roles;  // inputs, then outputs, in the order of the table
  std::map<std::string, AttributeField, std::less<>> attributes;
  std::map<std::string, std::string, std::less<>> letters;  // what each is called
  int64_t least_stars = 0;
  int64_t most_stars = 8;
  std::vector<WindowRule> windows;
  std::map<std::string, size_t, std::less<>> arity;  // inputs of each mode
  std::set<std::string, std::less<>> modes_to_bool;
  std::set<std::string, std::less<>> modes_with_alpha;
  // What the row is of nodes with an operand that changes it.
  std::vector<NodeKind> forms;
  std::string operand;  // of a form: that which a node has

  // The row as it is of a node with these operands, by role.
  const NodeKind& Form(
      const std::map<std::string, std::string, std::less<>>& inputs) const;

  // The role of that name, or null.
  const Role* Find(std::string_view role) const;
};

// All kinds, sorted by name.
const std::vector<NodeKind>& NodeKinds();

// The kind of that name, or null.
const NodeKind* FindNodeKind(std::string_view name);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_NODE_KINDS_H_
