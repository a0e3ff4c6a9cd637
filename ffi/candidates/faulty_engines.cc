// SPDX-License-Identifier: Apache-2.0
// The engines that were seen to be faulty.

#include "candidates/faulty_engines.h"

#include <algorithm>
#include <string_view>

namespace jax_cudnn {
namespace {

struct Fault {
  std::string_view kind;  // of a node in the graph
  int64_t engine;
  std::string_view what;
};

constexpr Fault kFaults[] = {
    // Its kernel "vecAdd", which sums the gradients of scale and bias over the batch.
    // Seen with 9.19.0 on an H200, by compute-sanitizer.
    {"group_norm_backward", 0,
     "it launches a kernel on CUDA's default stream, before its operands are there"},
};

}  // namespace

std::string FaultOf(const GraphSpec& graph, int64_t engine) {
  for (const Fault& fault : kFaults) {
    const bool is_there =
        std::any_of(graph.nodes.begin(), graph.nodes.end(),
                    [&](const NodeSpec& node) { return node.kind == fault.kind; });
    if (is_there && engine == fault.engine) return std::string(fault.what);
  }
  return "";
}

}  // namespace jax_cudnn
