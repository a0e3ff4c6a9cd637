// SPDX-License-Identifier: Apache-2.0
// What cuBLASLt computes of graphs: one product, and the products of groups of rows.
//
// cuBLASLt's plans are beside cuDNN's: listed, timed, kept and launched like these,
// under a number that none of cuDNN's engines has.

#ifndef JAX_CUDNN_BLAS_ENGINES_H_
#define JAX_CUDNN_BLAS_ENGINES_H_

#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "candidates/candidate.h"
#include "candidates/launchable.h"
#include "candidates/plan_request.h"
#include "candidates/plan_target.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

struct BlasEngine {
  // Whether graphs are computed so. The other functions take such graphs alone.
  bool (*covers)(const GraphSpec& graph);

  // The candidates, best first by cuBLASLt's heuristics. UNIMPLEMENTED where it has no
  // kernel, and for a target that is only described. A pin leaves the first that has
  // all of the pin's knobs.
  StatusOr<std::vector<Candidate>> (*list)(const GraphSpec& graph,
                                           const PlanRequest& request,
                                           const PlanTarget& target);

  // What launches a candidate of that list. Sets its workspace.
  StatusOr<std::unique_ptr<const Launchable>> (*make)(const GraphSpec& graph,
                                                      Candidate& candidate);

  // The same by what it wrote as it was serialized. UNIMPLEMENTED where this
  // libcublasLt does not have it, or needs more than the candidate's workspace.
  StatusOr<std::unique_ptr<const Launchable>> (*read)(const GraphSpec& graph,
                                                      std::string_view bytes,
                                                      const Candidate& candidate);
};

// One product with the epilogues that cuBLASLt has (ReadBlasProblem). In 16 bits,
// cuDNN's take 1.4 to 1.7 of the time of cuBLASLt's kernels on Hopper
// (docs/internals/measured/model_misses.md).
extern const BlasEngine kBlasProduct;

// One grouped matmul, or its gradient, given both the sizes of the groups and where
// they start: one launch for all groups, whose sizes stay on the device. Rows in no
// group are set to 0. Knobs are those of the first product's algorithm; of another
// product it is cuBLASLt's first.
//
// cuDNN's grouped kernel is slower than its matmuls, and a matmul for each group
// (groups/group_products.h) makes the host wait for the sizes. cuBLASLt's products in
// groups are experimental: from cuBLAS 13.4 on for Hopper (13.5 for f8), 13.3 for
// sm_100 and sm_103.
extern const BlasEngine kBlasGroups;

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_BLAS_ENGINES_H_
