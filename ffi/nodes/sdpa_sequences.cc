// SPDX-License-Identifier: Apache-2.0
// Packed sequences in the words of cuDNN's frontend: ragged offsets.

#include "nodes/sdpa_sequences.h"

#include <string>
#include <utility>
#include <vector>

namespace jax_cudnn {
namespace {

using Dims = std::vector<int64_t>;

// A gradient shares the offsets of what it is the gradient of, and the results with a
// number for each row share theirs.
std::string OffsetsRole(std::string_view role) {
  constexpr std::string_view kGradient = "grad_";
  if (role == "max_logit" || role == "sum_exp") role = "stats";
  if (role.rfind(kGradient, 0) == 0) role.remove_prefix(kGradient.size());
  return std::string(role) + "_offsets";
}

bool IsOfKeys(std::string_view role) {
  const std::string offsets = OffsetsRole(role);
  return offsets == "key_offsets" || offsets == "value_offsets";
}

int64_t SequenceCount(const NodeWriter& writer) {
  const Dims& dims = writer.Spec("query_lengths").dims;
  return dims[0] * dims[1];
}

struct Layout {
  Dims dims;
  Dims strides;
};

Layout PackedLayout(const NodeWriter& writer, std::string_view role) {
  const TensorSpec& spec = writer.Spec(role);
  const auto& longest = writer.node().Attribute<Dims>("longest");
  Layout layout{spec.dims, spec.Strides()};
  layout.dims[0] = SequenceCount(writer);
  layout.dims[2] = longest[IsOfKeys(role) ? 1 : 0];
  // Not read beside offsets.
  layout.strides[0] = layout.dims[2] * layout.strides[2];
  return layout;
}

void PackOutput(NodeWriter& writer, std::string_view role, const TensorPtr& tensor) {
  if (!IsPacked(writer)) return;
  const auto [dims, strides] = PackedLayout(writer, role);
  tensor->set_dim(dims).set_stride(strides).set_ragged_offset(
      writer.Input(OffsetsRole(role)));
}

}  // namespace

bool IsPacked(const NodeWriter& writer) { return writer.Has("query_offsets"); }

Status CheckSequences(const NodeWriter& writer) {
  const NodeSpec& node = writer.node();
  const auto refuse = [&](const std::string& what) {
    return Unimplemented(node.kind + ": " + what);
  };
  if (writer.Has("query_starts") || writer.Has("key_starts")) {
    return refuse("cuDNN takes offsets of sequences in place of starts");
  }
  const bool has_lengths = writer.Has("query_lengths");
  if (!IsPacked(writer)) {
    for (const char* role : {"query_lengths", "key_lengths"}) {
      if (writer.Has(role) && writer.Spec(role).dims[1] != 1) {
        return refuse("cuDNN takes several sequences of a row with offsets only");
      }
    }
    const bool is_plain = node.Attribute<Dims>("longest").empty() &&
                          !node.Attribute<bool>("is_bottom_right");
    return is_plain ? Status()
                    : refuse("longest and is_bottom_right are for packed sequences");
  }
  if (!has_lengths || node.Attribute<Dims>("longest").empty()) {
    return refuse("packed sequences need lengths and the longest of them");
  }
  for (const auto* roles : {&node.inputs, &node.outputs}) {
    for (const auto& [role, name] : *roles) {
      if (role == "bias" || role == "grad_bias") {
        return refuse("cuDNN takes no bias beside packed sequences");
      }
      if (!writer.Has(OffsetsRole(role))) continue;
      // Tokens one behind another, and the last axis with stride 1.
      if (writer.Spec(role).order != Dims{0, 2, 1, 3}) {
        return refuse("packed " + role + " must be stored token by token");
      }
      const Dims& offsets = writer.Spec(OffsetsRole(role)).dims;
      if (offsets[0] != SequenceCount(writer) + 1) {
        return refuse(OffsetsRole(role) + " has " + std::to_string(offsets[0]) +
                      " entries, not one more than there are sequences");
      }
    }
  }
  for (const char* role :
       {"query", "key", "value", "output", "stats", "max_logit", "sum_exp"}) {
    if (writer.Has(role) && !writer.Has(OffsetsRole(role))) {
      return refuse("packed " + std::string(role) + " has no offsets");
    }
  }
  return {};
}

TensorPtr TokensInput(NodeWriter& writer, std::string_view role) {
  if (!IsPacked(writer)) return writer.Input(role);
  const auto [dims, strides] = PackedLayout(writer, role);
  const TensorPtr tensor = writer.InputAs(role, dims, strides);
  tensor->set_ragged_offset(writer.Input(OffsetsRole(role)));
  return tensor;
}

void TokensOutput(NodeWriter& writer, std::string_view role, const TensorPtr& tensor) {
  writer.Output(role, tensor);
  PackOutput(writer, role, tensor);
}

TensorPtr TokensNewOutput(NodeWriter& writer, std::string_view role) {
  const TensorPtr tensor = writer.NewOutput(role);
  PackOutput(writer, role, tensor);
  return tensor;
}

TensorPtr LengthsInput(NodeWriter& writer, std::string_view role) {
  if (!IsPacked(writer)) return writer.Input(role);
  return writer.InputAs(role, {SequenceCount(writer), 1, 1, 1}, {1, 1, 1, 1});
}

int64_t PackedTokens(const NodeWriter& writer, std::string_view role) {
  const Dims& dims = writer.Spec(role).dims;
  constexpr int64_t kTile = 64;
  return (dims[0] * dims[2] + kTile - 1) / kTile * kTile;
}

}  // namespace jax_cudnn
