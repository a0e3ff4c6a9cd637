// SPDX-License-Identifier: Apache-2.0
// Asking cuBLASLt for algorithms, keeping and launching one.

#include "plans/blas_product.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "cudnn/cudnn_library.h"

namespace jax_cudnn {
namespace {

constexpr int kMostCandidates = 8;
constexpr size_t kMostWorkspaceBytes = size_t{32}
                                       << 20;  // as NVIDIA advises for Hopper
// XLA aligns more, and a plan takes any operand.
constexpr uint32_t kAlignment = 16;
// Aligned so and no more, for what is asked before there are operands.
constexpr uintptr_t kSomewhere = (uintptr_t{1} << 40) + kAlignment;

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

}  // namespace

// --- what cuBLASLt is told ----------------------------------------------------------

struct BlasProduct::Pointers {
  const void* a;
  const void* b;
  const void* c;
  void* d;
  const void* bias;
  const void* aux;
  const void* scale_a;
  const void* scale_b;
};

class BlasProduct::Bound {
 public:
  explicit Bound(const CublasLtFunctions& cublaslt) : cublaslt_(cublaslt) {}
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;
  ~Bound() {
    for (CublasLtLayout layout : {a, b, c, d}) {
      if (layout != nullptr) static_cast<void>(cublaslt_.layout_destroy(layout));
    }
    if (product != nullptr) static_cast<void>(cublaslt_.description_destroy(product));
  }

  // Without operands yet: cuBLASLt looks at no more than how pointers are aligned.
  Status MakeUnbound(const BlasProblem& problem) {
    auto* at = reinterpret_cast<void*>(kSomewhere);  // NOLINT: never dereferenced
    return Make(problem, {at, at, at, at, at, at, at, at});
  }

  Status Make(const BlasProblem& problem, const Pointers& pointers) {
    RETURN_IF_ERROR(MakeLayout(problem.a, problem.batch, a));
    RETURN_IF_ERROR(MakeLayout(problem.b, problem.batch, b));
    RETURN_IF_ERROR(MakeLayout(problem.c.value_or(problem.d), problem.batch, c));
    RETURN_IF_ERROR(MakeLayout(problem.d, problem.batch, d));
    RETURN_IF_ERROR(CheckCublasLt(
        cublaslt_, cublaslt_.description_create(&product, problem.compute, kCudaF32),
        "cublasLtMatmulDescCreate"));
    using Attribute = CublasLtMatmulAttribute;
    const auto transposes = [](const BlasProblem::Matrix& matrix) {
      return int32_t{matrix.is_transposed ? kCublasTranspose : 0};
    };
    RETURN_IF_ERROR(Set(Attribute::kTransposeA, transposes(problem.a)));
    RETURN_IF_ERROR(Set(Attribute::kTransposeB, transposes(problem.b)));
    RETURN_IF_ERROR(Set(Attribute::kEpilogue, problem.epilogue));
    if (problem.bias) {
      RETURN_IF_ERROR(Set(Attribute::kBiasPointer, pointers.bias));
      if (problem.batch > 1) {
        RETURN_IF_ERROR(Set(Attribute::kBiasBatchStride, problem.bias_batch_stride));
      }
    }
    if (problem.aux) {
      RETURN_IF_ERROR(Set(Attribute::kAuxPointer, pointers.aux));
      RETURN_IF_ERROR(Set(Attribute::kAuxLeading, problem.aux->leading));
      if (problem.batch > 1) {
        RETURN_IF_ERROR(Set(Attribute::kAuxBatchStride, problem.aux->batch_stride));
      }
    }
    if (problem.scale_a) RETURN_IF_ERROR(Set(Attribute::kScaleA, pointers.scale_a));
    if (problem.scale_b) RETURN_IF_ERROR(Set(Attribute::kScaleB, pointers.scale_b));
    return {};
  }

  CublasLtDescription product = nullptr;
  CublasLtLayout a = nullptr;
  CublasLtLayout b = nullptr;
  CublasLtLayout c = nullptr;
  CublasLtLayout d = nullptr;

