// SPDX-License-Identifier: Apache-2.0
// Holding a plan and launching it.

#include "plans/plan.h"

#include <array>
#include <utility>

#include "frontend/frontend_status.h"
#include "plans/launchable_graph.h"

namespace jax_cudnn {

Plan::Plan(std::unique_ptr<LaunchableGraph> launchable, Candidate candidate,
           std::vector<std::string> failures)
    : launchable_(std::move(launchable)),
      candidate_(std::move(candidate)),
      failures_(std::move(failures)) {}

Plan::~Plan() = default;

Status Plan::Execute(CudnnHandle handle, void* const* operands, void* const* results,
                     void* workspace) const {
  std::array<void*, kMaxOperands> pointers;
  const auto& sources = launchable_->sources;
  for (size_t i = 0; i < sources.size(); ++i) {
    const PointerSource& source = sources[i];
    void* const memory = (source.is_result ? results : operands)[source.index];
    pointers[i] = static_cast<char*>(memory) + source.offset_bytes;
  }
  const auto error = launchable_->graph->execute(
      handle, pointers.data(), static_cast<int>(sources.size()), workspace);
  return error.is_good() ? Status() : ExecutionStatus(error);
}

}  // namespace jax_cudnn
