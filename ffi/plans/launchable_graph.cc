// SPDX-License-Identifier: Apache-2.0
// Finding out which pointer cuDNN wants where.

#include "plans/launchable_graph.h"

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>

#include "frontend/graph_builder.h"
#include "plans/plan.h"

namespace jax_cudnn {

StatusOr<std::unique_ptr<LaunchableGraph>> MakeLaunchable(
    const GraphSpec& spec, std::shared_ptr<FrontendGraph> graph) {
  std::unordered_map<int64_t, PointerSource> by_uid;
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    by_uid[TensorUid(spec, spec.inputs[i])] = {false, i};
  }
  for (size_t i = 0; i < spec.outputs.size(); ++i) {
    by_uid[TensorUid(spec, spec.outputs[i])] = {true, i};
  }
  std::vector<PointerSource> sources;
  size_t results = 0;
  for (const int64_t uid : graph->get_variant_pack_uids_sorted()) {
    const auto found = by_uid.find(uid);
    if (found == by_uid.end()) {
      return Internal("cuDNN wants a pointer for tensor id " + std::to_string(uid) +
                      ", which is neither an operand nor a result");
    }
    results += found->second.is_result ? 1 : 0;
    sources.push_back(found->second);
  }
  if (results != spec.outputs.size() || sources.size() > kMaxOperands) {
    return Internal("cuDNN's plan takes " + std::to_string(sources.size()) +
                    " tensors and writes " + std::to_string(results) + " of the " +
                    std::to_string(spec.outputs.size()) + " results");
  }
  return std::make_unique<LaunchableGraph>(
      LaunchableGraph{std::move(graph), std::move(sources)});
}

}  // namespace jax_cudnn
