// SPDX-License-Identifier: Apache-2.0
// The frontend's matmuls and convolutions, from our roles and attributes.

#include "nodes/contraction_builder.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;

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

}  // namespace

Status AddMatmul(NodeWriter& writer) {
  writer.Output("output", writer.graph().matmul(writer.Input("a"), writer.Input("b"),
                                                fe::graph::Matmul_attributes()
                                                    .set_name(writer.node().kind)
                                                    .set_compute_data_type(SumDType(
                                                        writer, "a", "b", "output"))));
  return {};
}

// Each operand times the scales of its blocks, which the matmul's kernel reads with it.
Status AddBlockScaledMatmul(NodeWriter& writer) {
  const NodeSpec& node = writer.node();
  if (!node.Attribute<bool>("is_tiled")) {
    return Unimplemented(node.kind + ": cuDNN takes scales in tiles of 128 x 4");
  }
  const int64_t blocks = std::max<int64_t>(writer.Spec("scale_a").dims[2], 1);
  const auto block = static_cast<int32_t>(writer.Spec("a").dims[2] / blocks);
  const fe::DataType_t compute = fe::DataType_t::FLOAT;
  const auto dequantized = [&](std::string_view role, std::string_view scales,
                               std::vector<int32_t> block_size) {
    const TensorPtr scale = writer.Input(scales);
    scale->set_reordering_type(fe::TensorReordering_t::F8_128x4);
    fe::graph::Block_scale_dequantize_attributes attributes;
    attributes.set_name(std::string(role) + "_dequantized")
        .set_compute_data_type(compute)
        .set_block_size(block_size)
        .set_is_negative_scale(false);
    return writer.graph().block_scale_dequantize(writer.Input(role), scale,
                                                 std::move(attributes));
  };
  const TensorPtr a = dequantized("a", "scale_a", {1, block});
  const TensorPtr b = dequantized("b", "scale_b", {block, 1});
  TensorPtr product = writer.graph().matmul(
      a, b,
      fe::graph::Matmul_attributes().set_name(node.kind).set_compute_data_type(
          compute));
  if (writer.Has("scale_output")) {
    product = writer.graph().pointwise(product, writer.Input("scale_output"),
                                       fe::graph::Pointwise_attributes()
                                           .set_name("scaled")
                                           .set_mode(fe::PointwiseMode_t::MUL)
                                           .set_compute_data_type(compute));
  }
  writer.Output("output", product);
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

Status AddGroupedMatmul(NodeWriter& writer) {
  const NodeSpec& node = writer.node();
  if (!writer.Has("starts")) {
    return Unimplemented(node.kind +
                         ": cuDNN takes the starts of groups in place of group_sizes");
  }
  // The groups are its first axis.
  const int64_t groups = writer.Spec("starts").dims[1];
  const TensorPtr starts = writer.InputAs("starts", {groups, 1, 1}, {1, 1, 1});
  fe::graph::Moe_grouped_matmul_attributes attributes;
  attributes.set_name(node.kind)
      .set_compute_data_type(ComputeDType(writer, {"a", "b", "output"}))
      .set_mode(fe::MoeGroupedMatmulMode_t::NONE);
  writer.Output("output", writer.graph().moe_grouped_matmul(
                              writer.Input("a"), writer.Input("b"), starts, nullptr,
                              nullptr, std::move(attributes)));
  return {};
}

}  // namespace jax_cudnn
