// SPDX-License-Identifier: Apache-2.0
// From a graph specification to the cuDNN frontend's graph.
//
// A table maps each node kind to the function that adds it. Includes the frontend, so
// it is for plan.cc and graph_builder.cc only.

#ifndef JAX_CUDNN_GRAPH_BUILDER_H_
#define JAX_CUDNN_GRAPH_BUILDER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "frontend/frontend.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

// The frontend's graph, with the notes that it keeps to itself.
class FrontendGraph : public cudnn_frontend::graph::Graph {
 public:
  // The workspace of a candidate that is not built yet, where it is above the limit;
  // such a candidate cannot be built any more. Else nothing.
  std::optional<int64_t> WorkspaceAbove(int64_t limit_bytes, int64_t index);

  const std::vector<cudnn_frontend::NumericalNote_t>& numeric_notes(
      int64_t index) const {
    return plans.numeric_notes[static_cast<size_t>(index)];
  }
};

// How to write the graph: for which GPU, and in which of its variants.
struct GraphStyle {
  std::shared_ptr<const cudnn_frontend::DeviceProperties> device_properties;
  int sm_version = 0;
  int sm_count = 0;
  // Some operations can be written in more than one way, of which cuDNN may plan only
  // one. Variant 0 is tried first.
  int variant = 0;
  // Whether operations that have a deterministic mode are to use it.
  bool deterministic = false;
};

// The number of ways in which the graph can be written.
int VariantCount(const GraphSpec& graph);

// The unique id of a tensor in the frontend's graph: its place in `tensors`, plus one.
inline int64_t TensorUid(const GraphSpec& graph, const std::string& name) {
  return graph.IndexOf(name) + 1;
}

// Writes the graph down; asks cuDNN nothing yet. UNIMPLEMENTED for what the frontend
// has no words for, and for tensors without elements, which crash some cuDNN versions.
StatusOr<std::unique_ptr<FrontendGraph>> BuildFrontendGraph(const GraphSpec& graph,
                                                            const GraphStyle& style);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GRAPH_BUILDER_H_
