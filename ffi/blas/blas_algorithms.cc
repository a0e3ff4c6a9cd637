// SPDX-License-Identifier: Apache-2.0
// Asking cuBLASLt for algorithms.

#include "blas/blas_algorithms.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "cudnn/cudnn_library.h"

namespace jax_cudnn {
namespace {

constexpr int kMostCandidates = 8;
constexpr size_t kMostWorkspaceBytes = size_t{32}
                                       << 20;  // as NVIDIA advises for Hopper
constexpr uint32_t kAlignment = kBlasAlignment;
// What tells an algorithm from others, by the names that its knobs have here, sorted.
struct KnobRow {
  std::string_view name;
  CublasLtAlgorithmAttribute attribute;
  size_t bytes;
};
constexpr KnobRow kKnobs[] = {
    {"ALGORITHM", CublasLtAlgorithmAttribute::kAlgorithm, 4},
    {"CLUSTER", CublasLtAlgorithmAttribute::kCluster, 2},
    {"CUSTOM", CublasLtAlgorithmAttribute::kCustom, 4},
    {"INNER", CublasLtAlgorithmAttribute::kInner, 2},
    {"REDUCTION", CublasLtAlgorithmAttribute::kReduction, 4},
    {"SPLIT_K", CublasLtAlgorithmAttribute::kSplitK, 4},
    {"STAGES", CublasLtAlgorithmAttribute::kStages, 4},
    {"SWIZZLE", CublasLtAlgorithmAttribute::kSwizzle, 4},
    {"TILE", CublasLtAlgorithmAttribute::kTile, 4},
};

StatusOr<Knobs> KnobsOf(const CublasLtFunctions& cublaslt,
                        const CublasLtAlgorithm& algorithm) {
  Knobs knobs;
  for (const KnobRow& row : kKnobs) {
    int32_t value = 0;  // the bytes that are not written stay 0
    size_t written = 0;
    RETURN_IF_ERROR(CheckCublasLt(
        cublaslt,
        cublaslt.algorithm_get(&algorithm, static_cast<int>(row.attribute), &value,
                               row.bytes, &written),
        "cublasLtMatmulAlgoConfigGetAttribute"));
    knobs.emplace_back(std::string(row.name), value);
  }
  return knobs;
}

// Whether all of some knobs are among an algorithm's.
bool HasAll(const Knobs& knobs, const Knobs& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const auto& knob) {
    return std::find(knobs.begin(), knobs.end(), knob) != knobs.end();
  });
}

class Preference {
 public:
  explicit Preference(const CublasLtFunctions& cublaslt) : cublaslt_(cublaslt) {}
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  ~Preference() {
    if (handle_ != nullptr) static_cast<void>(cublaslt_.preference_destroy(handle_));
  }

  Status Make(const std::optional<BlasAverages>& averages) {
    RETURN_IF_ERROR(CheckCublasLt(cublaslt_, cublaslt_.preference_create(&handle_),
                                  "cublasLtMatmulPreferenceCreate"));
    using Attribute = CublasLtPreferenceAttribute;
    RETURN_IF_ERROR(Set(Attribute::kWorkspaceBytes, kMostWorkspaceBytes));
    RETURN_IF_ERROR(Set(Attribute::kReductionSchemes, kCublasLtSumsInF32));
    for (const Attribute each : {Attribute::kAlignmentA, Attribute::kAlignmentB,
                                 Attribute::kAlignmentC, Attribute::kAlignmentD}) {
      RETURN_IF_ERROR(Set(each, kAlignment));
    }
    if (!averages) return {};
    RETURN_IF_ERROR(Set(Attribute::kAverageRows, averages->rows));
    RETURN_IF_ERROR(Set(Attribute::kAverageColumns, averages->columns));
    return Set(Attribute::kAverageDepth, averages->depth);
  }

  CublasLtPreference get() const { return handle_; }

 private:
  template <typename Value>
  Status Set(CublasLtPreferenceAttribute attribute, const Value& value) {
    return CheckCublasLt(cublaslt_,
                         cublaslt_.preference_set(handle_, static_cast<int>(attribute),
                                                  &value, sizeof(value)),
                         "cublasLtMatmulPreferenceSetAttribute");
  }

  const CublasLtFunctions& cublaslt_;
  CublasLtPreference handle_ = nullptr;
};

}  // namespace

BlasDescriptions::~BlasDescriptions() {
  for (CublasLtLayout layout : {a, b, c, d}) {
    if (layout != nullptr) static_cast<void>(cublaslt.layout_destroy(layout));
  }
  if (product != nullptr) static_cast<void>(cublaslt.description_destroy(product));
}

