// SPDX-License-Identifier: Apache-2.0
// Streams beside the one that work was asked for on.

#ifndef JAX_CUDNN_SIDE_STREAMS_H_
#define JAX_CUDNN_SIDE_STREAMS_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "base/status.h"
#include "cudnn/cuda_device.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {

// Work on these begins after that on a main stream, and ends before what follows there.
// Of the current device; for one thread at a time.
class SideStreams {
 public:
  static StatusOr<std::unique_ptr<SideStreams>> Create(const CudnnRuntime& runtime,
                                                       size_t count);
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;
  ~SideStreams();

  size_t count() const { return lanes_.size(); }
  CudaStream stream(size_t i) const { return lanes_[i].stream.get(); }

  // Has the streams wait for what is on `main` by now.
  Status Fork(CudaStream main);
  // Has `main` wait for what is on the streams by now.
  Status Join(CudaStream main);

 private:
  struct Lane {
    OwnStream stream;
    CudaEvent done = nullptr;
  };

  explicit SideStreams(const CudnnRuntime& runtime) : runtime_(runtime) {}

  const CudnnRuntime& runtime_;
  CudaEvent begun_ = nullptr;
  std::vector<Lane> lanes_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_SIDE_STREAMS_H_
