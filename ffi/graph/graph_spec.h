// SPDX-License-Identifier: Apache-2.0
// A graph specification as data, and its canonical JSON text.
//
// The C++ twin of jax_cudnn/graph: both sides read and write the same bytes. A
// GraphSpec that ParseGraph returned is well formed: names, roles, orders and shapes
// have been checked, so later code may index without checking again.

#ifndef JAX_CUDNN_GRAPH_SPEC_H_
#define JAX_CUDNN_GRAPH_SPEC_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "graph/dtype.h"

namespace jax_cudnn {

// The version of the JSON form; equals SCHEMA in jax_cudnn/graph/spec.py.
inline constexpr int64_t kGraphSchema = 1;

// Where a tensor lies that shares the memory of another one; in elements.
struct TensorPlace {
  std::string of;
  int64_t offset;
  std::vector<int64_t> strides;
};

struct TensorSpec {
  std::string name;
  DType dtype;
  std::vector<int64_t> dims;   // logical
  std::vector<int64_t> order;  // logical axes from slowest to fastest varying

  // In no text: for what is derived from a graph that was read.
  std::optional<TensorPlace> within;

  // The shape of the row-major array that holds the tensor.
  std::vector<int64_t> StoredShape() const;
  // The distance in elements between neighbours along each logical axis.
  std::vector<int64_t> Strides() const;
  bool IsEmpty() const;
};

using AttributeValue = std::variant<bool, int64_t, double, std::string,
                                    std::vector<std::string>, std::vector<int64_t>>;

struct NodeSpec {
  std::string kind;
  std::map<std::string, std::string, std::less<>> inputs;   // role to tensor name
  std::map<std::string, std::string, std::less<>> outputs;  // role to tensor name
  std::map<std::string, AttributeValue, std::less<>> attributes;

  // An attribute that the kind's table declares with type T.
  template <typename T>
  const T& Attribute(std::string_view name) const {
    return std::get<T>(attributes.find(name)->second);
  }
};

struct GraphSpec {
  std::vector<TensorSpec> tensors;   // sorted by name
  std::vector<NodeSpec> nodes;       // in execution order
  std::vector<std::string> inputs;   // the operands, in order
  std::vector<std::string> outputs;  // the results, in order

  // The place of a tensor in `tensors`, or -1.
  int64_t IndexOf(std::string_view name) const;
  const TensorSpec& Tensor(std::string_view name) const {
    return tensors[static_cast<size_t>(IndexOf(name))];
  }
};

// Reads a graph and checks it. Takes nothing but the canonical text; every refusal is
// INVALID_ARGUMENT and names the field or tensor.
StatusOr<GraphSpec> ParseGraph(std::string_view text);

// The canonical text: sorted fields, no white space, ASCII.
std::string WriteGraph(const GraphSpec& graph);

// "[2, 3, 5]", as Python prints a list.
std::string ListText(const std::vector<int64_t>& values);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GRAPH_SPEC_H_
