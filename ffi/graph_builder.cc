// SPDX-License-Identifier: Apache-2.0
// The builder functions, one per node kind.

#include "graph_builder.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;
using Attributes = fe::graph::Tensor_attributes;
using TensorPtr = std::shared_ptr<Attributes>;

fe::DataType_t FrontendDType(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return fe::DataType_t::BOOLEAN;
    case DType::kU8:
      return fe::DataType_t::UINT8;
    case DType::kI8:
      return fe::DataType_t::INT8;
    case DType::kI32:
      return fe::DataType_t::INT32;
    case DType::kI64:
      return fe::DataType_t::INT64;
    case DType::kF8E4m3fn:
      return fe::DataType_t::FP8_E4M3;
    case DType::kF8E5m2:
      return fe::DataType_t::FP8_E5M2;
    case DType::kBf16:
      return fe::DataType_t::BFLOAT16;
    case DType::kF16:
      return fe::DataType_t::HALF;
    case DType::kF32:
      return fe::DataType_t::FLOAT;
    case DType::kF64:
      return fe::DataType_t::DOUBLE;
  }
  return fe::DataType_t::NOT_SET;
}

// The graph being written, seen from one node.
class NodeWriter {
 public:
  NodeWriter(const GraphSpec& spec, FrontendGraph& graph, int variant)
      : spec_(spec), graph_(graph), variant_(variant) {}

  void Enter(const NodeSpec& node) { node_ = &node; }
  const NodeSpec& node() const { return *node_; }
  FrontendGraph& graph() { return graph_; }
  int variant() const { return variant_; }

  bool Has(std::string_view role) const { return FindName(role) != nullptr; }

  // The tensor in an input role: what a former node made, or an operand.
  TensorPtr Input(std::string_view role) {
    const std::string& name = *FindName(role);
    TensorPtr& tensor = tensors_[name];
    if (tensor == nullptr) tensor = graph_.tensor(Describe(name));
    return tensor;
  }

  // A new tensor for an output role that the frontend wants to be given.
  TensorPtr NewOutput(std::string_view role) {
    const std::string& name = *FindName(role);
    const TensorPtr tensor = graph_.tensor(Describe(name));
    Finish(name, tensor);
    return tensor;
  }

  // Gives the tensor that the frontend made for an output role its name and layout.
  void Output(std::string_view role, const TensorPtr& tensor) {
    const std::string& name = *FindName(role);
    const TensorSpec& spec = spec_.Tensor(name);
    tensor->set_uid(TensorUid(spec_, name))
        .set_name(name)
        .set_dim(spec.dims)
        .set_stride(spec.Strides())
        .set_data_type(FrontendDType(spec.dtype));
    Finish(name, tensor);
  }

 private:
  const std::string* FindName(std::string_view role) const {
    for (const auto* roles : {&node_->inputs, &node_->outputs}) {
      if (const auto found = roles->find(role); found != roles->end()) {
        return &found->second;
      }
    }
    return nullptr;
  }

  Attributes Describe(const std::string& name) const {
    const TensorSpec& spec = spec_.Tensor(name);
    return Attributes()
        .set_uid(TensorUid(spec_, name))
        .set_name(name)
        .set_dim(spec.dims)
        .set_stride(spec.Strides())
        .set_data_type(FrontendDType(spec.dtype));
  }

  void Finish(const std::string& name, const TensorPtr& tensor) {
    const auto& outputs = spec_.outputs;
    if (std::find(outputs.begin(), outputs.end(), name) != outputs.end()) {
      tensor->set_output(true);
    }
    tensors_[name] = tensor;
  }

  const GraphSpec& spec_;
  FrontendGraph& graph_;
  const int variant_;
  const NodeSpec* node_ = nullptr;
  std::map<std::string, TensorPtr> tensors_;
};

// --- attention ----------------------------------------------------------------------

// Roles that the Python side rewrites before a graph comes here, because cuDNN has no
// such operand.
Status RefuseRole(const NodeWriter& writer, std::string_view role,
                  const std::string& instead) {
  if (!writer.Has(role)) return {};
  return Unimplemented(writer.node().kind + ": cuDNN has no " + std::string(role) +
                       " operand; " + instead);
}

