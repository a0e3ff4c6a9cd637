// SPDX-License-Identifier: Apache-2.0
// Attention's tensors as cuDNN sees them, also where a row holds several sequences.
//
// A packed tensor keeps its memory, tokens one behind another. To cuDNN it has a batch
// entry for each sequence, with as many tokens as the longest may have, and a second
// tensor with the place in memory where each begins.

#ifndef JAX_CUDNN_SDPA_SEQUENCES_H_
#define JAX_CUDNN_SDPA_SEQUENCES_H_

#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "frontend/node_writer.h"

namespace jax_cudnn {

// Whether the node that was entered last has packed sequences.
bool IsPacked(const NodeWriter& writer);

// Refuses sequences that cuDNN has no form for, and offsets that do not fit them.
[[nodiscard]] Status CheckSequences(const NodeWriter& writer);

// An operand or result with an axis of tokens.
TensorPtr TokensInput(NodeWriter& writer, std::string_view role);
void TokensOutput(NodeWriter& writer, std::string_view role, const TensorPtr& tensor);

// A new tensor for a result that the frontend wants to be given.
TensorPtr TokensNewOutput(NodeWriter& writer, std::string_view role);

// How many tokens each sequence has.
TensorPtr LengthsInput(NodeWriter& writer, std::string_view role);

// How many tokens of the query or key there are in all, rounded up as workspaces are.
int64_t PackedTokens(const NodeWriter& writer, std::string_view role);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_SDPA_SEQUENCES_H_
