// SPDX-License-Identifier: Apache-2.0
// The builder functions, one per node kind.

#include "frontend/graph_builder.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
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
  NodeWriter(const GraphSpec& spec, FrontendGraph& graph, const GraphStyle& style)
      : spec_(spec),
        graph_(graph),
        variant_(style.variant),
        is_deterministic_(style.deterministic) {}

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

  // Makes an output role a scalar that travels with the plan.
  template <typename Value>
  void Constant(std::string_view role, Value value) {
    const std::string& name = *FindName(role);
    const TensorSpec& spec = spec_.Tensor(name);
    tensors_[name] = graph_.tensor(Attributes(value)
                                       .set_uid(TensorUid(spec_, name))
                                       .set_name(name)
                                       .set_dim(spec.dims)
                                       .set_stride(spec.Strides()));
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
    if (IsResultName(name)) tensor->set_output(true);
    tensors_[name] = tensor;
  }

  bool IsResultName(const std::string& name) const {
    const auto& outputs = spec_.outputs;
    return std::find(outputs.begin(), outputs.end(), name) != outputs.end();
  }

  const GraphSpec& spec_;
  FrontendGraph& graph_;
  const int variant_;
  const bool is_deterministic_;
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
  attributes.set_deterministic_algorithm(writer.is_deterministic());
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

// --- contractions -------------------------------------------------------------------

// The dtype in which a node computes.
fe::DataType_t ComputeDType(const NodeWriter& writer,
                            std::initializer_list<std::string_view> roles) {
  const bool has_f64 = std::any_of(roles.begin(), roles.end(), [&](auto role) {
    return writer.Has(role) && writer.Spec(role).dtype == DType::kF64;
  });
  return has_f64 ? fe::DataType_t::DOUBLE : fe::DataType_t::FLOAT;
}

// The dtype in which a contraction sums; products of 8-bit integers are summed exactly.
fe::DataType_t SumDType(const NodeWriter& writer, std::string_view a,
                        std::string_view b, std::string_view output) {
  const auto is_byte = [&](std::string_view role) {
    const DType dtype = writer.Spec(role).dtype;
    return dtype == DType::kI8 || dtype == DType::kU8;
  };
  if (is_byte(a) && is_byte(b)) return fe::DataType_t::INT32;
  return ComputeDType(writer, {a, b, output});
}

Status AddMatmul(NodeWriter& writer) {
  writer.Output("output", writer.graph().matmul(writer.Input("a"), writer.Input("b"),
                                                fe::graph::Matmul_attributes()
                                                    .set_name(writer.node().kind)
                                                    .set_compute_data_type(SumDType(
                                                        writer, "a", "b", "output"))));
  return {};
}

// What the Python side rewrites before a graph comes here.
Status RefuseConv(const NodeSpec& node) {
  const auto refuse = [&](const std::string& what) {
    return Unimplemented(node.kind + ": cuDNN has no " + what);
  };
  using List = std::vector<int64_t>;
  const auto& lhs_dilation = node.Attribute<List>("lhs_dilation");
  if (lhs_dilation.size() < 2) {
    return refuse("convolution with one spatial axis; add an axis of size 1");
  }
  if (std::any_of(lhs_dilation.begin(), lhs_dilation.end(),
                  [](int64_t dilation) { return dilation != 1; })) {
    return refuse("lhs_dilation " + ListText(lhs_dilation) +
                  "; write the convolution as the gradient of another");
  }
  for (const char* name : {"padding_low", "padding_high"}) {
    const auto& padding = node.Attribute<List>(name);
    if (std::any_of(padding.begin(), padding.end(),
                    [](int64_t size) { return size < 0; })) {
      return refuse("negative " + std::string(name) + " " + ListText(padding) +
                    "; cut the operand instead");
    }
  }
  return {};
}