// What forward and backward attributes have in common.
template <typename SdpaAttributes>
Status SetSdpaAttributes(NodeWriter& writer, SdpaAttributes& attributes) {
  RETURN_IF_ERROR(RefuseRole(writer, "mask", "give it as a bias"));
  RETURN_IF_ERROR(RefuseRole(writer, "grad_stats", "fold it into the output"));
  if (writer.Has("query_lengths") != writer.Has("key_lengths")) {
    return Unimplemented(writer.node().kind +
                         ": cuDNN takes query_lengths and key_lengths together; "
                         "give both");
  }
  const NodeSpec& node = writer.node();
  attributes.set_name(node.kind);
  attributes.set_attn_scale(static_cast<float>(node.Attribute<double>("scale")));
  if (node.Attribute<bool>("is_causal")) {
    attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
  }
  if (writer.Has("bias")) attributes.set_bias(writer.Input("bias"));
  if (writer.Has("query_lengths")) {
    attributes.set_padding_mask(true)
        .set_seq_len_q(writer.Input("query_lengths"))
        .set_seq_len_kv(writer.Input("key_lengths"));
  }
  return {};
}

// Variant 0 lets the frontend choose between its unified and its composite operation.
// It prefers the unified one by looking at the graph only, and does not come back when
// cuDNN has no plan for that; variant 1 asks for the composite one.
Status AddSdpa(NodeWriter& writer) {
  fe::graph::SDPA_attributes attributes;
  RETURN_IF_ERROR(SetSdpaAttributes(writer, attributes));
  attributes.set_generate_stats(writer.Has("stats"))
      .set_implementation(writer.variant() == 0
                              ? fe::AttentionImplementation_t::AUTO
                              : fe::AttentionImplementation_t::COMPOSITE);
  const auto [output, stats] =
      writer.graph().sdpa(writer.Input("query"), writer.Input("key"),
                          writer.Input("value"), std::move(attributes));
  writer.Output("output", output);
  if (writer.Has("stats")) writer.Output("stats", stats);
  return {};
}

Status AddSdpaBackward(NodeWriter& writer) {
  fe::graph::SDPA_backward_attributes attributes;
  RETURN_IF_ERROR(SetSdpaAttributes(writer, attributes));
  if (writer.Has("grad_bias")) attributes.set_dbias(writer.NewOutput("grad_bias"));
  const auto [grad_query, grad_key, grad_value] = writer.graph().sdpa_backward(
      writer.Input("query"), writer.Input("key"), writer.Input("value"),
      writer.Input("output"), writer.Input("grad_output"), writer.Input("stats"),
      std::move(attributes));
  writer.Output("grad_query", grad_query);
  writer.Output("grad_key", grad_key);
  writer.Output("grad_value", grad_value);
  return {};
}

// --- the table ----------------------------------------------------------------------

struct KindBuilder {
  std::string_view kind;
  int variants;
  Status (*add)(NodeWriter&);
};

constexpr KindBuilder kBuilders[] = {
    {"sdpa", 2, AddSdpa},
    {"sdpa_backward", 1, AddSdpaBackward},
};

const KindBuilder* FindBuilder(std::string_view kind) {
  for (const KindBuilder& builder : kBuilders) {
    if (builder.kind == kind) return &builder;
  }
  return nullptr;
}

}  // namespace

int VariantCount(const GraphSpec& graph) {
  int count = 1;
  for (const NodeSpec& node : graph.nodes) {
    const KindBuilder* builder = FindBuilder(node.kind);
    if (builder != nullptr) count = std::max(count, builder->variants);
  }
  return count;
}

StatusOr<std::unique_ptr<FrontendGraph>> BuildFrontendGraph(const GraphSpec& graph,
                                                            const GraphStyle& style) {
  for (const TensorSpec& tensor : graph.tensors) {
    if (tensor.IsEmpty()) {
      return Unimplemented("tensor '" + tensor.name + "' with dims " +
                           ListText(tensor.dims) +
                           " has no elements; such a graph must not reach cuDNN");
    }
  }
  auto result = std::make_unique<FrontendGraph>();
  // Before any node: a node copies what the graph knows of the device.
  if (style.device_properties != nullptr) {
    result->set_device_properties(style.device_properties);
  }
  result->set_sm_version(style.sm_version);
  if (style.sm_count > 0) result->set_sm_count(style.sm_count);
  result->set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  NodeWriter writer(graph, *result, style.variant);
  for (const NodeSpec& node : graph.nodes) {
    const KindBuilder* builder = FindBuilder(node.kind);
    if (builder == nullptr) {
      return Unimplemented("node kind '" + node.kind + "' has no cuDNN operation");
    }
    writer.Enter(node);
    RETURN_IF_ERROR(builder->add(writer));
  }
  return result;
}

}  // namespace jax_cudnn
