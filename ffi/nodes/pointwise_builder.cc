// SPDX-License-Identifier: Apache-2.0
// The frontend's pointwise operations, constants and reductions, from our roles and
// attributes.

#include "nodes/pointwise_builder.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;

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

constexpr std::pair<std::string_view, fe::ReductionMode_t> kReductionModes[] = {
    {"add", fe::ReductionMode_t::ADD},
    {"max", fe::ReductionMode_t::MAX},
    {"min", fe::ReductionMode_t::MIN},
};

// cuDNN wants a tensor that is broadcast to come second; where it may, it does.
bool IsBetterSwapped(const NodeWriter& writer, Mode mode) {
  const auto& dims = writer.Spec("output").dims;
  return Commutes(mode) && writer.Spec("a").dims != dims &&
         writer.Spec("b").dims == dims;
}

}  // namespace

fe::graph::Pointwise_attributes PointwiseMode(const std::string& name, float alpha) {
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

bool Commutes(Mode mode) {
  return mode == Mode::ADD || mode == Mode::MUL || mode == Mode::MAX ||
         mode == Mode::MIN;
}

// A backward mode takes the cotangent first, a selection the predicate last: as we do.
Status AddPointwise(NodeWriter& writer) {
  const NodeSpec& node = writer.node();
  auto attributes = PointwiseMode(node.Attribute<std::string>("mode"),
                                  static_cast<float>(node.Attribute<double>("alpha")));
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
  const auto mode = writer.node().Attribute<std::string>("mode");
  const auto* row = std::find_if(std::begin(kReductionModes), std::end(kReductionModes),
                                 [&](const auto& each) { return each.first == mode; });
  fe::graph::Reduction_attributes attributes;
  // The shape rule knows the same names: a row is found.
  attributes.set_name(mode)
      .set_mode(row->second)
      .set_is_deterministic(writer.is_deterministic())
      .set_compute_data_type(ComputeDType(writer, {"input", "output"}));
  writer.Output("output",
                writer.graph().reduction(writer.Input("input"), std::move(attributes)));
  return {};
}

}  // namespace jax_cudnn
