// SPDX-License-Identifier: Apache-2.0
// The frontend's attention operations, from our roles and attributes.

#include "frontend/sdpa_builder.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;

// Roles that the Python side rewrites before a graph comes here, because cuDNN has no
// such operand.
Status RefuseRole(const NodeWriter& writer, std::string_view role,
                  const std::string& instead) {
  if (!writer.Has(role)) return {};
  return Unimplemented(writer.node().kind + ": cuDNN has no " + std::string(role) +
                       " operand; " + instead);
}

// Which keys beside the diagonal a query sees. A bound that hides none is not set: some
// engines take fewer bounds.
template <typename SdpaAttributes>
Status SetBand(const NodeWriter& writer, SdpaAttributes& attributes) {
  const NodeSpec& node = writer.node();
  const auto& window = node.Attribute<std::vector<int64_t>>("window");
  const bool is_causal = node.Attribute<bool>("is_causal");
  if (!is_causal && window.empty()) return {};
  attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT);
  if (is_causal) attributes.set_diagonal_band_right_bound(0);
  if (window.empty()) return {};
  if (window.size() != 2 || window[0] < 0 || window[1] < 0) {
    return Unimplemented(node.kind + ": cuDNN takes no window " + ListText(window) +
                         "; give it as a bias");
  }
  const int64_t s = writer.Spec("query").dims[2];
  const int64_t t = writer.Spec("key").dims[2];
  // cuDNN counts the key on the diagonal to the left.
  if (window[0] < s - 1) {
    attributes.set_diagonal_band_left_bound(static_cast<int>(window[0] + 1));
  }
  if (!is_causal && window[1] < t - 1) {
    attributes.set_diagonal_band_right_bound(static_cast<int>(window[1]));
  }
  return {};
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
  RETURN_IF_ERROR(SetBand(writer, attributes));
  if (writer.Has("bias")) attributes.set_bias(writer.Input("bias"));
  if (writer.Has("query_lengths")) {
    attributes.set_padding_mask(true)
        .set_seq_len_q(writer.Input("query_lengths"))
        .set_seq_len_kv(writer.Input("key_lengths"));
  }
  return {};
}

}  // namespace

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

// cuDNN's operation makes two maxima. One that is no result stays within the kernel.
Status AddSdpaF8(NodeWriter& writer) {
  fe::graph::SDPA_fp8_attributes attributes;
  RETURN_IF_ERROR(SetSdpaAttributes(writer, attributes));
  attributes.set_generate_stats(writer.Has("stats"));
  const auto [output, stats, amax_probabilities, amax_output] = writer.graph().sdpa_fp8(
      writer.Input("query"), writer.Input("key"), writer.Input("value"),
      writer.Input("descale_query"), writer.Input("descale_key"),
      writer.Input("descale_value"), writer.Input("descale_probabilities"),
      writer.Input("scale_probabilities"), writer.Input("scale_output"),
      std::move(attributes));
  for (const TensorPtr& amax : {amax_probabilities, amax_output}) {
    amax->set_dim({1, 1, 1, 1})
        .set_stride({1, 1, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
  }
  writer.Output("output", output);
  if (writer.Has("stats")) writer.Output("stats", stats);
  if (writer.Has("amax_output")) writer.Output("amax_output", amax_output);
  return {};
}

}  // namespace jax_cudnn
