// SPDX-License-Identifier: Apache-2.0
// A built graph of the frontend, with the order in which it takes its pointers.

#ifndef JAX_CUDNN_LAUNCHABLE_GRAPH_H_
#define JAX_CUDNN_LAUNCHABLE_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "candidates/launchable.h"
#include "candidates/pointer_source.h"
#include "frontend/frontend_graph.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

class LaunchableGraph : public Launchable {
 public:
  // Matches cuDNN's argument list with the operands and results of `spec`, whose plan
  // `graph` has. At most kMaxOperands sources.
  static StatusOr<std::unique_ptr<LaunchableGraph>> Make(
      const GraphSpec& spec, std::shared_ptr<FrontendGraph> graph);

  Status Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                 void* const* results, void* workspace) const override;
  StatusOr<std::string> Serialize() const override;

 private:
  LaunchableGraph(std::shared_ptr<FrontendGraph> graph,
                  std::vector<PointerSource> sources)
      : graph_(std::move(graph)), sources_(std::move(sources)) {}

  std::shared_ptr<FrontendGraph> graph_;
  std::vector<PointerSource> sources_;  // in the order of cuDNN's argument list
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_LAUNCHABLE_GRAPH_H_
