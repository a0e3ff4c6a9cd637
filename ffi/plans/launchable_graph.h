// SPDX-License-Identifier: Apache-2.0
// A built graph of the frontend, with the order in which it takes its pointers.

#ifndef JAX_CUDNN_LAUNCHABLE_GRAPH_H_
#define JAX_CUDNN_LAUNCHABLE_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "frontend/frontend_graph.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

// Where a pointer of cuDNN's argument list comes from.
struct PointerSource {
  bool is_result;
  size_t index;
  int64_t offset_bytes = 0;
};

struct LaunchableGraph {
  std::shared_ptr<FrontendGraph> graph;
  // In the order of cuDNN's argument list.
  std::vector<PointerSource> sources;
};

// Matches cuDNN's argument list with the operands and results of `spec`, whose plan
// `graph` has. At most kMaxOperands sources.
StatusOr<std::unique_ptr<LaunchableGraph>> MakeLaunchable(
    const GraphSpec& spec, std::shared_ptr<FrontendGraph> graph);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_LAUNCHABLE_GRAPH_H_
