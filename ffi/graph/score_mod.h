// SPDX-License-Identifier: Apache-2.0
// Attention's score_mod: steps that the scores go through, as words.
//
// jax_cudnn/graph/attention/score_mod.py says what the words mean.

#ifndef JAX_CUDNN_SCORE_MOD_H_
#define JAX_CUDNN_SCORE_MOD_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

using Steps = std::vector<std::string>;

// The mode of a step and the words that it is applied to.
std::vector<std::string> ReadStep(std::string_view text);

// The number of the step whose result a word is, or nothing.
std::optional<size_t> ResultIndex(std::string_view word);

// The number that a word is, or nothing.
std::optional<double> StepNumber(const std::string& word);

// Checks the steps of a node, which has the attributes score_mod and score_mod_grad.
Status CheckScoreMod(const NodeSpec& node);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_SCORE_MOD_H_
