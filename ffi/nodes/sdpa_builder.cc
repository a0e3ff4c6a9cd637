// SPDX-License-Identifier: Apache-2.0
// The frontend's attention operations, from our roles and attributes.

#include "nodes/sdpa_builder.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "graph/score_mod.h"
#include "nodes/score_mod_builder.h"
#include "nodes/sdpa_sequences.h"

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
  const bool is_bottom_right = node.Attribute<bool>("is_bottom_right");
  if (!is_causal && window.empty()) return {};
  attributes.set_diagonal_alignment(is_bottom_right
                                        ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                        : fe::DiagonalAlignment_t::TOP_LEFT);
  if (is_causal) attributes.set_diagonal_band_right_bound(0);
  if (window.empty()) return {};
  if (window.size() != 2 || window[0] < 0 || window[1] < 0) {
    return Unimplemented(node.kind + ": cuDNN takes no window " + ListText(window) +
                         "; give it as a bias");
  }
  int64_t s = writer.Spec("query").dims[2];
  int64_t t = writer.Spec("key").dims[2];
  // From the ends, a query may be beyond all that its own number says.
  if (is_bottom_right) s = t = s + t;
  // cuDNN counts the key on the diagonal to the left.
  if (window[0] < s - 1) {
    attributes.set_diagonal_band_left_bound(static_cast<int>(window[0] + 1));
  }
  if (!is_causal && window[1] < t - 1) {
    attributes.set_diagonal_band_right_bound(static_cast<int>(window[1]));
  }
  return {};
}

// A number that travels with the plan.
TensorPtr Scalar(double value) {
  return std::make_shared<fe::graph::Tensor_attributes>(static_cast<float>(value));
}

// Which probabilities are dropped: those of a mask, or those that the kernel draws. It
// draws 16 bits and keeps what is not above (1 - rate) 2^16, so one number more than
// the rate says: it gets the rate with one number more to drop. The gradient with a
// mask leaves out the last factor, which belongs to rowsum(O dO) (9.19); the output
// that it is given has it (legalize/attention/dropout.py).
template <typename SdpaAttributes>
Status SetDropout(NodeWriter& writer, SdpaAttributes& attributes) {
  constexpr double kStep = 1.0 / 65536;
  const double rate = writer.node().Attribute<double>("dropout");
  if (writer.Has("dropout_seed") != writer.Has("dropout_offset") ||
      (writer.Has("dropout_seed") && writer.Has("dropout_mask"))) {
    return Unimplemented(writer.node().kind +
                         ": cuDNN takes dropout_seed and dropout_offset together, or "
                         "dropout_mask; give one of these");
  }
  if (writer.Has("dropout_seed")) {
    for (const char* role : {"dropout_seed", "dropout_offset"}) {
      const std::vector<int64_t>& dims = writer.Spec(role).dims;
      if (dims != std::vector<int64_t>{1, 1, 1, 1}) {
        return Unimplemented(writer.node().kind + ": " + role + " has dims " +
                             ListText(dims) + "; cuDNN takes one number");
      }
    }
    attributes.set_dropout(static_cast<float>(rate + kStep),
                           writer.Input("dropout_seed"),
                           writer.Input("dropout_offset"));
  } else if (writer.Has("dropout_mask")) {
    const TensorPtr mask = writer.Input("dropout_mask");
    if constexpr (std::is_same_v<SdpaAttributes, fe::graph::SDPA_attributes>) {
      attributes.set_dropout(mask, Scalar(1 / (1 - rate)));
    } else {
      attributes.set_dropout(mask, Scalar(1 / (1 - rate)), Scalar(1));
    }
  } else if (rate != 0) {
    return Unimplemented(writer.node().kind + ": dropout " + std::to_string(rate) +
                         " without a seed or a mask; give one of these");
  }
  return {};
}

// What forward and backward attributes have in common.
template <typename SdpaAttributes>
Status SetSdpaAttributes(NodeWriter& writer, SdpaAttributes& attributes) {
  RETURN_IF_ERROR(RefuseRole(writer, "mask", "give it as a bias"));
  RETURN_IF_ERROR(RefuseRole(writer, "grad_stats", "fold it into the output"));
  RETURN_IF_ERROR(RefuseRole(writer, "grad_max_logit", "add its part to the results"));
  RETURN_IF_ERROR(RefuseRole(writer, "sinks", "scale the output by the share of keys"));
  if (writer.Has("query_lengths") != writer.Has("key_lengths")) {
    return Unimplemented(writer.node().kind +
                         ": cuDNN takes query_lengths and key_lengths together; "
                         "give both");
  }
  RETURN_IF_ERROR(CheckSequences(writer));
  const NodeSpec& node = writer.node();
  if (!node.Attribute<Steps>("score_mod").empty() &&
      (node.Attribute<bool>("is_causal") || writer.Has("query_lengths") ||
       !node.Attribute<std::vector<int64_t>>("window").empty())) {
    return Unimplemented(node.kind +
                         ": cuDNN's frontend takes no causality, window or lengths "
                         "beside a score_mod; give them as steps or as a bias");
  }
  attributes.set_name(node.kind);
  attributes.set_attn_scale(static_cast<float>(node.Attribute<double>("scale")));
  RETURN_IF_ERROR(SetBand(writer, attributes));
  RETURN_IF_ERROR(SetDropout(writer, attributes));
  if (writer.Has("bias")) attributes.set_bias(writer.Input("bias"));
  if (writer.Has("query_lengths")) {
    attributes.set_padding_mask(true)
        .set_seq_len_q(LengthsInput(writer, "query_lengths"))
        .set_seq_len_kv(LengthsInput(writer, "key_lengths"));
  }
  return {};
}

