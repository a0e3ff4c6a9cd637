// SPDX-License-Identifier: Apache-2.0
// Products by cuBLASLt, with the epilogues that it has.
//
// In 16 bits, cuDNN's products with something around them take 1.4 to 1.7 of the time
// of cuBLASLt's kernels on Hopper (docs/internals/measured/model_misses.md). cuBLASLt's are
// plans beside cuDNN's: listed, timed, kept and launched like these, under a number
// that none of cuDNN's engines has.

#ifndef JAX_CUDNN_BLAS_PRODUCT_H_
#define JAX_CUDNN_BLAS_PRODUCT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cudnn/cublaslt.h"
#include "graph/graph_spec.h"
#include "plans/blas_algorithms.h"
#include "plans/blas_problem.h"
#include "plans/candidate.h"
#include "plans/launchable.h"
#include "plans/plan_request.h"
#include "plans/plan_target.h"

namespace jax_cudnn {

class BlasProduct : public Launchable {
 public:
  // Whether cuBLASLt computes a graph as one kernel (ReadBlasProblem).
  static bool Covers(const GraphSpec& graph);

  // The candidates, best first by cuBLASLt's heuristics. UNIMPLEMENTED where it has no
  // kernel, and for a target that is only described. A pin leaves the first that has
  // all of the pin's knobs. The graph must be covered.
  static StatusOr<std::vector<Candidate>> List(const GraphSpec& graph,
                                               const PlanRequest& request,
                                               const PlanTarget& target);

  // The product by a candidate of that list. Sets its workspace.
  static StatusOr<std::unique_ptr<BlasProduct>> Make(const GraphSpec& graph,
                                                     Candidate& candidate);

  // The product by an algorithm that Serialize wrote. UNIMPLEMENTED where this
  // libcublasLt does not have it, or needs more than the candidate's workspace.
  static StatusOr<std::unique_ptr<BlasProduct>> Read(const GraphSpec& graph,
                                                     std::string_view bytes,
                                                     const Candidate& candidate);

  Status Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                 void* const* results, void* workspace) const override;
  StatusOr<std::string> Serialize() const override;

 private:
  class Bound;      // cuBLASLt's descriptions of a problem
  struct Pointers;  // of a launch

  BlasProduct(BlasProblem problem, CublasLtAlgorithm algorithm, size_t workspace_bytes)
      : problem_(std::move(problem)),
        algorithm_(algorithm),
        workspace_bytes_(workspace_bytes) {}

  static StatusOr<std::vector<BlasAlgorithm>> Find(const BlasProblem& problem);

  const BlasProblem problem_;
  const CublasLtAlgorithm algorithm_;
  const size_t workspace_bytes_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_BLAS_PRODUCT_H_