 private:
  Status MakeLayout(const BlasProblem::Matrix& matrix, int32_t batch,
                    CublasLtLayout& layout) {
    RETURN_IF_ERROR(CheckCublasLt(
        cublaslt_,
        cublaslt_.layout_create(&layout, matrix.type,
                                static_cast<uint64_t>(matrix.rows),
                                static_cast<uint64_t>(matrix.columns), matrix.leading),
        "cublasLtMatrixLayoutCreate"));
    if (batch == 1) return {};
    using Attribute = CublasLtLayoutAttribute;
    const auto set = [&](Attribute attribute, const auto& value) {
      return CheckCublasLt(cublaslt_,
                           cublaslt_.layout_set(layout, static_cast<int>(attribute),
                                                &value, sizeof(value)),
                           "cublasLtMatrixLayoutSetAttribute");
    };
    RETURN_IF_ERROR(set(Attribute::kBatchCount, batch));
    return set(Attribute::kBatchStride, matrix.batch_stride);
  }

  template <typename Value>
  Status Set(CublasLtMatmulAttribute attribute, const Value& value) {
    return CheckCublasLt(cublaslt_,
                         cublaslt_.description_set(product, static_cast<int>(attribute),
                                                   &value, sizeof(value)),
                         "cublasLtMatmulDescSetAttribute");
  }

  const CublasLtFunctions& cublaslt_;
};

namespace {

class Preference {
 public:
  explicit Preference(const CublasLtFunctions& cublaslt) : cublaslt_(cublaslt) {}
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  ~Preference() {
    if (handle_ != nullptr) static_cast<void>(cublaslt_.preference_destroy(handle_));
  }

