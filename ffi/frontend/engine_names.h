// SPDX-License-Identifier: Apache-2.0
// cuDNN's own names for the knobs and notes of its engines.

#ifndef JAX_CUDNN_ENGINE_NAMES_H_
#define JAX_CUDNN_ENGINE_NAMES_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "frontend/frontend.h"

namespace jax_cudnn {

// A knob newer than the frontend: such a candidate cannot be pinned.
inline constexpr std::string_view kUnknownKnob = "UNKNOWN";

std::string_view KnobName(cudnn_frontend::KnobType_t knob);
// The knob of that name; nothing where there is none.
std::optional<cudnn_frontend::KnobType_t> FindKnob(std::string_view name);

// The names of those notes that were set: the frontend's lists contain others.
std::vector<std::string> NoteNames(
    const std::vector<cudnn_frontend::BehaviorNote_t>& notes);
std::vector<std::string> NoteNames(
    const std::vector<cudnn_frontend::NumericalNote_t>& notes);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_ENGINE_NAMES_H_