// One convolution: `add` is the frontend's function, from `first` and `second`.
template <typename ConvAttributes, typename Add>
Status AddConv(NodeWriter& writer, std::string_view first, std::string_view second,
               std::string_view output, Add add) {
  const NodeSpec& node = writer.node();
  RETURN_IF_ERROR(RefuseConv(node));
  using List = std::vector<int64_t>;
  ConvAttributes attributes;
  attributes.set_name(node.kind)
      .set_compute_data_type(SumDType(writer, first, second, output))
      .set_pre_padding(node.Attribute<List>("padding_low"))
      .set_post_padding(node.Attribute<List>("padding_high"))
      .set_stride(node.Attribute<List>("window_strides"))
      .set_dilation(node.Attribute<List>("rhs_dilation"));
  writer.Output(output, (writer.graph().*add)(writer.Input(first), writer.Input(second),
                                              std::move(attributes)));
  return {};
}

Status AddConvFprop(NodeWriter& writer) {
  return AddConv<fe::graph::Conv_fprop_attributes>(writer, "x", "w", "output",
                                                   &FrontendGraph::conv_fprop);
}

Status AddConvDgrad(NodeWriter& writer) {
  return AddConv<fe::graph::Conv_dgrad_attributes>(writer, "grad_output", "w", "grad_x",
                                                   &FrontendGraph::conv_dgrad);
}

Status AddConvWgrad(NodeWriter& writer) {
  return AddConv<fe::graph::Conv_wgrad_attributes>(writer, "grad_output", "x", "grad_w",
                                                   &FrontendGraph::conv_wgrad);
}

// --- around a contraction -----------------------------------------------------------

using Mode = fe::PointwiseMode_t;

constexpr std::pair<std::string_view, Mode> kPointwiseModes[] = {
    {"abs", Mode::ABS},
    {"add", Mode::ADD},
    {"ceil", Mode::CEIL},
    {"cos", Mode::COS},
    {"div", Mode::DIV},
    {"elu", Mode::ELU_FWD},
    {"elu_grad", Mode::ELU_BWD},
    {"eq", Mode::CMP_EQ},
    {"erf", Mode::ERF},
    {"exp", Mode::EXP},
    {"floor", Mode::FLOOR},
    {"ge", Mode::CMP_GE},
    {"gelu_erf", Mode::GELU_FWD},
    {"gelu_erf_grad", Mode::GELU_BWD},
    {"gelu_tanh", Mode::GELU_APPROX_TANH_FWD},
    {"gelu_tanh_grad", Mode::GELU_APPROX_TANH_BWD},
    {"gt", Mode::CMP_GT},
    {"identity", Mode::IDENTITY},
    {"le", Mode::CMP_LE},
    {"log", Mode::LOG},
    {"lt", Mode::CMP_LT},
    {"max", Mode::MAX},
    {"min", Mode::MIN},
    {"mul", Mode::MUL},
    {"ne", Mode::CMP_NEQ},
    {"neg", Mode::NEG},
    {"pow", Mode::POW},
    {"reciprocal", Mode::RECIPROCAL},
    {"relu", Mode::RELU_FWD},
    {"relu6", Mode::RELU_FWD},
    {"relu6_grad", Mode::RELU_BWD},
    {"relu_grad", Mode::RELU_BWD},
    {"rsqrt", Mode::RSQRT},
    {"select", Mode::BINARY_SELECT},
    {"sigmoid", Mode::SIGMOID_FWD},
    {"sigmoid_grad", Mode::SIGMOID_BWD},
    {"silu", Mode::SWISH_FWD},
    {"silu_grad", Mode::SWISH_BWD},
    {"sin", Mode::SIN},
    {"softplus", Mode::SOFTPLUS_FWD},
    {"softplus_grad", Mode::SOFTPLUS_BWD},
    {"sqrt", Mode::SQRT},
    {"sub", Mode::SUB},
    {"tan", Mode::TAN},
    {"tanh", Mode::TANH_FWD},
    {"tanh_grad", Mode::TANH_BWD},
};

