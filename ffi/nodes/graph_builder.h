// SPDX-License-Identifier: Apache-2.0
// From a graph specification to the cuDNN frontend's graph.
//
// A table maps each node kind to the function that writes it.

#ifndef JAX_CUDNN_GRAPH_BUILDER_H_
#define JAX_CUDNN_GRAPH_BUILDER_H_

#include <memory>

#include "base/status.h"
#include "frontend/frontend_graph.h"
#include "frontend/graph_style.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

// The number of ways in which the graph can be written.
int VariantCount(const GraphSpec& graph);

// Writes the graph down; asks cuDNN nothing yet. UNIMPLEMENTED for what the frontend
// has no words for, and for tensors without elements, which crash some cuDNN versions.
StatusOr<std::unique_ptr<FrontendGraph>> BuildFrontendGraph(const GraphSpec& graph,
                                                            const GraphStyle& style);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GRAPH_BUILDER_H_
