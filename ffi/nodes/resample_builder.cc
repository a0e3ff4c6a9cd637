// SPDX-License-Identifier: Apache-2.0
// The frontend's resample, and its gradient, from our roles and attributes.

#include "nodes/resample_builder.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "nodes/resample_backward.h"

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;
using List = std::vector<int64_t>;

// What the Python side rewrites before a graph comes here.
Status RefusePool(const NodeSpec& node) {
  if (node.Attribute<List>("window_shape").size() < 2) {
    return Unimplemented(node.kind +
                         ": cuDNN has no pooling over one spatial axis; add an axis of "
                         "size 1");
  }
  for (const char* name : {"padding_low", "padding_high"}) {
    const auto& padding = node.Attribute<List>(name);
    if (std::any_of(padding.begin(), padding.end(),
                    [](int64_t size) { return size < 0; })) {
      return Unimplemented(node.kind + ": cuDNN has no negative " + name + " " +
                           ListText(padding) + "; cut the operand instead");
    }
  }
  return {};
}

fe::ResampleMode_t AverageMode(const NodeSpec& node) {
  return node.Attribute<bool>("count_include_pad")
             ? fe::ResampleMode_t::AVGPOOL_INCLUDE_PADDING
             : fe::ResampleMode_t::AVGPOOL_EXCLUDE_PADDING;
}

Status AddPool(NodeWriter& writer, fe::ResampleMode_t mode, fe::PaddingMode_t padding) {
  const NodeSpec& node = writer.node();
  RETURN_IF_ERROR(RefusePool(node));
  fe::graph::Resample_attributes attributes;
  attributes.set_name(node.kind)
      .set_compute_data_type(ComputeDType(writer, {"x", "output"}))
      .set_resampling_mode(mode)
      .set_padding_mode(padding)
      .set_generate_index(false)
      .set_window(node.Attribute<List>("window_shape"))
      .set_stride(node.Attribute<List>("window_strides"))
      .set_pre_padding(node.Attribute<List>("padding_low"))
      .set_post_padding(node.Attribute<List>("padding_high"));
  writer.Output("output",
                writer.graph().resample(writer.Input("x"), std::move(attributes))[0]);
  return {};
}

}  // namespace

Status AddAvgPool(NodeWriter& writer) {
  return AddPool(writer, AverageMode(writer.node()), fe::PaddingMode_t::ZERO_PAD);
}

Status AddAvgPoolBackward(NodeWriter& writer) {
  const NodeSpec& node = writer.node();
  RETURN_IF_ERROR(RefusePool(node));
  ResampleGeometry geometry;
  geometry.mode = AverageMode(node);
  geometry.padding_mode = fe::PaddingMode_t::ZERO_PAD;
  geometry.compute_dtype = ComputeDType(writer, {"grad_output", "grad_x"});
  geometry.window = node.Attribute<List>("window_shape");
  geometry.strides = node.Attribute<List>("window_strides");
  geometry.padding_low = node.Attribute<List>("padding_low");
  geometry.padding_high = node.Attribute<List>("padding_high");
  const TensorPtr grad_output = writer.Input("grad_output");
  writer.graph().Append(MakeResampleBackward(writer.graph().context,
                                             std::move(geometry), grad_output,
                                             writer.NewOutput("grad_x")));
  return {};
}

Status AddMaxPool(NodeWriter& writer) {
  return AddPool(writer, fe::ResampleMode_t::MAXPOOL, fe::PaddingMode_t::NEG_INF_PAD);
}

}  // namespace jax_cudnn
