// SPDX-License-Identifier: Apache-2.0
// What we ask and tell CUDA about devices, through the libraries opened at run time.

#ifndef JAX_CUDNN_CUDA_DEVICE_H_
#define JAX_CUDNN_CUDA_DEVICE_H_

#include <string>

#include "cudnn_library.h"
#include "status.h"

namespace jax_cudnn {

// More than any machine has; per-device tables are arrays of this length.
inline constexpr int kMaxDevices = 128;

struct DeviceInfo {
  std::string name;
  int sm_version = 0;  // 90 is compute capability 9.0
  int sm_count = 0;
  int driver_version = 0;  // the newest CUDA that the driver serves, 13000 for 13.0
};

// Makes a device current for the calling thread, and the former one on destruction.
class DeviceGuard {
 public:
  static StatusOr<DeviceGuard> Enter(const CudnnRuntime& runtime, int device);

  DeviceGuard(DeviceGuard&& other) noexcept;
  DeviceGuard& operator=(DeviceGuard&&) = delete;
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  DeviceGuard(const CudnnRuntime* runtime, int former)
      : runtime_(runtime), former_(former) {}

  const CudnnRuntime* runtime_;  // null where there is nothing to restore
  int former_;
};

// Refuses ordinals that no device of this process has.
Status CheckDevice(const CudnnRuntime& runtime, int device);

// Name, compute capability and multiprocessor count of a device, and its driver.
StatusOr<DeviceInfo> QueryDevice(const CudnnRuntime& runtime, int device);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CUDA_DEVICE_H_
