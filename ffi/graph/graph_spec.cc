// SPDX-License-Identifier: Apache-2.0
// Reading, checking and writing graph specifications.

#include "graph/graph_spec.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <set>
#include <utility>

#include "base/json_text.h"
#include "graph/node_kinds.h"
#include "graph/score_mod.h"
#include "graph/shape_rules.h"

namespace jax_cudnn {
namespace {

// The most dimensions that a cuDNN backend tensor takes (CUDNN_DIM_MAX in cudnn.h).
constexpr size_t kMaxRank = 8;

std::string Quoted(std::string_view name) { return "'" + std::string(name) + "'"; }

std::string NamesText(const std::vector<std::string>& names) {
  std::string text = "[";
  for (const std::string& name : names) {
    if (text.size() > 1) text += ", ";
    text += Quoted(name);
  }
  return text + "]";
}

bool IsIdentifier(std::string_view name) {
  const auto is_letter = [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  if (name.empty() || !is_letter(static_cast<unsigned char>(name[0]))) return false;
  return std::all_of(name.begin(), name.end(), [&](char c) {
    return is_letter(static_cast<unsigned char>(c)) || (c >= '0' && c <= '9');
  });
}

template <typename Names>
bool Contains(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// --- reading ------------------------------------------------------------------------

StatusOr<TensorSpec> ReadTensor(const Json& json, const std::string& path) {
  ASSIGN_OR_RETURN(const auto fields,
                   ReadFields(json, path, {"dims", "dtype", "name", "order"}));
  TensorSpec tensor;
  ASSIGN_OR_RETURN(const std::string dtype_name,
                   ReadString(*fields[1], path + ".dtype"));
  const auto dtype = DTypeNamed(dtype_name);
  if (!dtype.has_value()) {
    return InvalidArgument(path + ".dtype: " + Quoted(dtype_name) +
                           " is not a known dtype");
  }
  tensor.dtype = *dtype;
  ASSIGN_OR_RETURN(tensor.name, ReadString(*fields[2], path + ".name"));
  ASSIGN_OR_RETURN(tensor.dims, ReadIntegers(*fields[0], path + ".dims"));
  ASSIGN_OR_RETURN(tensor.order, ReadIntegers(*fields[3], path + ".order"));
  return tensor;
}

Status ReadRoles(const Json& json, const std::string& path,
                 std::map<std::string, std::string, std::less<>>& roles) {
  ASSIGN_OR_RETURN(const JsonObject* fields, ReadObject(json, path));
  for (const auto& [role, value] : *fields) {
    ASSIGN_OR_RETURN(roles[role], ReadString(value, path + "." + role));
  }
  return {};
}

StatusOr<AttributeValue> ReadAttribute(const Json& json, AttributeType type,
                                       const std::string& path) {
  switch (type) {
    case AttributeType::kBool: {
      ASSIGN_OR_RETURN(const bool value, ReadBool(json, path));
      return AttributeValue(value);
    }
    case AttributeType::kInteger: {
      ASSIGN_OR_RETURN(const int64_t value, ReadInteger(json, path));
      return AttributeValue(value);
    }
    case AttributeType::kNumber: {
      ASSIGN_OR_RETURN(const double value, ReadNumber(json, path));
      return AttributeValue(value);
    }
    case AttributeType::kString: {
      ASSIGN_OR_RETURN(std::string value, ReadString(json, path));
      return AttributeValue(std::move(value));
    }
    case AttributeType::kStrings: {
      ASSIGN_OR_RETURN(std::vector<std::string> value, ReadStrings(json, path));
      return AttributeValue(std::move(value));
    }
    case AttributeType::kIntegers: {
      ASSIGN_OR_RETURN(std::vector<int64_t> value, ReadIntegers(json, path));
      return AttributeValue(std::move(value));
    }
  }
  return Internal(path + ": unknown attribute type");
}

// An attribute that is left out has its default.
Status ReadAttributes(const NodeKind& kind, const Json& json, const std::string& path,
                      NodeSpec& node) {
  ASSIGN_OR_RETURN(const JsonObject* given, ReadObject(json, path));
  std::vector<std::string_view> names;
  for (const auto& [name, field] : kind.attributes) {
    const bool is_given = std::any_of(
        given->begin(), given->end(),
        [key = std::string_view(name)](const auto& item) { return item.first == key; });
    if (field.value.has_value() && !is_given) {
      node.attributes[name] = *field.value;
    } else {
      names.push_back(name);
    }
  }
  ASSIGN_OR_RETURN(const auto values, ReadFields(json, path, names));
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string name(names[i]);
    ASSIGN_OR_RETURN(node.attributes[name],
                     ReadAttribute(*values[i], kind.attributes.find(name)->second.type,
                                   path + "." + name));
  }
  return {};
}

StatusOr<NodeSpec> ReadNode(const Json& json, const std::string& path) {
  ASSIGN_OR_RETURN(const auto fields,
                   ReadFields(json, path, {"attributes", "inputs", "kind", "outputs"}));
  NodeSpec node;
  ASSIGN_OR_RETURN(node.kind, ReadString(*fields[2], path + ".kind"));
  const NodeKind* kind = FindNodeKind(node.kind);
  if (kind == nullptr) {
    std::string known;
    for (const NodeKind& each : NodeKinds()) {
      if (!known.empty()) known += ", ";
      known += each.name;
    }
    return InvalidArgument("node kind " + Quoted(node.kind) + " is not one of " +
                           known +
                           ". Export a program of another version of jax_cudnn again");
  }
  RETURN_IF_ERROR(ReadRoles(*fields[1], path + ".inputs", node.inputs));
  RETURN_IF_ERROR(ReadRoles(*fields[3], path + ".outputs", node.outputs));
  RETURN_IF_ERROR(ReadAttributes(*kind, *fields[0], path + ".attributes", node));
  return node;
}

// --- checking -----------------------------------------------------------------------

Status CheckTensor(const TensorSpec& tensor) {
  if (!IsIdentifier(tensor.name)) {
    return InvalidArgument("tensor name " + Quoted(tensor.name) +
                           " is not an ASCII identifier");
  }
  const std::string where = "tensor " + Quoted(tensor.name);
  const size_t rank = tensor.dims.size();
  if (rank < 1 || rank > kMaxRank) {
    return InvalidArgument(where + ": rank " + std::to_string(rank) + " is not 1 to " +
                           std::to_string(kMaxRank));
  }
  int64_t elements = 1;
  bool overflows = false;
  for (int64_t dim : tensor.dims) {
    if (dim < 0) {
      return InvalidArgument(where + ": dims " + ListText(tensor.dims) +
                             " has a negative entry");
    }
    overflows |= __builtin_mul_overflow(elements, std::max<int64_t>(dim, 1), &elements);
  }
  if (overflows) {
    return InvalidArgument(where + ": dims " + ListText(tensor.dims) +
                           " overflow 64 bits");
  }
  std::vector<int64_t> axes = tensor.order;
  std::sort(axes.begin(), axes.end());
  bool is_permutation = axes.size() == rank;
  for (size_t i = 0; is_permutation && i < rank; ++i) {
    is_permutation = axes[i] == static_cast<int64_t>(i);
  }
  if (!is_permutation) {
    return InvalidArgument(where + ": order " + ListText(tensor.order) +
                           " is not a permutation of the " + std::to_string(rank) +
                           " axes");
  }
  return {};
}

Status CheckRoles(const GraphSpec& graph, const NodeSpec& node,
                  const std::map<std::string, std::string, std::less<>>& roles,
                  bool are_inputs) {
  const NodeKind& kind = FindNodeKind(node.kind)->Form(node.inputs);
  const char* const label = are_inputs ? "input" : "output";
  for (const auto& [role, name] : roles) {
    const Role* known = kind.Find(role);
    if (known == nullptr || known->is_input != are_inputs) {
      return InvalidArgument(node.kind + ": unknown " + label + " role " +
                             Quoted(role));
    }
    if (graph.IndexOf(name) < 0) {
      return InvalidArgument(node.kind + ": " + role + " names unknown tensor " +
                             Quoted(name));
    }
  }
  for (const Role& role : kind.roles) {
    const bool is_needed = role.is_required && role.is_input == are_inputs;
    if (is_needed && roles.find(role.name) == roles.end()) {
      return InvalidArgument(node.kind + ": " + label + " " + Quoted(role.name) +
                             " is missing");
    }
  }
  return {};
}

Status CheckNode(const GraphSpec& graph, const NodeSpec& node) {
  const NodeKind& kind = FindNodeKind(node.kind)->Form(node.inputs);
  RETURN_IF_ERROR(CheckRoles(graph, node, node.inputs, /*are_inputs=*/true));
  RETURN_IF_ERROR(CheckRoles(graph, node, node.outputs, /*are_inputs=*/false));
  RETURN_IF_ERROR(CheckAttributes(kind, node));
  Roles roles;
  for (const auto& [role, name] : node.inputs) roles[role] = &graph.Tensor(name);
  for (const auto& [role, name] : node.outputs) roles[role] = &graph.Tensor(name);
  RETURN_IF_ERROR(CheckTensors(kind, node, roles));
  const bool has_score_mod = kind.attributes.find("score_mod") != kind.attributes.end();
  return has_score_mod ? CheckScoreMod(node) : Status();
}

Status CheckNames(const GraphSpec& graph, const char* label,
                  const std::vector<std::string>& names) {
  if (std::set<std::string>(names.begin(), names.end()).size() != names.size()) {
    return InvalidArgument("graph " + std::string(label) + " " + NamesText(names) +
                           " name a tensor twice");
  }
  for (const std::string& name : names) {
    if (graph.IndexOf(name) < 0) {
      return InvalidArgument("graph " + std::string(label) +
                             " name an unknown tensor " + Quoted(name));
    }
  }
  return {};
}

// Every tensor is an input or made exactly once, before it is read.
Status CheckFlow(const GraphSpec& graph) {
  std::set<std::string, std::less<>> known(graph.inputs.begin(), graph.inputs.end());
  for (const NodeSpec& node : graph.nodes) {
    RETURN_IF_ERROR(CheckNode(graph, node));
    for (const auto& [role, name] : node.inputs) {
      if (known.count(name) == 0) {
        return InvalidArgument(node.kind + " reads " + role + "=" + Quoted(name) +
                               " before it is made");
      }
    }
    for (const auto& [role, name] : node.outputs) {
      if (!known.insert(name).second) {
        return InvalidArgument(node.kind + " makes " + role + "=" + Quoted(name) +
                               " a second time");
      }
    }
  }
  std::vector<std::string> unused;
  for (const TensorSpec& tensor : graph.tensors) {
    if (known.count(tensor.name) == 0) unused.push_back(tensor.name);
  }
  if (!unused.empty()) {
    return InvalidArgument("tensors " + NamesText(unused) +
                           " are neither inputs nor made by a node");
  }
  for (const std::string& name : graph.outputs) {
    if (Contains(graph.inputs, name)) {
      return InvalidArgument(Quoted(name) + " is both an input and an output");
    }
  }
  return {};
}

Status CheckGraph(const GraphSpec& graph) {
  for (size_t i = 1; i < graph.tensors.size(); ++i) {
    if (graph.tensors[i].name == graph.tensors[i - 1].name) {
      return InvalidArgument("two tensors have the same name");
    }
  }
  RETURN_IF_ERROR(CheckNames(graph, "inputs", graph.inputs));
  RETURN_IF_ERROR(CheckNames(graph, "outputs", graph.outputs));
  if (graph.nodes.empty() || graph.outputs.empty()) {
    return InvalidArgument("a graph needs at least one node and one output");
  }
  return CheckFlow(graph);
}

// --- writing ------------------------------------------------------------------------

// Writes `items` between two brackets with commas, each through `write`.
template <typename Items, typename Write>
void WriteJoined(const char* brackets, const Items& items, std::string& out,
                 Write&& write) {
  out += brackets[0];
  bool is_first = true;
  for (const auto& item : items) {
    if (!is_first) out += ',';
    is_first = false;
    write(item);
  }
  out += brackets[1];
}

void WriteList(const std::vector<int64_t>& values, std::string& out) {
  WriteJoined("[]", values, out, [&](int64_t value) { out += std::to_string(value); });
}

void WriteList(const std::vector<std::string>& values, std::string& out) {
  WriteJoined("[]", values, out,
              [&](const std::string& value) { WriteJsonString(value, out); });
}

// Writes one scalar or list attribute.
struct AttributeWriter {
  std::string& out;

  void operator()(bool value) const { out += value ? "true" : "false"; }
  void operator()(int64_t value) const { out += std::to_string(value); }
  void operator()(double value) const { WriteJsonNumber(value, out); }
  void operator()(const std::string& value) const { WriteJsonString(value, out); }
  template <typename Item>
  void operator()(const std::vector<Item>& value) const {
    WriteList(value, out);
  }
};

void WriteRoles(const std::map<std::string, std::string, std::less<>>& roles,
                std::string& out) {
  WriteJoined("{}", roles, out, [&](const auto& item) {
    WriteJsonString(item.first, out);
    out += ':';
    WriteJsonString(item.second, out);
  });
}

void WriteNode(const NodeSpec& node, std::string& out) {
  out += "{\"attributes\":";
  const NodeKind& kind = *FindNodeKind(node.kind);
  std::vector<std::pair<std::string_view, const AttributeValue*>> written;
  for (const auto& [name, value] : node.attributes) {
    if (kind.attributes.find(name)->second.value != value) {
      written.emplace_back(name, &value);
    }
  }
  WriteJoined("{}", written, out, [&](const auto& item) {
    WriteJsonString(item.first, out);
    out += ':';
    std::visit(AttributeWriter{out}, *item.second);
  });
  out += ",\"inputs\":";
  WriteRoles(node.inputs, out);
  out += ",\"kind\":";
  WriteJsonString(node.kind, out);
  out += ",\"outputs\":";
  WriteRoles(node.outputs, out);
  out += '}';
}

void WriteTensor(const TensorSpec& tensor, std::string& out) {
  out += "{\"dims\":";
  WriteList(tensor.dims, out);
  out += ",\"dtype\":";
  WriteJsonString(DTypeName(tensor.dtype), out);
  out += ",\"name\":";
  WriteJsonString(tensor.name, out);
  out += ",\"order\":";
  WriteList(tensor.order, out);
  out += '}';
}

}  // namespace

std::string ListText(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (int64_t value : values) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(value);
  }
  return text + "]";
}

std::vector<int64_t> TensorSpec::StoredShape() const {
  std::vector<int64_t> shape;
  shape.reserve(order.size());
  for (int64_t axis : order) shape.push_back(dims[static_cast<size_t>(axis)]);
  return shape;
}

std::vector<int64_t> TensorSpec::Strides() const {
  if (within.has_value()) return within->strides;
  std::vector<int64_t> strides(dims.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const auto axis = static_cast<size_t>(order[i]);
    strides[axis] = stride;
    stride *= std::max<int64_t>(dims[axis], 1);
  }
  return strides;
}

bool TensorSpec::IsEmpty() const {
  return std::find(dims.begin(), dims.end(), 0) != dims.end();
}

int64_t GraphSpec::IndexOf(std::string_view name) const {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const TensorSpec& tensor, std::string_view key) { return tensor.name < key; });
  if (found == tensors.end() || found->name != name) return -1;
  return found - tensors.begin();
}

