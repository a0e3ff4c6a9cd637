// SPDX-License-Identifier: Apache-2.0
// Describing a product to cuBLASLt, keeping and launching an algorithm.

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "blas/blas_algorithms.h"
#include "blas/blas_engines.h"
#include "blas/blas_problem.h"
#include "cudnn/cublaslt.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {
namespace {

// Aligned so and no more, for what is asked before there are operands.
constexpr uintptr_t kSomewhere = (uintptr_t{1} << 40) + kBlasAlignment;

// --- what cuBLASLt is told ----------------------------------------------------------

// The operands of a launch.
struct Pointers {
  const void* a;
  const void* b;
  const void* c;
  void* d;
  const void* bias;
  const void* aux;
  const void* scale_a;
  const void* scale_b;
};

// cuBLASLt's descriptions of a problem.
class MatmulDescriptions : public BlasDescriptions {
 public:
  using BlasDescriptions::BlasDescriptions;

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
    RETURN_IF_ERROR(MakeProduct(problem.compute));
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

 private:
  Status MakeLayout(const BlasProblem::Matrix& matrix, int32_t batch,
                    CublasLtLayout& layout) {
    RETURN_IF_ERROR(CheckCublasLt(
        cublaslt,
        cublaslt.layout_create(&layout, matrix.type, static_cast<uint64_t>(matrix.rows),
                               static_cast<uint64_t>(matrix.columns), matrix.leading),
        "cublasLtMatrixLayoutCreate"));
    if (batch == 1) return {};
    using Attribute = CublasLtLayoutAttribute;
    const auto set = [&](Attribute attribute, const auto& value) {
      return CheckCublasLt(cublaslt,
                           cublaslt.layout_set(layout, static_cast<int>(attribute),
                                               &value, sizeof(value)),
                           "cublasLtMatrixLayoutSetAttribute");
    };
    RETURN_IF_ERROR(set(Attribute::kBatchCount, batch));
    return set(Attribute::kBatchStride, matrix.batch_stride);
  }
};

// --- the product --------------------------------------------------------------------

class BlasMatmul : public Launchable {
 public:
  BlasMatmul(BlasProblem problem, CublasLtAlgorithm algorithm, size_t workspace_bytes)
      : problem_(std::move(problem)),
        algorithm_(algorithm),
        workspace_bytes_(workspace_bytes) {}

  Status Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                 void* const* results, void* workspace) const override;
  StatusOr<std::string> Serialize() const override;

 private:
  const BlasProblem problem_;
  const CublasLtAlgorithm algorithm_;
  const size_t workspace_bytes_;
};

bool Covers(const GraphSpec& graph) { return ReadBlasProblem(graph).has_value(); }

StatusOr<std::vector<BlasAlgorithm>> Find(const BlasProblem& problem) {
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt,
                   LoadCublasLt(*LoadedCudnnRuntime()));
  MatmulDescriptions descriptions(*cublaslt);
  RETURN_IF_ERROR(descriptions.MakeUnbound(problem));
  return FindBlasAlgorithms(descriptions, std::nullopt);
}

StatusOr<std::vector<Candidate>> List(const GraphSpec& graph,
                                      const PlanRequest& request,
                                      const PlanTarget& target) {
  if (target.handle == nullptr) {
    return Unimplemented("its plans are made where the GPU is");
  }
  const auto problem = ReadBlasProblem(graph);
  ASSIGN_OR_RETURN(const std::vector<BlasAlgorithm> found, Find(*problem));
  return BlasCandidates(found, request);
}

StatusOr<std::unique_ptr<const Launchable>> Make(const GraphSpec& graph,
                                                 Candidate& candidate) {
  auto problem = ReadBlasProblem(graph);
  ASSIGN_OR_RETURN(const std::vector<BlasAlgorithm> found, Find(*problem));
  ASSIGN_OR_RETURN(const CublasLtHeuristicResult chosen,
                   ChosenBlasAlgorithm(found, candidate));
  candidate.workspace_bytes = static_cast<int64_t>(chosen.workspace_bytes);
  return std::unique_ptr<const Launchable>(
      new BlasMatmul(std::move(*problem), chosen.algorithm, chosen.workspace_bytes));
}

StatusOr<std::unique_ptr<const Launchable>> Read(const GraphSpec& graph,
                                                 std::string_view bytes,
                                                 const Candidate& candidate) {
  CublasLtAlgorithm algorithm{};
  auto problem = ReadBlasProblem(graph);
  if (!problem || bytes.size() != sizeof(algorithm)) {
    return InvalidArgument("a plan of cuBLASLt has " + std::to_string(bytes.size()) +
                           " bytes, or a graph that it does not compute");
  }
  std::memcpy(&algorithm, bytes.data(), sizeof(algorithm));
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt,
                   LoadCublasLt(*LoadedCudnnRuntime()));
  MatmulDescriptions descriptions(*cublaslt);
  RETURN_IF_ERROR(descriptions.MakeUnbound(*problem));
  const auto workspace_bytes = static_cast<size_t>(candidate.workspace_bytes);
  RETURN_IF_ERROR(CheckBlasAlgorithm(descriptions, algorithm, workspace_bytes));
  return std::unique_ptr<const Launchable>(
      new BlasMatmul(std::move(*problem), algorithm, workspace_bytes));
}

StatusOr<std::string> BlasMatmul::Serialize() const {
  return std::string(reinterpret_cast<const char*>(&algorithm_), sizeof(algorithm_));
}

Status BlasMatmul::Execute(CudnnHandle /*handle*/, CudaStream stream,
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
  MatmulDescriptions descriptions(*cublaslt);
  RETURN_IF_ERROR(descriptions.Make(problem_, pointers));
  const float one = 1;
  const float beta = problem_.c ? 1 : 0;
  return CheckCublasLt(
      *cublaslt,
      cublaslt->matmul(handle, descriptions.product, &one, pointers.a, descriptions.a,
                       pointers.b, descriptions.b, &beta, pointers.c, descriptions.c,
                       pointers.d, descriptions.d, &algorithm_, workspace,
                       workspace_bytes_, stream),
      "cublasLtMatmul");
}

}  // namespace

const BlasEngine kBlasProduct{Covers, List, Make, Read};

}  // namespace jax_cudnn
