// SPDX-License-Identifier: Apache-2.0
// Finding out which pointer cuDNN wants where, and giving it.

#include "candidates/launchable_graph.h"

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/guard.h"
#include "frontend/frontend_status.h"
#include "frontend/refusal.h"
#include "nodes/graph_builder.h"
#include "nodes/qkv_parts.h"

namespace jax_cudnn {

StatusOr<std::unique_ptr<LaunchableGraph>> LaunchableGraph::Make(
    const GraphSpec& spec, std::shared_ptr<FrontendGraph> graph) {
  // Tensors are counted as in the graph that was written.
  ASSIGN_OR_RETURN(const GraphSpec divided, WithQkvParts(spec));
  std::map<std::string, PointerSource, std::less<>> by_name;
  for (size_t i = 0; i < spec.inputs.size(); ++i) by_name[spec.inputs[i]] = {false, i};
  for (size_t i = 0; i < spec.outputs.size(); ++i) by_name[spec.outputs[i]] = {true, i};
  std::unordered_map<int64_t, PointerSource> by_uid;
  for (const TensorSpec& tensor : divided.tensors) {
    const auto& within = tensor.within;
    const auto memory = by_name.find(within.has_value() ? within->of : tensor.name);
    if (memory == by_name.end()) continue;
    PointerSource source = memory->second;
    if (within.has_value()) {
      source.offset_bytes = within->offset * DTypeBits(tensor.dtype) / 8;
    }
    by_uid[TensorUid(divided, tensor.name)] = source;
  }
  std::vector<PointerSource> sources;
  std::set<size_t> results;
  for (const int64_t uid : graph->get_variant_pack_uids_sorted()) {
    const auto found = by_uid.find(uid);
    if (found == by_uid.end()) {
      return Internal("cuDNN wants a pointer for tensor id " + std::to_string(uid) +
                      ", which is neither an operand nor a result");
    }
    if (found->second.is_result) results.insert(found->second.index);
    sources.push_back(found->second);
  }
  if (results.size() != spec.outputs.size() || sources.size() > kMaxOperands) {
    return Internal("cuDNN's plan takes " + std::to_string(sources.size()) +
                    " tensors and writes " + std::to_string(results.size()) +
                    " of the " + std::to_string(spec.outputs.size()) + " results");
  }
  return std::unique_ptr<LaunchableGraph>(
      new LaunchableGraph(std::move(graph), std::move(sources)));
}

Status LaunchableGraph::Execute(CudnnHandle handle, CudaStream /*stream*/,
                                void* const* operands, void* const* results,
                                void* workspace) const {
  std::array<void*, kMaxOperands> pointers;
  for (size_t i = 0; i < sources_.size(); ++i) {
    const PointerSource& source = sources_[i];
    void* const memory = (source.is_result ? results : operands)[source.index];
    pointers[i] = static_cast<char*>(memory) + source.offset_bytes;
  }
  const auto error = graph_->execute(handle, pointers.data(),
                                     static_cast<int>(sources_.size()), workspace);
  return error.is_good() ? Status() : ExecutionStatus(error);
}

StatusOr<std::string> LaunchableGraph::Serialize() const {
  std::vector<uint8_t> data;
  try {
    // This overload, of vectors of uint8_t, writes plans; another one writes graphs.
    const auto error = graph_->serialize(data, /*serialize_structure=*/false);
    if (error.is_bad()) return Unimplemented(Message(error));
  } catch (const cudnn_frontend::cudnnException& error) {
    return Unimplemented(OneLine(error.what()));
  }
  return std::string(data.begin(), data.end());
}

}  // namespace jax_cudnn
