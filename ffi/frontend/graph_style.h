// SPDX-License-Identifier: Apache-2.0
// How a graph is written for cuDNN: for which GPU, and under which names.

#ifndef JAX_CUDNN_GRAPH_STYLE_H_
#define JAX_CUDNN_GRAPH_STYLE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "frontend/frontend_graph.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

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

// The unique id of a tensor in the frontend's graph: its place in `tensors`, plus one.
inline int64_t TensorUid(const GraphSpec& graph, const std::string& name) {
  return graph.IndexOf(name) + 1;
}

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GRAPH_STYLE_H_
