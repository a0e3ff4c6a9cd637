// SPDX-License-Identifier: Apache-2.0
// Grouped products by cuBLASLt: one launch for all groups, whose sizes stay on the
// device.
//
// cuDNN's grouped kernel is slower than its matmuls, and a matmul for each group
// (group_products.h) makes the host wait for the sizes. cuBLASLt reads them on the
// device, and has the gradient of the matrices as well. It is experimental there: from
// cuBLAS 13.4 on for Hopper (13.5 for f8), 13.3 for sm_100 and sm_103.

#ifndef JAX_CUDNN_BLAS_GROUPS_H_
#define JAX_CUDNN_BLAS_GROUPS_H_

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cudnn/cublaslt.h"
#include "graph/graph_spec.h"
#include "plans/blas_algorithms.h"
#include "plans/candidate.h"
#include "plans/group_layout.h"
#include "plans/launchable.h"
#include "plans/plan_request.h"
#include "plans/plan_target.h"

namespace jax_cudnn {

class BlasGroups : public Launchable {
 public:
  // Whether a graph is run so: one grouped matmul, or its gradient, with both the sizes
  // of the groups and where they start. Rows in no group are set to 0.
  static bool Covers(const GraphSpec& graph);

  // The candidates, as BlasProduct::List has them. Knobs are those of the first
  // product's algorithm; of another product it is cuBLASLt's first.
  static StatusOr<std::vector<Candidate>> List(const GraphSpec& graph,
                                               const PlanRequest& request,
                                               const PlanTarget& target);

  // The products by a candidate of that list. Sets its workspace.
  static StatusOr<std::unique_ptr<BlasGroups>> Make(const GraphSpec& graph,
                                                    Candidate& candidate);

  // The products by algorithms that Serialize wrote, as in BlasProduct::Read.
  static StatusOr<std::unique_ptr<BlasGroups>> Read(const GraphSpec& graph,
                                                    std::string_view bytes,
                                                    const Candidate& candidate);

  Status Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                 void* const* results, void* workspace) const override;
  StatusOr<std::string> Serialize() const override;

 private:
  BlasGroups(GroupLayout layout, std::vector<CublasLtAlgorithm> algorithms,
             size_t engine_bytes)
      : layout_(std::move(layout)),
        algorithms_(std::move(algorithms)),
        engine_bytes_(engine_bytes) {}

  const GroupLayout layout_;
  const std::vector<CublasLtAlgorithm> algorithms_;  // of each product
  const size_t engine_bytes_;  // of workspace; the pointers follow
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_BLAS_GROUPS_H_
