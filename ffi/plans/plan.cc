// SPDX-License-Identifier: Apache-2.0
// Holding a plan and launching it.

#include "plans/plan.h"

#include <utility>

namespace jax_cudnn {

Plan::Plan(std::unique_ptr<const Launchable> launchable, Candidate candidate,
           std::vector<std::string> failures)
    : launchable_(std::move(launchable)),
      candidate_(std::move(candidate)),
      failures_(std::move(failures)) {}

Plan::~Plan() = default;

Status Plan::Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                     void* const* results, void* workspace) const {
  return launchable_->Execute(handle, stream, operands, results, workspace);
}

}  // namespace jax_cudnn
