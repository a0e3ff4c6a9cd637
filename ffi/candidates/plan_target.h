// SPDX-License-Identifier: Apache-2.0
// The device that a plan is for, which need not be there.

#ifndef JAX_CUDNN_PLAN_TARGET_H_
#define JAX_CUDNN_PLAN_TARGET_H_

#include <string>

#include "cudnn/cudnn_library.h"

namespace jax_cudnn {

// What a plan is built for: a device through one of its handles, or a description of
// a device that need not be there.
struct PlanTarget {
  CudnnHandle handle = nullptr;
  std::string device_properties;  // cuDNN's JSON; used where `handle` is null
  int sm_version = 0;             // 90 is compute capability 9.0
  int sm_count = 0;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLAN_TARGET_H_
