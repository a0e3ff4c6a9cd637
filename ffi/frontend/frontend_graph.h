// SPDX-License-Identifier: Apache-2.0
// The cuDNN frontend's graph, with what it keeps to itself.
//
// Includes the frontend: for the files that talk to it.

#ifndef JAX_CUDNN_FRONTEND_GRAPH_H_
#define JAX_CUDNN_FRONTEND_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "frontend/frontend.h"

namespace jax_cudnn {

class FrontendGraph : public cudnn_frontend::graph::Graph {
 public:
  // The workspace of a candidate that is not built yet, where it is above the limit;
  // such a candidate cannot be built any more. Else nothing.
  std::optional<int64_t> WorkspaceAbove(int64_t limit_bytes, int64_t index);

  // Adds a node that the frontend has no function for.
  void Append(std::shared_ptr<cudnn_frontend::graph::INode> node) {
    sub_nodes.push_back(std::move(node));
  }

  const std::vector<cudnn_frontend::NumericalNote_t>& numeric_notes(
      int64_t index) const {
    return plans.numeric_notes[static_cast<size_t>(index)];
  }
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_FRONTEND_GRAPH_H_
