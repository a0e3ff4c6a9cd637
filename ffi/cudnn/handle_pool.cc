// SPDX-License-Identifier: Apache-2.0
// The pool of cuDNN handles.

#include "cudnn/handle_pool.h"

#include <string>

namespace jax_cudnn {
namespace {

// More handles than this help no one: launches on one device queue in the driver.
constexpr int kMaxHandles = 8;

StatusOr<CudnnHandle> CreateHandle(const CudnnRuntime& runtime, int device) {
  ASSIGN_OR_RETURN(const DeviceGuard guard, DeviceGuard::Enter(runtime, device));
  CudnnHandle handle = nullptr;
  const int status = runtime.cudnn.functions.create(&handle);
  if (status == 0) return handle;
  const char* text = runtime.cudnn.functions.get_error_string(status);
  return Internal("cudnnCreate failed on device " + std::to_string(device) + ": " +
                  (text == nullptr ? "unknown cuDNN error" : text));
}

}  // namespace

HandleLease::HandleLease(HandleLease&& other) noexcept
    : pool_(other.pool_), device_(other.device_), handle_(other.handle_) {
  other.handle_ = nullptr;
}

HandleLease::~HandleLease() {
  if (handle_ != nullptr) pool_->Release(device_, handle_);
}

HandlePool& HandlePool::Global() {
  // Leaked with the handles in it; see the class.
  static auto& pool = *new HandlePool;
  return pool;
}

Status HandlePool::Reserve(const CudnnRuntime& runtime, int device) {
  Device& entry = devices_[static_cast<size_t>(device)];
  {
    const std::scoped_lock lock(entry.mutex);
    if (!entry.free.empty() || entry.executing >= kMaxHandles) return {};
  }
  ASSIGN_OR_RETURN(CudnnHandle handle, CreateHandle(runtime, device));
  {
    const std::scoped_lock lock(entry.mutex);
    entry.free.push_back(handle);
  }
  entry.returned.notify_one();
  return {};
}

StatusOr<HandleLease> HandlePool::Acquire(int device) {
  Device& entry = devices_[static_cast<size_t>(device)];
  std::unique_lock<std::mutex> lock(entry.mutex);
  if (entry.free.empty() && entry.executing == 0) {
    return FailedPrecondition("no cuDNN handle was created for device " +
                              std::to_string(device) + " before execution");
  }
  entry.returned.wait(lock, [&] { return !entry.free.empty(); });
  const CudnnHandle handle = entry.free.back();
  entry.free.pop_back();
  ++entry.executing;
  return HandleLease(this, device, handle);
}

StatusOr<HandleLease> HandlePool::AcquireForBuild(const CudnnRuntime& runtime,
                                                  int device) {
  Device& entry = devices_[static_cast<size_t>(device)];
  {
    const std::scoped_lock lock(entry.mutex);
    if (entry.free.size() > 1) {
      const CudnnHandle handle = entry.free.back();
      entry.free.pop_back();
      ++entry.executing;
      return HandleLease(this, device, handle);
    }
  }
  ASSIGN_OR_RETURN(CudnnHandle handle, CreateHandle(runtime, device));
  const std::scoped_lock lock(entry.mutex);
  ++entry.executing;
  return HandleLease(this, device, handle);
}

void HandlePool::Release(int device, CudnnHandle handle) {
  Device& entry = devices_[static_cast<size_t>(device)];
  {
    const std::scoped_lock lock(entry.mutex);
    entry.free.push_back(handle);
    --entry.executing;
  }
  entry.returned.notify_one();
}

}  // namespace jax_cudnn
