// SPDX-License-Identifier: Apache-2.0
// The names of the frontend's enumerators.

#include "frontend/engine_names.h"

#include <algorithm>
#include <utility>

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;
using Knob = fe::KnobType_t;

constexpr std::string_view kUnknownKnob = "UNKNOWN";

constexpr std::pair<Knob, std::string_view> kKnobNames[] = {
    {Knob::ARRAY_SIZE_PER_THREAD, "ARRAY_SIZE_PER_THREAD"},
    {Knob::BLOCK_SIZE, "BLOCK_SIZE"},
    {Knob::CTA_COUNT, "CTA_COUNT"},
    {Knob::EDGE, "EDGE"},
    {Knob::IDX_MODE, "IDX_MODE"},
    {Knob::INPUT_TMA_ENABLE, "INPUT_TMA_ENABLE"},
    {Knob::KERNEL_CFG, "KERNEL_CFG"},
    {Knob::LOAD_SIZE, "LOAD_SIZE"},
    {Knob::MULTIPLY, "MULTIPLY"},
    {Knob::OCCUPANCY, "OCCUPANCY"},
    {Knob::OUTPUT_TMA_ENABLE, "OUTPUT_TMA_ENABLE"},
    {Knob::REDUCTION_MODE, "REDUCTION_MODE"},
    {Knob::SPECFILT, "SPECFILT"},
    {Knob::SPLIT_COLS, "SPLIT_COLS"},
    {Knob::SPLIT_K_BUF, "SPLIT_K_BUF"},
    {Knob::SPLIT_K_SLC, "SPLIT_K_SLC"},
    {Knob::SPLIT_P_SLC, "SPLIT_P_SLC"},
    {Knob::STAGES, "STAGES"},
    {Knob::STREAM_K, "STREAM_K"},
    {Knob::SWAP_AB, "SWAP_AB"},
    {Knob::SWIZZLE, "SWIZZLE"},
    {Knob::TILEK, "TILEK"},
    {Knob::TILE_CGA, "TILE_CGA"},
    {Knob::TILE_CGA_M, "TILE_CGA_M"},
    {Knob::TILE_CGA_N, "TILE_CGA_N"},
    {Knob::TILE_COLS, "TILE_COLS"},
    {Knob::TILE_M, "TILE_M"},
    {Knob::TILE_N, "TILE_N"},
    {Knob::TILE_ROWS, "TILE_ROWS"},
    {Knob::TILE_SIZE, "TILE_SIZE"},
    {Knob::WARP_SPEC_CFG, "WARP_SPEC_CFG"},
    {Knob::WORKSPACE, "WORKSPACE"},
};

std::string NoteName(fe::BehaviorNote_t note) {
  switch (note) {
    case fe::BehaviorNote_t::NOT_SET:
      return "";
    case fe::BehaviorNote_t::RUNTIME_COMPILATION:
      return "RUNTIME_COMPILATION";
    case fe::BehaviorNote_t::REQUIRES_FILTER_INT8x32_REORDER:
      return "REQUIRES_FILTER_INT8x32_REORDER";
    case fe::BehaviorNote_t::REQUIRES_BIAS_INT8x32_REORDER:
      return "REQUIRES_BIAS_INT8x32_REORDER";
    case fe::BehaviorNote_t::SUPPORTS_CUDA_GRAPH_NATIVE_API:
      return "SUPPORTS_CUDA_GRAPH_NATIVE_API";
    case fe::BehaviorNote_t::CUBLASLT_DEPENDENCY:
      return "CUBLASLT_DEPENDENCY";
  }
  return "";
}

std::string NoteName(fe::NumericalNote_t note) {
  switch (note) {
    case fe::NumericalNote_t::NOT_SET:
      return "";
    case fe::NumericalNote_t::TENSOR_CORE:
      return "TENSOR_CORE";
    case fe::NumericalNote_t::DOWN_CONVERT_INPUTS:
      return "DOWN_CONVERT_INPUTS";
    case fe::NumericalNote_t::REDUCED_PRECISION_REDUCTION:
      return "REDUCED_PRECISION_REDUCTION";
    case fe::NumericalNote_t::FFT:
      return "FFT";
    case fe::NumericalNote_t::NONDETERMINISTIC:
      return "NONDETERMINISTIC";
    case fe::NumericalNote_t::WINOGRAD:
      return "WINOGRAD";
    case fe::NumericalNote_t::WINOGRAD_TILE_4x4:
      return "WINOGRAD_TILE_4x4";
    case fe::NumericalNote_t::WINOGRAD_TILE_6x6:
      return "WINOGRAD_TILE_6x6";
    case fe::NumericalNote_t::WINOGRAD_TILE_13x13:
      return "WINOGRAD_TILE_13x13";
    case fe::NumericalNote_t::STRICT_NAN_PROP:
      return "STRICT_NAN_PROP";
  }
  return "";
}

template <typename Note>
std::vector<std::string> NamesOf(const std::vector<Note>& notes) {
  std::vector<std::string> names;
  for (const Note note : notes) {
    std::string name = NoteName(note);
    if (!name.empty()) names.push_back(std::move(name));
  }
  return names;
}

}  // namespace

std::string_view KnobName(Knob knob) {
  for (const auto& [value, name] : kKnobNames) {
    if (value == knob) return name;
  }
  return kUnknownKnob;
}

bool HasUnknownKnob(const std::vector<std::pair<std::string, int64_t>>& knobs) {
  return std::any_of(knobs.begin(), knobs.end(),
                     [](const auto& knob) { return knob.first == kUnknownKnob; });
}

std::optional<Knob> FindKnob(std::string_view name) {
  for (const auto& [value, known] : kKnobNames) {
    if (known == name) return value;
  }
  return std::nullopt;
}

std::vector<std::string> NoteNames(const std::vector<fe::BehaviorNote_t>& notes) {
  return NamesOf(notes);
}

std::vector<std::string> NoteNames(const std::vector<fe::NumericalNote_t>& notes) {
  return NamesOf(notes);
}

}  // namespace jax_cudnn
