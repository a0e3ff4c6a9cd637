// SPDX-License-Identifier: Apache-2.0
// The frontend's norms and their gradients, from our roles and attributes.

#include "nodes/norm_builder.h"

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;

// What the Python side gives where users leave it out.
Status RequireRoles(const NodeWriter& writer,
                    std::initializer_list<std::string_view> roles) {
  for (const std::string_view role : roles) {
    if (!writer.Has(role)) {
      return Unimplemented(writer.node().kind + ": cuDNN takes no norm without " +
                           std::string(role) + "; give it");
    }
  }
  return {};
}

// What the Python side adds to the gradient of x itself.
Status RefuseStatisticsGradients(const NodeWriter& writer) {
  for (const std::string_view role : {"grad_mean", "grad_rstd"}) {
    if (writer.Has(role)) {
      return Unimplemented(writer.node().kind + ": cuDNN has no " + std::string(role) +
                           " operand; add its part to grad_x");
    }
  }
  return {};
}

Status CheckBackward(const NodeWriter& writer) {
  RETURN_IF_ERROR(RefuseStatisticsGradients(writer));
  return RequireRoles(writer, {"scale", "grad_x", "grad_scale", "grad_bias"});
}

// The rows of a batch norm are the positions of one image for cuDNN, channels last.
std::vector<int64_t> ImageDims(const TensorSpec& spec) {
  return {1, spec.dims[1], spec.dims[0], 1};
}

std::vector<int64_t> ImageStrides(const TensorSpec& spec) {
  const int64_t channels = spec.dims[1];
  return {spec.dims[0] * channels, 1, channels, channels};
}

TensorPtr ImageInput(NodeWriter& writer, std::string_view role) {
  const TensorSpec& spec = writer.Spec(role);
  return writer.InputAs(role, ImageDims(spec), ImageStrides(spec));
}

void ImageOutput(NodeWriter& writer, std::string_view role, const TensorPtr& tensor) {
  const TensorSpec& spec = writer.Spec(role);
  writer.Output(role, tensor);
  tensor->set_dim(ImageDims(spec)).set_stride(ImageStrides(spec));
}

// A number that travels with the plan.
TensorPtr Epsilon(const NodeWriter& writer) {
  return std::make_shared<fe::graph::Tensor_attributes>(
      static_cast<float>(writer.node().Attribute<double>("epsilon")));
}

// What is computed of two tensors beside the norm; `part` names it within the node.
TensorPtr Beside(NodeWriter& writer, const char* part, fe::PointwiseMode_t mode,
                 const TensorPtr& a, const TensorPtr& b) {
  fe::graph::Pointwise_attributes attributes;
  attributes.set_name(writer.node().kind + part)
      .set_mode(mode)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  return writer.graph().pointwise(a, b, std::move(attributes));
}

// The output as the norm gives it, or multiplied on its way to f8, which cuDNN does not
// write otherwise.
void NormOutput(NodeWriter& writer, const TensorPtr& output) {
  if (!writer.Has("scale_output")) {
    writer.Output("output", output);
    return;
  }
  writer.Output("output", Beside(writer, "_scale_output", fe::PointwiseMode_t::MUL,
                                 output, writer.Input("scale_output")));
}

// What is normalised: x, or its sum with the residual, which is written as well.
TensorPtr NormInput(NodeWriter& writer) {
  if (!writer.Has("residual")) return writer.Input("x");
  TensorPtr total = Beside(writer, "_residual", fe::PointwiseMode_t::ADD,
                           writer.Input("x"), writer.Input("residual"));
  writer.Output("total", total);
  return total;
}

// The statistics are results of the training phase, all of them or none.
template <typename NormAttributes>
Status SetForward(const NodeWriter& writer, NormAttributes& attributes,
                  std::initializer_list<std::string_view> statistics) {
  attributes.set_name(writer.node().kind);
  TensorPtr epsilon = Epsilon(writer);
  attributes.set_epsilon(epsilon);
  const bool is_training = writer.Has("rstd");
  attributes.set_forward_phase(is_training ? fe::NormFwdPhase_t::TRAINING
                                           : fe::NormFwdPhase_t::INFERENCE);
  return is_training ? RequireRoles(writer, statistics) : Status();
}

// A norm with a mean: `add` is the frontend's function.
template <typename NormAttributes, typename Add>
Status AddForward(NodeWriter& writer, Add add) {
  RETURN_IF_ERROR(RequireRoles(writer, {"scale", "bias"}));
  NormAttributes attributes;
  RETURN_IF_ERROR(SetForward(writer, attributes, {"mean", "rstd"}));
  const std::array<TensorPtr, 3> results =
      (writer.graph().*add)(NormInput(writer), writer.Input("scale"),
                            writer.Input("bias"), std::move(attributes));
  NormOutput(writer, results[0]);
  if (writer.Has("rstd")) {
    writer.Output("mean", results[1]);
    writer.Output("rstd", results[2]);
  }
  return {};
}

