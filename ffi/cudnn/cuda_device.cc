// SPDX-License-Identifier: Apache-2.0
// Device queries and the device guard.

#include "cudnn/cuda_device.h"

#include <array>

namespace jax_cudnn {
namespace {

// Values of cudaDeviceAttr, the same in CUDA 12 and 13 (driver_types.h). The struct
// that cudaGetDeviceProperties fills differs between the two, so single attributes it
// is.
constexpr int kMultiProcessorCount = 16;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

StatusOr<int> Attribute(const CudnnRuntime& runtime, int attribute, int device) {
  int value = 0;
  RETURN_IF_ERROR(
      CheckCuda(runtime, runtime.cuda.device_get_attribute(&value, attribute, device),
                "cudaDeviceGetAttribute"));
  return value;
}

// cudaStreamNonBlocking: does not wait for the default stream.
constexpr unsigned kNonBlocking = 1;

}  // namespace

Status CheckCuda(const CudnnRuntime& runtime, int error, const char* call) {
  if (error == 0) return {};
  const char* text = runtime.cuda.get_error_string(error);
  return Internal(std::string(call) +
                  " failed: " + (text == nullptr ? "unknown CUDA error" : text));
}

StatusOr<DeviceGuard> DeviceGuard::Enter(const CudnnRuntime& runtime, int device) {
  int former = 0;
  RETURN_IF_ERROR(
      CheckCuda(runtime, runtime.cuda.get_device(&former), "cudaGetDevice"));
  // Also where it is the device already: a thread that has called nothing of CUDA has
  // that device's number and no context, and engines that load code then fail.
  RETURN_IF_ERROR(CheckCuda(runtime, runtime.cuda.set_device(device), "cudaSetDevice"));
  return DeviceGuard(former == device ? nullptr : &runtime, former);
}

DeviceGuard::DeviceGuard(DeviceGuard&& other) noexcept
    : runtime_(other.runtime_), former_(other.former_) {
  other.runtime_ = nullptr;
}

DeviceGuard::~DeviceGuard() {
  if (runtime_ != nullptr) {
    // Nothing to be done about a failure here: the next call on that device tells.
    static_cast<void>(runtime_->cuda.set_device(former_));
  }
}

StatusOr<OwnStream> OwnStream::Create(const CudnnRuntime& runtime) {
  CudaStream stream = nullptr;
  RETURN_IF_ERROR(CheckCuda(runtime, runtime.cuda.stream_create(&stream, kNonBlocking),
                            "cudaStreamCreateWithFlags"));
  return OwnStream(&runtime, stream);
}

OwnStream::OwnStream(OwnStream&& other) noexcept
    : runtime_(other.runtime_), stream_(other.stream_) {
  other.stream_ = nullptr;
}

OwnStream::~OwnStream() {
  // A failure here has shown itself in the call before, or does in the next one.
  if (stream_ != nullptr) static_cast<void>(runtime_->cuda.stream_destroy(stream_));
}

Status CheckDevice(const CudnnRuntime& runtime, int device) {
  int count = 0;
  const int error = runtime.cuda.get_device_count(&count);
  if (error != 0) {
    const char* text = runtime.cuda.get_error_string(error);
    return FailedPrecondition(
        std::string("There is no CUDA device to plan for. cudaGetDeviceCount: ") +
        (text == nullptr ? "unknown CUDA error" : text));
  }
  if (device < 0 || device >= count || device >= kMaxDevices) {
    return InvalidArgument("device " + std::to_string(device) + " is not one of the " +
                           std::to_string(count) + " CUDA devices");
  }
  return {};
}

StatusOr<DeviceInfo> QueryDevice(const CudnnRuntime& runtime, int device) {
  RETURN_IF_ERROR(CheckDevice(runtime, device));
  ASSIGN_OR_RETURN(const int major,
                   Attribute(runtime, kComputeCapabilityMajor, device));
  ASSIGN_OR_RETURN(const int minor,
                   Attribute(runtime, kComputeCapabilityMinor, device));
  ASSIGN_OR_RETURN(const int count, Attribute(runtime, kMultiProcessorCount, device));
  DeviceInfo info;
  info.sm_version = major * 10 + minor;
  info.sm_count = count;
  RETURN_IF_ERROR(CheckCuda(runtime,
                            runtime.cuda.driver_get_version(&info.driver_version),
                            "cudaDriverGetVersion"));
  int driver_device = 0;
  std::array<char, 256> name{};
  if (runtime.cuda.driver_device_get(&driver_device, device) == 0 &&
      runtime.cuda.driver_device_get_name(name.data(), static_cast<int>(name.size()),
                                          driver_device) == 0) {
    info.name = name.data();
  }
  return info;
}

}  // namespace jax_cudnn