// Maximum and sum of a row's softmax, where they are results. A unified operation
// (cuDNN 9.21) has them beside the log-sum-exp, a composite one in place of it.
void SetRowResults(NodeWriter& writer, fe::graph::SDPA_attributes& attributes) {
  if (writer.Has("max_logit")) {
    attributes.set_logit_max(TokensNewOutput(writer, "max_logit"));
  }
  if (writer.Has("sum_exp")) {
    attributes.set_score_sum_exp(TokensNewOutput(writer, "sum_exp"));
  }
}

// Variant 0 lets the frontend choose between its unified and its composite operation.
// It prefers the unified one by looking at the graph only, and does not come back when
// cuDNN has no plan for that; variant 1 asks for the composite one.
Status AddForward(NodeWriter& writer, fe::graph::SDPA_attributes attributes) {
  attributes.set_generate_stats(writer.Has("stats"))
      .set_implementation(writer.variant() == 0
                              ? fe::AttentionImplementation_t::AUTO
                              : fe::AttentionImplementation_t::COMPOSITE);
  const auto [output, stats] =
      writer.graph().sdpa(TokensInput(writer, "query"), TokensInput(writer, "key"),
                          TokensInput(writer, "value"), std::move(attributes));
  TokensOutput(writer, "output", output);
  if (writer.Has("stats")) TokensOutput(writer, "stats", stats);
  return {};
}

// Which of t keys a query sees that is one of the last of its sequence. A bound that
// hides none is not set: a single query sees all keys that the length leaves.
Status SetBandAtEnd(const NodeWriter& writer, int64_t t,
                    fe::graph::SDPA_attributes& attributes) {
  const NodeSpec& node = writer.node();
  const auto& window = node.Attribute<std::vector<int64_t>>("window");
  const int64_t s = writer.Spec("query").dims[2];
  if (!window.empty() && (window.size() != 2 || window[0] < 0 || window[1] < 0)) {
    return Unimplemented(node.kind + ": cuDNN takes no window " + ListText(window));
  }
  int64_t right = window.empty() ? t - 1 : window[1];
  if (node.Attribute<bool>("is_causal")) right = 0;
  const bool has_left = !window.empty() && window[0] < t - 1;
  // The last query has no key after it.
  const bool has_right = right < s - 1;
  if (has_left || has_right) {
    attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT);
  }
  // cuDNN counts the key on the diagonal to the left.
  if (has_left) {
    attributes.set_diagonal_band_left_bound(static_cast<int>(window[0] + 1));
  }
  if (has_right) attributes.set_diagonal_band_right_bound(static_cast<int>(right));
  return {};
}

}  // namespace

Status AddSdpa(NodeWriter& writer) {
  fe::graph::SDPA_attributes attributes;
  RETURN_IF_ERROR(SetSdpaAttributes(writer, attributes));
  if (const auto steps = ScoreMod::Of(writer)) attributes.set_score_mod(Forward(steps));
  SetRowResults(writer, attributes);
  return AddForward(writer, std::move(attributes));
}

Status AddSdpaCached(NodeWriter& writer) {
  const NodeSpec& node = writer.node();
  if (!writer.Has("query_lengths")) {
    return Unimplemented(node.kind +
                         ": cuDNN takes query_lengths and key_lengths together; "
                         "give both");
  }
  fe::graph::SDPA_attributes attributes;
  attributes.set_name(node.kind);
  attributes.set_attn_scale(static_cast<float>(node.Attribute<double>("scale")));
  attributes.set_padding_mask(true)
      .set_seq_len_q(writer.Input("query_lengths"))
      .set_seq_len_kv(writer.Input("key_lengths"));
  int64_t t = writer.Spec("key").dims[2];
  if (writer.Has("page_table")) {
    t *= writer.Spec("page_table").dims[2];
    if (t > std::numeric_limits<int>::max()) {
      return Unimplemented(node.kind + ": " + std::to_string(t) +
                           " keys of a sequence exceed 32 bits");
    }
    const TensorPtr table = writer.Input("page_table");
    attributes.set_paged_attention_k_table(table)
        .set_paged_attention_v_table(table)
        .set_paged_attention_max_seq_len_kv(static_cast<int>(t));
  }
  RETURN_IF_ERROR(SetBandAtEnd(writer, t, attributes));
  return AddForward(writer, std::move(attributes));
}

Status AddSdpaBackward(NodeWriter& writer) {
  fe::graph::SDPA_backward_attributes attributes;
  RETURN_IF_ERROR(SetSdpaAttributes(writer, attributes));
  if (const auto steps = ScoreMod::Of(writer)) {
    if (writer.node().Attribute<Steps>("score_mod_grad").empty()) {
      return Unimplemented("sdpa_backward: a score_mod without score_mod_grad");
    }
    attributes.set_score_mod(Forward(steps)).set_score_mod_bprop(Backward(steps));
  }
  attributes.set_deterministic_algorithm(writer.is_deterministic());
  if (IsPacked(writer)) {
    attributes.set_max_total_seq_len_q(PackedTokens(writer, "query"))
        .set_max_total_seq_len_kv(PackedTokens(writer, "key"));
  }
  if (writer.Has("grad_bias")) attributes.set_dbias(writer.NewOutput("grad_bias"));
  const auto [grad_query, grad_key, grad_value] = writer.graph().sdpa_backward(
      TokensInput(writer, "query"), TokensInput(writer, "key"),
      TokensInput(writer, "value"), TokensInput(writer, "output"),
      TokensInput(writer, "grad_output"), TokensInput(writer, "stats"),
      std::move(attributes));
  TokensOutput(writer, "grad_query", grad_query);
  TokensOutput(writer, "grad_key", grad_key);
  TokensOutput(writer, "grad_value", grad_value);
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