Status BlasDescriptions::MakeProduct(int32_t compute) {
  return CheckCublasLt(cublaslt,
                       cublaslt.description_create(&product, compute, kCudaF32),
                       "cublasLtMatmulDescCreate");
}

StatusOr<std::vector<BlasAlgorithm>> FindBlasAlgorithms(
    const BlasDescriptions& bound, const std::optional<BlasAverages>& averages) {
  const CublasLtFunctions& cublaslt = bound.cublaslt;
  ASSIGN_OR_RETURN(CublasLtHandle handle, CublasLtHandleHere(*LoadedCudnnRuntime()));
  Preference preference(cublaslt);
  RETURN_IF_ERROR(preference.Make(averages));
  std::array<CublasLtHeuristicResult, kMostCandidates> found{};
  int count = 0;
  RETURN_IF_ERROR(CheckCublasLt(
      cublaslt,
      cublaslt.find(handle, bound.product, bound.a, bound.b, bound.c, bound.d,
                    preference.get(), kMostCandidates, found.data(), &count),
      "cublasLtMatmulAlgoGetHeuristic"));
  std::vector<BlasAlgorithm> usable;
  for (int i = 0; i < count; ++i) {
    const CublasLtHeuristicResult& each = found[static_cast<size_t>(i)];
    if (each.state != 0) continue;
    ASSIGN_OR_RETURN(Knobs knobs, KnobsOf(cublaslt, each.algorithm));
    const bool is_known = std::any_of(usable.begin(), usable.end(),
                                      [&](const auto& x) { return x.knobs == knobs; });
    if (!is_known) usable.push_back({each, std::move(knobs)});
  }
  return usable;
}

StatusOr<std::vector<Candidate>> BlasCandidates(
    const std::vector<BlasAlgorithm>& algorithms, const PlanRequest& request) {
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < algorithms.size(); ++i) {
    const BlasAlgorithm& each = algorithms[i];
    const auto& pin = request.pin;
    const auto place = static_cast<int64_t>(i);
    const bool is_asked_for =
        !pin || (pin->knobs ? HasAll(each.knobs, *pin->knobs) : pin->nth == place);
    if (!is_asked_for) continue;
    Candidate candidate;
    candidate.engine = kCublasLtEngine;
    candidate.name = "cublasLt_" + std::to_string(i);
    candidate.knobs = each.knobs;
    PlanRequest own;
    own.deterministic = request.deterministic;
    own.pin = PlanPin{kCublasLtEngine, each.knobs, 0, 0};
    candidate.request = WritePlanRequest(own);
    candidate.behavior_notes = {"CUBLASLT_DEPENDENCY"};
    candidate.numeric_notes = {"TENSOR_CORE"};
    std::vector<std::string> notes = candidate.behavior_notes;
    notes.insert(notes.end(), candidate.numeric_notes.begin(),
                 candidate.numeric_notes.end());
    candidate.refusal = RefusalOf(request, candidate.engine, notes);
    if (candidate.refusal.empty()) {
      candidate.refusal =
          WorkspaceRefusal(request, static_cast<int64_t>(each.found.workspace_bytes));
    }
    candidates.push_back(std::move(candidate));
    if (pin) break;
  }
  if (candidates.empty()) {
    return Unimplemented("none of its " + std::to_string(algorithms.size()) +
                         " algorithms is the one that is asked for");
  }
  return candidates;
}

StatusOr<CublasLtHeuristicResult> ChosenBlasAlgorithm(
    const std::vector<BlasAlgorithm>& algorithms, const Candidate& candidate) {
  const auto place =
      std::find_if(algorithms.begin(), algorithms.end(),
                   [&](const auto& each) { return each.knobs == candidate.knobs; });
  if (place != algorithms.end()) return place->found;
  return Unimplemented("cuBLASLt lists " + std::to_string(algorithms.size()) +
                       " algorithms, and this one is no longer among them");
}

Status CheckBlasAlgorithm(const BlasDescriptions& bound,
                          const CublasLtAlgorithm& algorithm, size_t workspace_bytes) {
  const CublasLtFunctions& cublaslt = bound.cublaslt;
  ASSIGN_OR_RETURN(CublasLtHandle handle, CublasLtHandleHere(*LoadedCudnnRuntime()));
  CublasLtHeuristicResult checked{};
  RETURN_IF_ERROR(CheckCublasLt(cublaslt,
                                cublaslt.check(handle, bound.product, bound.a, bound.b,
                                               bound.c, bound.d, &algorithm, &checked),
                                "cublasLtMatmulAlgoCheck"));
  if (checked.workspace_bytes <= workspace_bytes) return {};
  return Unimplemented("the plan needs " + std::to_string(checked.workspace_bytes) +
                       " bytes of workspace, and " + std::to_string(workspace_bytes) +
                       " when it was written");
}

}  // namespace jax_cudnn