  Status Make() {
    RETURN_IF_ERROR(CheckCublasLt(cublaslt_, cublaslt_.preference_create(&handle_),
                                  "cublasLtMatmulPreferenceCreate"));
    using Attribute = CublasLtPreferenceAttribute;
    RETURN_IF_ERROR(Set(Attribute::kWorkspaceBytes, kMostWorkspaceBytes));
    RETURN_IF_ERROR(Set(Attribute::kReductionSchemes, kCublasLtSumsInF32));
    for (const Attribute each : {Attribute::kAlignmentA, Attribute::kAlignmentB,
                                 Attribute::kAlignmentC, Attribute::kAlignmentD}) {
      RETURN_IF_ERROR(Set(each, kAlignment));
    }
    return {};
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

// --- the product --------------------------------------------------------------------

bool BlasProduct::Covers(const GraphSpec& graph) {
  return ReadBlasProblem(graph).has_value();
}

StatusOr<std::vector<BlasProduct::Listed>> BlasProduct::Find(
    const BlasProblem& problem) {
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadCublasLt(runtime));
  ASSIGN_OR_RETURN(CublasLtHandle handle, CublasLtHandleHere(runtime));
  Bound bound(*cublaslt);
  RETURN_IF_ERROR(bound.MakeUnbound(problem));
  Preference preference(*cublaslt);
  RETURN_IF_ERROR(preference.Make());
  std::array<CublasLtFound, kMostCandidates> found{};
  int count = 0;
  RETURN_IF_ERROR(CheckCublasLt(
      *cublaslt,
      cublaslt->find(handle, bound.product, bound.a, bound.b, bound.c, bound.d,
                     preference.get(), kMostCandidates, found.data(), &count),
      "cublasLtMatmulAlgoGetHeuristic"));
  std::vector<Listed> usable;
  for (int i = 0; i < count; ++i) {
    const CublasLtFound& each = found[static_cast<size_t>(i)];
    if (each.state != 0) continue;
    ASSIGN_OR_RETURN(Knobs knobs, KnobsOf(*cublaslt, each.algorithm));
    const bool is_known = std::any_of(usable.begin(), usable.end(),
                                      [&](const auto& x) { return x.knobs == knobs; });
    if (!is_known) usable.push_back({each, std::move(knobs)});
  }
  return usable;
}

StatusOr<std::vector<Candidate>> BlasProduct::List(const GraphSpec& graph,
                                                   const PlanRequest& request,
                                                   const PlanTarget& target) {
  std::vector<Candidate> candidates;
  if (target.handle == nullptr) {
    return Unimplemented("its plans are made where the GPU is");
  }
  const auto problem = ReadBlasProblem(graph);
  const auto found = Find(*problem);
  if (!found.ok()) return found.status();
  for (size_t i = 0; i < found->size(); ++i) {
    const Listed& each = (*found)[i];
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
    return Unimplemented("none of its " + std::to_string(found->size()) +
                         " algorithms is the one that is asked for");
  }
  return candidates;
}

StatusOr<std::unique_ptr<BlasProduct>> BlasProduct::Make(const GraphSpec& graph,
                                                         Candidate& candidate) {
  const auto start = std::chrono::steady_clock::now();
  auto problem = ReadBlasProblem(graph);
  ASSIGN_OR_RETURN(const std::vector<Listed> found, Find(*problem));
  const auto place = std::find_if(found.begin(), found.end(), [&](const auto& each) {
    return each.knobs == candidate.knobs;
  });
  if (place == found.end()) {
    return Unimplemented("cuBLASLt lists " + std::to_string(found.size()) +
                         " algorithms, and this one is no longer among them");
  }
  const CublasLtFound& chosen = place->found;
  candidate.workspace_bytes = static_cast<int64_t>(chosen.workspace_bytes);
  candidate.build_ms = std::chrono::duration<double, std::milli>(
                           std::chrono::steady_clock::now() - start)
                           .count();
  candidate.is_built = true;
  return std::unique_ptr<BlasProduct>(
      new BlasProduct(std::move(*problem), chosen.algorithm, chosen.workspace_bytes));
}

StatusOr<std::unique_ptr<BlasProduct>> BlasProduct::Read(const GraphSpec& graph,
                                                         std::string_view bytes,
                                                         const Candidate& candidate) {
  CublasLtAlgorithm algorithm{};
  auto problem = ReadBlasProblem(graph);
  if (!problem || bytes.size() != sizeof(algorithm)) {
    return InvalidArgument("a plan of cuBLASLt has " + std::to_string(bytes.size()) +
                           " bytes, or a graph that it does not compute");
  }
  std::memcpy(&algorithm, bytes.data(), sizeof(algorithm));
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadCublasLt(runtime));
  ASSIGN_OR_RETURN(CublasLtHandle handle, CublasLtHandleHere(runtime));
  Bound bound(*cublaslt);
  RETURN_IF_ERROR(bound.MakeUnbound(*problem));
  CublasLtFound checked{};
  RETURN_IF_ERROR(CheckCublasLt(*cublaslt,
                                cublaslt->check(handle, bound.product, bound.a, bound.b,
                                                bound.c, bound.d, &algorithm, &checked),
                                "cublasLtMatmulAlgoCheck"));
  const auto bytes_then = static_cast<size_t>(candidate.workspace_bytes);
  if (checked.workspace_bytes > bytes_then) {
    return Unimplemented("the plan needs " + std::to_string(checked.workspace_bytes) +
                         " bytes of workspace, and " + std::to_string(bytes_then) +
                         " when it was written");
  }
  return std::unique_ptr<BlasProduct>(
      new BlasProduct(std::move(*problem), algorithm, bytes_then));
}

StatusOr<std::string> BlasProduct::Serialize() const {
  return std::string(reinterpret_cast<const char*>(&algorithm_), sizeof(algorithm_));
}

Status BlasProduct::Execute(CudnnHandle /*handle*/, CudaStream stream,
                            void* const* operands, void* const* results,
                            void* workspace) const {
  const auto at = [&](const BlasProblem::Memory& memory) {
    return (memory.is_result ? results : operands)[memory.index];
  };
  const auto at_any = [&](const std::optional<BlasProblem::Memory>& memory) {
    return memory ? at(*memory) : nullptr;
  };
  Pointers pointers{};
  pointers.a = at(problem_.a.memory);
  pointers.b = at(problem_.b.memory);
  pointers.d = at(problem_.d.memory);
  pointers.c = problem_.c ? at(problem_.c->memory) : pointers.d;
  pointers.bias = at_any(problem_.bias);
  pointers.aux = problem_.aux ? at(problem_.aux->memory) : nullptr;
  pointers.scale_a = at_any(problem_.scale_a);
  pointers.scale_b = at_any(problem_.scale_b);
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadCublasLt(runtime));
  ASSIGN_OR_RETURN(CublasLtHandle handle, CublasLtHandleHere(runtime));
  Bound bound(*cublaslt);
  RETURN_IF_ERROR(bound.Make(problem_, pointers));
  const float one = 1;
  const float beta = problem_.c ? 1 : 0;
  return CheckCublasLt(
      *cublaslt,
      cublaslt->matmul(handle, bound.product, &one, pointers.a, bound.a, pointers.b,
                       bound.b, &beta, pointers.c, bound.c, pointers.d, bound.d,
                       &algorithm_, workspace, workspace_bytes_, stream),
      "cublasLtMatmul");
}

}  // namespace jax_cudnn
