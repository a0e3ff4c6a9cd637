// SPDX-License-Identifier: Apache-2.0
// The frontend's graph while it is written, seen from one node: tensors by their roles.

#ifndef JAX_CUDNN_NODE_WRITER_H_
#define JAX_CUDNN_NODE_WRITER_H_

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "frontend/frontend_graph.h"
#include "frontend/graph_style.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

using TensorPtr = std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>;

// Keeps references to what it is made from.
class NodeWriter {
 public:
  NodeWriter(const GraphSpec& spec, FrontendGraph& graph, const GraphStyle& style)
      : spec_(spec),
        graph_(graph),
        variant_(style.variant),
        is_deterministic_(style.deterministic) {}

  // All else is said of the node that was entered last.
  void Enter(const NodeSpec& node) { node_ = &node; }
  const NodeSpec& node() const { return *node_; }
  FrontendGraph& graph() { return graph_; }
  int variant() const { return variant_; }
  bool is_deterministic() const { return is_deterministic_; }

  bool Has(std::string_view role) const { return FindName(role) != nullptr; }
  const TensorSpec& Spec(std::string_view role) const {
    return spec_.Tensor(*FindName(role));
  }
  bool IsResult(std::string_view role) const { return IsResultName(*FindName(role)); }

  // The tensor in an input role: what a former node made, or an operand.
  TensorPtr Input(std::string_view role);

  // Likewise, where cuDNN is to see other dims and strides in the same memory.
  TensorPtr InputAs(std::string_view role, const std::vector<int64_t>& dims,
                    const std::vector<int64_t>& strides);

  // A new tensor for an output role that the frontend wants to be given.
  TensorPtr NewOutput(std::string_view role);

  // Makes an output role a scalar that travels with the plan.
  template <typename Value>
  void Constant(std::string_view role, Value value) {
    const std::string& name = *FindName(role);
    const TensorSpec& spec = spec_.Tensor(name);
    using Attributes = cudnn_frontend::graph::Tensor_attributes;
    tensors_[name] = graph_.tensor(Attributes(value)
                                       .set_uid(TensorUid(spec_, name))
                                       .set_name(name)
                                       .set_dim(spec.dims)
                                       .set_stride(spec.Strides()));
  }

  // Gives the tensor that the frontend made for an output role its name and layout.
  void Output(std::string_view role, const TensorPtr& tensor);

 private:
  const std::string* FindName(std::string_view role) const;
  cudnn_frontend::graph::Tensor_attributes Describe(const std::string& name) const;
  void Finish(const std::string& name, const TensorPtr& tensor);
  bool IsResultName(const std::string& name) const;

  const GraphSpec& spec_;
  FrontendGraph& graph_;
  const int variant_;
  const bool is_deterministic_;
  const NodeSpec* node_ = nullptr;
  std::map<std::string, TensorPtr> tensors_;
};

// The dtype in which a node with tensors in these roles computes.
cudnn_frontend::DataType_t ComputeDType(const NodeWriter& writer,
                                        std::initializer_list<std::string_view> roles);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_NODE_WRITER_H_
