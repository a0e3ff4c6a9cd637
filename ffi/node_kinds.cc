// SPDX-License-Identifier: Apache-2.0
// The rows of the table of node kinds.

#include "node_kinds.h"

#include <algorithm>

#include "sdpa_rules.h"

namespace jax_cudnn {

const std::vector<NodeKind>& NodeKinds() {
  // Leaked, so that a thread that outlives static destruction can still read it.
  static const auto& kinds = *new std::vector<NodeKind>{
      {
          "sdpa",
          {{"is_causal", AttributeType::kBool}, {"scale", AttributeType::kNumber}},
          {"query", "key", "value"},
          {"bias", "mask", "query_lengths", "key_lengths"},
          {"output"},
          {"stats"},
          CheckSdpa,
      },
      {
          "sdpa_backward",
          {{"is_causal", AttributeType::kBool}, {"scale", AttributeType::kNumber}},
          {"query", "key", "value", "output", "stats", "grad_output"},
          {"bias", "mask", "query_lengths", "key_lengths", "grad_stats"},
          {"grad_query", "grad_key", "grad_value"},
          {"grad_bias"},
          CheckSdpaBackward,
      },
  };
  return kinds;
}

const NodeKind* FindNodeKind(std::string_view name) {
  const auto& kinds = NodeKinds();
  const auto kind = std::find_if(kinds.begin(), kinds.end(),
                                 [&](const NodeKind& k) { return k.name == name; });
  return kind == kinds.end() ? nullptr : &*kind;
}

}  // namespace jax_cudnn