// Likewise, its gradient.
template <typename NormAttributes, typename Add>
Status AddBackward(NodeWriter& writer, Add add) {
  RETURN_IF_ERROR(RefuseStatisticsGradients(writer));
  RETURN_IF_ERROR(RequireRoles(writer, {"scale", "grad_x", "grad_scale", "grad_bias"}));
  NormAttributes attributes;
  attributes.set_name(writer.node().kind);
  attributes.set_saved_mean_and_inv_variance(writer.Input("mean"),
                                             writer.Input("rstd"));
  const std::array<TensorPtr, 3> results =
      (writer.graph().*add)(writer.Input("grad_output"), writer.Input("x"),
                            writer.Input("scale"), std::move(attributes));
  writer.Output("grad_x", results[0]);
  writer.Output("grad_scale", results[1]);
  writer.Output("grad_bias", results[2]);
  return {};
}

// cuDNN has a norm of each channel by itself.
Status RequireSingleChannels(const NodeWriter& writer) {
  const auto& dims = writer.Spec("x").dims;
  if (dims[2] == 1) return {};
  return Unimplemented(writer.node().kind +
                       ": cuDNN normalises one channel at a time, "
                       "not groups of " +
                       std::to_string(dims[2]) + "; write it as a layer norm");
}

}  // namespace

Status AddAdaptiveLayerNorm(NodeWriter& writer) {
  return AddForward<fe::graph::AdaLayernorm_attributes>(writer,
                                                        &FrontendGraph::adalayernorm);
}

Status AddAdaptiveLayerNormBackward(NodeWriter& writer) {
  return AddBackward<fe::graph::AdaLayernorm_backward_attributes>(
      writer, &FrontendGraph::adalayernorm_backward);
}

Status AddBatchNorm(NodeWriter& writer) {
  RETURN_IF_ERROR(RequireRoles(writer, {"scale", "bias", "mean", "rstd"}));
  fe::graph::Batchnorm_attributes attributes;
  attributes.set_name(writer.node().kind);
  TensorPtr epsilon = Epsilon(writer);
  attributes.set_epsilon(epsilon);
  const auto results =
      writer.graph().batchnorm(ImageInput(writer, "x"), ImageInput(writer, "scale"),
                               ImageInput(writer, "bias"), std::move(attributes));
  ImageOutput(writer, "output", results[0]);
  ImageOutput(writer, "mean", results[1]);
  ImageOutput(writer, "rstd", results[2]);
  return {};
}

Status AddBatchNormBackward(NodeWriter& writer) {
  RETURN_IF_ERROR(CheckBackward(writer));
  fe::graph::Batchnorm_backward_attributes attributes;
  attributes.set_name(writer.node().kind);
  attributes.set_saved_mean_and_inv_variance(ImageInput(writer, "mean"),
                                             ImageInput(writer, "rstd"));
  const auto results = writer.graph().batchnorm_backward(
      ImageInput(writer, "grad_output"), ImageInput(writer, "x"),
      ImageInput(writer, "scale"), std::move(attributes));
  ImageOutput(writer, "grad_x", results[0]);
  ImageOutput(writer, "grad_scale", results[1]);
  ImageOutput(writer, "grad_bias", results[2]);
  return {};
}

Status AddGroupNorm(NodeWriter& writer) {
  RETURN_IF_ERROR(RequireSingleChannels(writer));
  return AddForward<fe::graph::Instancenorm_attributes>(writer,
                                                        &FrontendGraph::instancenorm);
}

Status AddGroupNormBackward(NodeWriter& writer) {
  RETURN_IF_ERROR(RequireSingleChannels(writer));
  return AddBackward<fe::graph::Instancenorm_backward_attributes>(
      writer, &FrontendGraph::instancenorm_backward);
}

Status AddLayerNorm(NodeWriter& writer) {
  return AddForward<fe::graph::Layernorm_attributes>(writer, &FrontendGraph::layernorm);
}

Status AddLayerNormBackward(NodeWriter& writer) {
  return AddBackward<fe::graph::Layernorm_backward_attributes>(
      writer, &FrontendGraph::layernorm_backward);
}

Status AddRmsNorm(NodeWriter& writer) {
  RETURN_IF_ERROR(RequireRoles(writer, {"scale"}));
  fe::graph::Rmsnorm_attributes attributes;
  RETURN_IF_ERROR(SetForward(writer, attributes, {"rstd"}));
  if (writer.Has("bias")) {
    TensorPtr bias = writer.Input("bias");
    attributes.set_bias(bias);
  }
  const auto [output, rstd] = writer.graph().rmsnorm(
      NormInput(writer), writer.Input("scale"), std::move(attributes));
  NormOutput(writer, output);
  if (writer.Has("rstd")) writer.Output("rstd", rstd);
  return {};
}

Status AddRmsNormBackward(NodeWriter& writer) {
  RETURN_IF_ERROR(RefuseStatisticsGradients(writer));
  RETURN_IF_ERROR(RequireRoles(writer, {"scale", "grad_x", "grad_scale"}));
  fe::graph::Rmsnorm_backward_attributes attributes;
  attributes.set_name(writer.node().kind);
  attributes.has_dbias(writer.Has("grad_bias"));
  const auto [grad_x, grad_scale, grad_bias] = writer.graph().rmsnorm_backward(
      writer.Input("grad_output"), writer.Input("x"), writer.Input("scale"),
      writer.Input("rstd"), std::move(attributes));
  writer.Output("grad_x", grad_x);
  writer.Output("grad_scale", grad_scale);
  if (writer.Has("grad_bias")) writer.Output("grad_bias", grad_bias);
  return {};
}

}  // namespace jax_cudnn
