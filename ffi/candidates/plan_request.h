// SPDX-License-Identifier: Apache-2.0
// What a caller asks of a plan: nothing, one pinned engine, a filter of candidates, or
// that one of them is tried first.
//
// Its text is the `request` of a call. Knows nothing of the frontend.

#ifndef JAX_CUDNN_PLAN_REQUEST_H_
#define JAX_CUDNN_PLAN_REQUEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace jax_cudnn {

// The engine of all products by cuBLASLt (blas/blas_engines.h); none of cuDNN's has
// this number. Equals CUBLASLT_ENGINE in jax_cudnn/native/planner.py.
inline constexpr int64_t kCublasLtEngine = 1000;

// The engine of cuDNN's functions for causal convolutions (plans/causal_conv.h). Equals
// CAUSAL_CONV_ENGINE in jax_cudnn/native/planner.py.
inline constexpr int64_t kCausalConvEngine = 1001;

// cuDNN's lists of candidates.
enum class HeuristicMode { kA, kB, kFallback };

using Knobs = std::vector<std::pair<std::string, int64_t>>;  // sorted by name

// One engine with its knobs, in one way of writing the graph. The frontend cannot name
// each knob: without them, `nth` counts from 0 among the candidates of the engine that
// the default request lists.
struct PlanPin {
  int64_t engine = 0;
  std::optional<Knobs> knobs;
  int64_t nth = 0;
  int64_t variant = 0;  // see graph_builder.h; whether it exists is not checked here
};

// The first candidate of an engine, or the one that has exactly these knobs.
struct WantedPlan {
  int64_t engine = 0;
  std::optional<Knobs> knobs;

  bool operator==(const WantedPlan& other) const {
    return engine == other.engine && knobs == other.knobs;
  }
};

// Where cuDNN's first candidate is of this engine, those of the wanted ones that are
// listed are tried before it, one after another. Of cuBLASLt's engine, the wanted ones
// are cuBLASLt's, by any of their knobs, and are tried before all of cuDNN's.
struct PlanPreference {
  int64_t first_engine = 0;
  std::vector<WantedPlan> wanted;
};

inline constexpr std::string_view kReducedPrecision = "REDUCED_PRECISION_REDUCTION";

// A default-constructed request lets cuDNN choose among plans that do not add up in 16
// bits.
struct PlanRequest {
  // Only plans that give the same bits in every run.
  bool deterministic = false;
  // Where there is a pin, the members below filter nothing.
  std::optional<PlanPin> pin;
  // For different engines. Where there are some, all else is as in the default request.
  std::vector<PlanPreference> preferences;
  // Asked in this order. Some graphs have candidates in one of A and FALLBACK only.
  std::vector<HeuristicMode> modes = {HeuristicMode::kA, HeuristicMode::kFallback};
  std::optional<std::vector<int64_t>> engines;  // absent: all
  std::vector<int64_t> denied_engines;
  // Behaviour and numerical notes, by cuDNN's names.
  std::vector<std::string> required_notes;
  std::vector<std::string> refused_notes = {std::string(kReducedPrecision)};
  std::optional<int64_t> workspace_limit_bytes;
};

// Reads a request; the empty text is the default one. INVALID_ARGUMENT, with the field
// and what would be valid, for a text that WritePlanRequest would not write and for one
// that contradicts itself.
StatusOr<PlanRequest> ParsePlanRequest(std::string_view text);

// The canonical text of a pin, of preferences or of a filter; never empty.
std::string WritePlanRequest(const PlanRequest& request);

// Why the request does not allow an engine with these notes, such as "engine 3 is
// denied"; empty where it does.
std::string RefusalOf(const PlanRequest& request, int64_t engine,
                      const std::vector<std::string>& notes);

// Why the request does not allow a workspace of that size; empty where it does.
std::string WorkspaceRefusal(const PlanRequest& request, int64_t bytes);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLAN_REQUEST_H_
