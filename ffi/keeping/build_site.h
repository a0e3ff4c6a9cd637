// SPDX-License-Identifier: Apache-2.0
// What it takes to build a plan on a device of this machine, and what plans that are
// built there depend on.

#ifndef JAX_CUDNN_BUILD_SITE_H_
#define JAX_CUDNN_BUILD_SITE_H_

#include <string>
#include <utility>

#include "base/status.h"
#include "cudnn/cuda_device.h"
#include "cudnn/cudnn_library.h"
#include "cudnn/handle_pool.h"
#include "keeping/plan_file.h"
#include "plans/plan.h"

namespace jax_cudnn {

// The key of plans for a target, without the graph, the request and what the driver
// says: those of a target that need not be there.
PlanKey TargetKey(const CudnnRuntime& runtime, const PlanTarget& target);

// A device that is current for the calling thread, with a handle to build with, until
// this is destroyed on the same thread.
class BuildSite {
 public:
  static StatusOr<BuildSite> Enter(int device);

  const PlanTarget& target() const { return target_; }
  // The key of a plan that is built here.
  PlanKey KeyOf(const std::string& text, const std::string& request) const;

 private:
  BuildSite(DeviceGuard guard, HandleLease lease)
      : guard_(std::move(guard)), lease_(std::move(lease)) {}

  DeviceGuard guard_;
  HandleLease lease_;
  PlanTarget target_;
  PlanKey key_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_BUILD_SITE_H_
