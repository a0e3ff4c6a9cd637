// SPDX-License-Identifier: Apache-2.0
// cuDNN's own names for the knobs and notes of its engines.

#ifndef JAX_CUDNN_ENGINE_NAMES_H_
#define JAX_CUDNN_ENGINE_NAMES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frontend/frontend.h"

namespace jax_cudnn {

// "UNKNOWN" for a knob that the frontend cannot name.
std::string_view KnobName(cudnn_frontend::KnobType_t knob);

// Whether the frontend cannot name one of these: their candidate cannot be asked for by
// its knobs.
bool HasUnknownKnob(const std::vector<std::pair<std::string, int64_t>>& knobs);

// The knob of that name; nothing where there is none.
std::optional<cudnn_frontend::KnobType_t> FindKnob(std::string_view name);

// The names of those notes that were set: the frontend's lists contain others.
std::vector<std::string> NoteNames(
    const std::vector<cudnn_frontend::BehaviorNote_t>& notes);
std::vector<std::string> NoteNames(
    const std::vector<cudnn_frontend::NumericalNote_t>& notes);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_ENGINE_NAMES_H_
