// SPDX-License-Identifier: Apache-2.0
// cuBLASLt's algorithms for a product, as candidates.

#ifndef JAX_CUDNN_BLAS_ALGORITHMS_H_
#define JAX_CUDNN_BLAS_ALGORITHMS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "base/status.h"
#include "candidates/candidate.h"
#include "candidates/plan_request.h"
#include "cudnn/cublaslt.h"

namespace jax_cudnn {

// Plans take any operand that is aligned so; XLA aligns more.
inline constexpr int64_t kBlasAlignment = 16;

// cuBLASLt's descriptions of one product, destroyed with this.
class BlasDescriptions {
 public:
  explicit BlasDescriptions(const CublasLtFunctions& cublaslt) : cublaslt(cublaslt) {}
  BlasDescriptions(const BlasDescriptions&) = delete;
  BlasDescriptions& operator=(const BlasDescriptions&) = delete;
  ~BlasDescriptions();

  // The product's own, before its attributes are set.
  Status MakeProduct(int32_t compute);

  template <typename Value>
  Status Set(CublasLtMatmulAttribute attribute, const Value& value) {
    return CheckCublasLt(cublaslt,
                         cublaslt.description_set(product, static_cast<int>(attribute),
                                                  &value, sizeof(value)),
                         "cublasLtMatmulDescSetAttribute");
  }

  const CublasLtFunctions& cublaslt;
  CublasLtDescription product = nullptr;
  CublasLtLayout a = nullptr;
  CublasLtLayout b = nullptr;
  CublasLtLayout c = nullptr;
  CublasLtLayout d = nullptr;
};

// The sizes of products in groups, which are on the device.
struct BlasAverages {
  int64_t rows = 0;  // of d
  int64_t columns = 0;
  int64_t depth = 0;
};

// An algorithm as cuBLASLt lists it; its knobs are its configuration.
struct BlasAlgorithm {
  CublasLtHeuristicResult found;
  Knobs knobs;
};

// The algorithms for a product on the current device, best first by cuBLASLt's
// heuristics, each configuration once.
StatusOr<std::vector<BlasAlgorithm>> FindBlasAlgorithms(
    const BlasDescriptions& bound, const std::optional<BlasAverages>& averages);

// The algorithms as candidates, in their order. A pin leaves the first that has all of
// the pin's knobs. UNIMPLEMENTED where there is none.
StatusOr<std::vector<Candidate>> BlasCandidates(
    const std::vector<BlasAlgorithm>& algorithms, const PlanRequest& request);

// The algorithm of a candidate; UNIMPLEMENTED where it is no longer listed.
StatusOr<CublasLtHeuristicResult> ChosenBlasAlgorithm(
    const std::vector<BlasAlgorithm>& algorithms, const Candidate& candidate);

// The workspace of an algorithm of before, which has to fit what its plan has;
// UNIMPLEMENTED where this libcublasLt does not have it, or needs more.
Status CheckBlasAlgorithm(const BlasDescriptions& bound,
                          const CublasLtAlgorithm& algorithm, size_t workspace_bytes);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_BLAS_ALGORITHMS_H_