StatusOr<GraphSpec> ParseGraph(std::string_view text) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(text, "graph"));
  ASSIGN_OR_RETURN(
      const auto fields,
      ReadFields(json, "graph", {"inputs", "nodes", "outputs", "schema", "tensors"}));
  ASSIGN_OR_RETURN(const int64_t schema, ReadInteger(*fields[3], "graph.schema"));
  if (schema != kGraphSchema) {
    return InvalidArgument("graph.schema: " + std::to_string(schema) + " is not " +
                           std::to_string(kGraphSchema) + ", the one known here");
  }
  GraphSpec graph;
  ASSIGN_OR_RETURN(const JsonList* tensors, ReadList(*fields[4], "graph.tensors"));
  for (size_t i = 0; i < tensors->size(); ++i) {
    ASSIGN_OR_RETURN(
        TensorSpec tensor,
        ReadTensor((*tensors)[i], "graph.tensors[" + std::to_string(i) + "]"));
    RETURN_IF_ERROR(CheckTensor(tensor));
    graph.tensors.push_back(std::move(tensor));
  }
  std::stable_sort(
      graph.tensors.begin(), graph.tensors.end(),
      [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  ASSIGN_OR_RETURN(const JsonList* nodes, ReadList(*fields[1], "graph.nodes"));
  for (size_t i = 0; i < nodes->size(); ++i) {
    ASSIGN_OR_RETURN(NodeSpec node,
                     ReadNode((*nodes)[i], "graph.nodes[" + std::to_string(i) + "]"));
    graph.nodes.push_back(std::move(node));
  }
  ASSIGN_OR_RETURN(graph.inputs, ReadStrings(*fields[0], "graph.inputs"));
  ASSIGN_OR_RETURN(graph.outputs, ReadStrings(*fields[2], "graph.outputs"));
  RETURN_IF_ERROR(CheckGraph(graph));
  if (WriteGraph(graph) != text) {
    return InvalidArgument("graph: the text is valid but not in canonical form");
  }
  return graph;
}

std::string WriteGraph(const GraphSpec& graph) {
  std::string out = "{\"inputs\":";
  WriteList(graph.inputs, out);
  out += ",\"nodes\":";
  WriteJoined("[]", graph.nodes, out, [&](const NodeSpec& n) { WriteNode(n, out); });
  out += ",\"outputs\":";
  WriteList(graph.outputs, out);
  out += ",\"schema\":" + std::to_string(kGraphSchema) + ",\"tensors\":";
  WriteJoined("[]", graph.tensors, out,
              [&](const TensorSpec& t) { WriteTensor(t, out); });
  return out + "}";
}

}  // namespace jax_cudnn
