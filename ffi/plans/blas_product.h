// SPDX-License-Identifier: Apache-2.0
// Products by cuBLASLt, with the epilogues that it has.
//
// In 16 bits, cuDNN's products with something around them take 1.4 to 1.7 of the time
// of cuBLASLt's kernels on Hopper (docs/benchmarks/model_misses.md). cuBLASLt's are
// plans beside cuDNN's: listed, timed, kept and launched like these, under a number
// that none of cuDNN's engines has.

#ifndef JAX_CUDNN_BLAS_PRODUCT_H_
#define JAX_CUDNN_BLAS_PRODUCT_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cudnn/cublaslt.h"
#include "graph/graph_spec.h"
#include "plans/candidate.h"
#include "plans/launchable.h"
#include "plans/plan_request.h"
#include "plans/plan_target.h"

namespace jax_cudnn {

class BlasProduct : public Launchable {
 public:
  // Whether cuBLASLt computes a graph as one kernel: a matmul in f32 sums with, in this
  // order, factors of f8 operands, a bias of columns, a residual; or with a bias and
  // relu or gelu's tanh form, whose argument may be a result, too; or times the
  // gradient of that gelu. A matmul that is alone is XLA's by cuBLASLt as it is, and is
  // none, unless its operands are f8.
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
  // An array of the call.
  struct Memory {
    bool is_result = false;
    size_t index = 0;
  };

  // A matrix as cuBLASLt sees it, column by column, once for each example.
  struct Matrix {
    Memory memory;
    int32_t type = 0;
    bool is_transposed = false;
    int64_t rows = 0;  // as stored
    int64_t columns = 0;
    int64_t leading = 0;       // elements from a column to the next
    int64_t batch_stride = 0;  // and from an example to the next
  };

  // A column-major d = epilogue(a b + c): the transposed of our product, which is
  // stored row by row. So `a` is the second operand of our matmul.
  struct Problem {
    Matrix a;
    Matrix b;
    Matrix d;
    std::optional<Matrix> c;
    int32_t batch = 1;
    int32_t compute = kCublasComputeF32;
    uint32_t epilogue = kEpilogueNone;
    std::optional<Memory> bias;
    int64_t bias_batch_stride = 0;
    std::optional<Matrix> aux;  // gelu's argument, of d's shape
    std::optional<Memory> scale_a;
    std::optional<Memory> scale_b;
  };
  class Reader;     // of problems in graphs
  class Bound;      // cuBLASLt's descriptions of a problem
  struct Pointers;  // of a launch

  BlasProduct(Problem problem, CublasLtAlgorithm algorithm, size_t workspace_bytes)
      : problem_(std::move(problem)),
        algorithm_(algorithm),
        workspace_bytes_(workspace_bytes) {}

  // An algorithm as cuBLASLt lists it; its knobs are its configuration.
  struct Listed {
    CublasLtFound found;
    Knobs knobs;
  };

  // The algorithms for a problem, best first, each configuration once.
  static StatusOr<std::vector<Listed>> Find(const Problem& problem);

  const Problem problem_;
  const CublasLtAlgorithm algorithm_;
  const size_t workspace_bytes_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_BLAS_PRODUCT_H_
