// SPDX-License-Identifier: Apache-2.0
// Entering a device to build plans there.

#include "keeping/build_site.h"

#include "frontend/versions.h"

namespace jax_cudnn {

PlanKey TargetKey(const CudnnRuntime& runtime, const PlanTarget& target) {
  PlanKey key = LocalKey();
  key.sm_version = target.sm_version;
  key.sm_count = target.sm_count;
  key.cudnn_version = runtime.cudnn.version;
  key.cuda_major = runtime.cudnn.cuda_major;
  key.cublaslt_version = runtime.cublaslt_version;
  key.nvrtc_version = runtime.nvrtc_version;
  key.frontend_version = FrontendVersion();
  return key;
}

StatusOr<BuildSite> BuildSite::Enter(int device) {
  ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
  ASSIGN_OR_RETURN(const DeviceInfo info, QueryDevice(*runtime, device));
  ASSIGN_OR_RETURN(DeviceGuard guard, DeviceGuard::Enter(*runtime, device));
  ASSIGN_OR_RETURN(HandleLease lease,
                   HandlePool::Global().AcquireForBuild(*runtime, device));
  BuildSite site(std::move(guard), std::move(lease));
  site.target_.handle = site.lease_.get();
  site.target_.sm_version = info.sm_version;
  site.target_.sm_count = info.sm_count;
  site.key_ = TargetKey(*runtime, site.target_);
  site.key_.gpu = info.name;
  site.key_.driver_version = info.driver_version;
  return site;
}

PlanKey BuildSite::KeyOf(const std::string& text, const std::string& request) const {
  PlanKey key = key_;
  key.graph = text;
  key.request = request;
  return key;
}

}  // namespace jax_cudnn
