// SPDX-License-Identifier: Apache-2.0
// What we ask and tell CUDA about devices, through the libraries opened at run time.

#ifndef JAX_CUDNN_CUDA_DEVICE_H_
#define JAX_CUDNN_CUDA_DEVICE_H_

#include <string>

#include "base/status.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {

// More than any machine has; per-device tables are arrays of this length.
inline constexpr int kMaxDevices = 128;

struct DeviceInfo {
  std::string name;
  int sm_version = 0;  // 90 is compute capability 9.0
  int sm_count = 0;
  int driver_version = 0;  // the newest CUDA that the driver serves, 13000 for 13.0
};

// OK for 0, the success of CUDA's functions; else what CUDA says of the error.
Status CheckCuda(const CudnnRuntime& runtime, int error, const char* call);

// Makes a device and its primary context current for the calling thread, and the former
// device on destruction.
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

// A stream of the current device that nobody else uses, destroyed with this.
class OwnStream {
 public:
  static StatusOr<OwnStream> Create(const CudnnRuntime& runtime);

  OwnStream(OwnStream&& other) noexcept;
  OwnStream& operator=(OwnStream&&) = delete;
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream();

  CudaStream get() const { return stream_; }

 private:
  OwnStream(const CudnnRuntime* runtime, CudaStream stream)
      : runtime_(runtime), stream_(stream) {}

  const CudnnRuntime* runtime_;
  CudaStream stream_;  // null after a move
};

// Refuses ordinals that no device of this process has.
Status CheckDevice(const CudnnRuntime& runtime, int device);

// Name, compute capability and multiprocessor count of a device, and its driver.
StatusOr<DeviceInfo> QueryDevice(const CudnnRuntime& runtime, int device);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CUDA_DEVICE_H_
