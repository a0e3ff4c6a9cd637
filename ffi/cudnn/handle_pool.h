// SPDX-License-Identifier: Apache-2.0
// cuDNN handles, pooled per device; a handle is never used by two threads at once.

#ifndef JAX_CUDNN_HANDLE_POOL_H_
#define JAX_CUDNN_HANDLE_POOL_H_

#include <array>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "cudnn/cuda_device.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {

class HandlePool;

// A handle for the time of one call; gives it back on destruction.
class HandleLease {
 public:
  HandleLease(HandleLease&& other) noexcept;
  HandleLease& operator=(HandleLease&&) = delete;
  HandleLease(const HandleLease&) = delete;
  HandleLease& operator=(const HandleLease&) = delete;
  ~HandleLease();

  CudnnHandle get() const { return handle_; }

 private:
  friend class HandlePool;
  HandleLease(HandlePool* pool, int device, CudnnHandle handle)
      : pool_(pool), device_(device), handle_(handle) {}

  HandlePool* pool_;
  int device_;
  CudnnHandle handle_;
};

// Handles are never destroyed: at exit the order in which cuDNN, CUDA and JAX go down
// is not ours to choose, and cudnnDestroy after CUDA's teardown crashes (cudnn-frontend
// issue 1486). All functions are thread-safe.
class HandlePool {
 public:
  static HandlePool& Global();

  // Makes sure that Acquire will succeed on `device`, and that threads which execute at
  // the same time do not queue for long. Creates handles: never call during a capture.
  Status Reserve(const CudnnRuntime& runtime, int device);

  // A handle to execute with. Creates nothing; waits for another thread's launch where
  // all handles are out. FAILED_PRECONDITION without an earlier Reserve.
  StatusOr<HandleLease> Acquire(int device);

  // A handle for a slow call such as building a plan: always leaves one to execute
  // with.
  StatusOr<HandleLease> AcquireForBuild(const CudnnRuntime& runtime, int device);

 private:
  friend class HandleLease;

  struct Device {
    std::mutex mutex;  // guards the members below; never held while calling cuDNN
    std::condition_variable returned;
    std::vector<CudnnHandle> free;
    int executing = 0;  // handles on loan
  };

  void Release(int device, CudnnHandle handle);

  std::array<Device, kMaxDevices> devices_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_HANDLE_POOL_H_