// The mode with its constants; the frontend hands on only those that the mode has.
fe::graph::Pointwise_attributes PointwiseAttributes(const NodeSpec& node) {
  const auto& name = node.Attribute<std::string>("mode");
  const auto alpha = static_cast<float>(node.Attribute<double>("alpha"));
  const auto* row = std::find_if(std::begin(kPointwiseModes), std::end(kPointwiseModes),
                                 [&](const auto& each) { return each.first == name; });
  fe::graph::Pointwise_attributes attributes;
  // The shape rule knows the same names: a row is found.
  attributes.set_name(name)
      .set_mode(row->second)
      .set_relu_lower_clip(0)
      .set_relu_lower_clip_slope(alpha)
      .set_elu_alpha(alpha)
      .set_swish_beta(1)
      .set_softplus_beta(1);
  if (name == "relu6" || name == "relu6_grad") attributes.set_relu_upper_clip(6);
  return attributes;
}

// cuDNN wants a tensor that is broadcast to come second; where it may, it does.
bool IsBetterSwapped(const NodeWriter& writer, Mode mode) {
  const bool commutes =
      mode == Mode::ADD || mode == Mode::MUL || mode == Mode::MAX || mode == Mode::MIN;
  const auto& dims = writer.Spec("output").dims;
  return commutes && writer.Spec("a").dims != dims && writer.Spec("b").dims == dims;
}

// A backward mode takes the cotangent first, a selection the predicate last: as we do.
Status AddPointwise(NodeWriter& writer) {
  auto attributes = PointwiseAttributes(writer.node());
  attributes.set_compute_data_type(ComputeDType(writer, {"a", "b", "c", "output"}));
  auto& graph = writer.graph();
  TensorPtr output;
  if (writer.Has("c")) {
    output = graph.pointwise(writer.Input("a"), writer.Input("b"), writer.Input("c"),
                             std::move(attributes));
  } else if (writer.Has("b")) {
    TensorPtr first = writer.Input("a");
    TensorPtr second = writer.Input("b");
    if (IsBetterSwapped(writer, attributes.get_mode())) std::swap(first, second);
    output = graph.pointwise(first, second, std::move(attributes));
  } else {
    output = graph.pointwise(writer.Input("a"), std::move(attributes));
  }
  writer.Output("output", output);
  return {};
}

Status AddConstant(NodeWriter& writer) {
  if (writer.IsResult("output")) {
    return Unimplemented("constant: cuDNN cannot give a constant as a result");
  }
  const double value = writer.node().Attribute<double>("value");
  if (writer.Spec("output").dtype == DType::kF64) {
    writer.Constant("output", value);
  } else {
    writer.Constant("output", static_cast<float>(value));
  }
  return {};
}

Status AddReduction(NodeWriter& writer) {
  fe::graph::Reduction_attributes attributes;
  attributes.set_name(writer.node().kind)
      .set_mode(fe::ReductionMode_t::ADD)
      .set_is_deterministic(writer.is_deterministic())
      .set_compute_data_type(ComputeDType(writer, {"input", "output"}));
  writer.Output("output",
                writer.graph().reduction(writer.Input("input"), std::move(attributes)));
  return {};
}

// --- the table ----------------------------------------------------------------------

struct KindBuilder {
  std::string_view kind;
  int variants;
  Status (*add)(NodeWriter&);
};

constexpr KindBuilder kBuilders[] = {
    {"constant", 1, AddConstant},
    {"conv_dgrad", 1, AddConvDgrad},
    {"conv_fprop", 1, AddConvFprop},
    {"conv_wgrad", 1, AddConvWgrad},
    {"matmul", 1, AddMatmul},
    {"pointwise", 1, AddPointwise},
    {"reduction", 1, AddReduction},
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

std::optional<int64_t> FrontendGraph::WorkspaceAbove(int64_t limit_bytes,
                                                     int64_t index) {
  // cuDNN's share is compared before a plan is built, and told in words only.
  constexpr std::string_view kMark = "workspace violation. Requires ";
  const int64_t own_bytes = get_fe_workspace_size_subtree();
  plans.set_max_workspace_allowed(limit_bytes - own_bytes);
  const std::string text = plans.check_support_at_index(index).get_message();
  const size_t start = text.find(kMark);
  if (start == std::string::npos) return std::nullopt;
  return own_bytes + std::strtoll(text.c_str() + start + kMark.size(), nullptr, 10);
}

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
  NodeWriter writer(graph, *result, style);
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
