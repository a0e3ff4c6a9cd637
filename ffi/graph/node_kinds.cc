// SPDX-License-Identifier: Apache-2.0
// The rows of the table of node kinds.

#include "graph/node_kinds.h"

#include <algorithm>

#include "graph/conv_rules.h"
#include "graph/matmul_rules.h"
#include "graph/pointwise_rules.h"
#include "graph/sdpa_rules.h"

namespace jax_cudnn {
namespace {

using AttributeList = std::vector<std::pair<std::string_view, AttributeType>>;

// All three convolutions have the attributes of the forward one.
AttributeList ConvAttributes() {
  return {
      {"window_strides", AttributeType::kIntegers},
      {"padding_low", AttributeType::kIntegers},
      {"padding_high", AttributeType::kIntegers},
      {"lhs_dilation", AttributeType::kIntegers},
      {"rhs_dilation", AttributeType::kIntegers},
  };
}

}  // namespace

const std::vector<NodeKind>& NodeKinds() {
  // Leaked, so that a thread that outlives static destruction can still read it.
  static const auto& kinds = *new std::vector<NodeKind>{
      {
          "constant",
          {{"value", AttributeType::kNumber}},
          {},
          {},
          {"output"},
          {},
          CheckConstant,
      },
      {
          "conv_dgrad",
          ConvAttributes(),
          {"grad_output", "w"},
          {},
          {"grad_x"},
          {},
          CheckConvDgrad,
      },
      {
          "conv_fprop",
          ConvAttributes(),
          {"x", "w"},
          {},
          {"output"},
          {},
          CheckConvFprop,
      },
      {
          "conv_wgrad",
          ConvAttributes(),
          {"grad_output", "x"},
          {},
          {"grad_w"},
          {},
          CheckConvWgrad,
      },
      {
          "matmul",
          {},
          {"a", "b"},
          {},
          {"output"},
          {},
          CheckMatmul,
      },
      {
          "pointwise",
          {{"mode", AttributeType::kString}, {"alpha", AttributeType::kNumber}},
          {"a"},
          {"b", "c"},
          {"output"},
          {},
          CheckPointwise,
      },
      {
          "reduction",
          {{"mode", AttributeType::kString}},
          {"input"},
          {},
          {"output"},
          {},
          CheckReduction,
      },
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
