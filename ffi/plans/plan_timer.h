// SPDX-License-Identifier: Apache-2.0
// Timing a plan on the device, with the device's own events.

#ifndef JAX_CUDNN_PLAN_TIMER_H_
#define JAX_CUDNN_PLAN_TIMER_H_

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "cudnn/cudnn_library.h"
#include "plans/plan.h"

namespace jax_cudnn {

// Device pointers for one launch; the caller owns the memory, on the plan's device.
struct LaunchBuffers {
  std::vector<void*> operands;
  std::vector<void*> results;
};

// How to time: `launches` in a row between two events, `samples` times.
struct TimingSettings {
  // Taken in turn, launch by launch, so that they do not stay in the cache.
  std::vector<LaunchBuffers> sets;
  void* workspace = nullptr;
  int launches = 1;
  int samples = 1;
};

// Microseconds a launch, one number per sample, after one launch of every set that is
// not timed. Runs on a stream of its own and waits for it.
StatusOr<std::vector<double>> TimePlan(const Plan& plan, const CudnnRuntime& runtime,
                                       int device, const TimingSettings& settings);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLAN_TIMER_H_
