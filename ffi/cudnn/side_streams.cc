// SPDX-License-Identifier: Apache-2.0
// Ordering streams by events.

#include "cudnn/side_streams.h"

#include <utility>

namespace jax_cudnn {

StatusOr<std::unique_ptr<SideStreams>> SideStreams::Create(const CudnnRuntime& runtime,
                                                           size_t count) {
  std::unique_ptr<SideStreams> streams(new SideStreams(runtime));
  const CudaFunctions& cuda = runtime.cuda;
  RETURN_IF_ERROR(
      CheckCuda(runtime, cuda.event_create(&streams->begun_), "cudaEventCreate"));
  for (size_t i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(OwnStream stream, OwnStream::Create(runtime));
    CudaEvent done = nullptr;
    RETURN_IF_ERROR(CheckCuda(runtime, cuda.event_create(&done), "cudaEventCreate"));
    streams->lanes_.push_back({std::move(stream), done});
  }
  return streams;
}

SideStreams::~SideStreams() {
  // A failure here has shown itself in the call before.
  if (begun_ != nullptr) static_cast<void>(runtime_.cuda.event_destroy(begun_));
  for (const Lane& lane : lanes_) {
    static_cast<void>(runtime_.cuda.event_destroy(lane.done));
  }
}

Status SideStreams::Fork(CudaStream main) {
  const CudaFunctions& cuda = runtime_.cuda;
  RETURN_IF_ERROR(
      CheckCuda(runtime_, cuda.event_record(begun_, main), "cudaEventRecord"));
  for (const Lane& lane : lanes_) {
    RETURN_IF_ERROR(CheckCuda(runtime_,
                              cuda.stream_wait_event(lane.stream.get(), begun_, 0),
                              "cudaStreamWaitEvent"));
  }
  return {};
}

Status SideStreams::Join(CudaStream main) {
  const CudaFunctions& cuda = runtime_.cuda;
  for (const Lane& lane : lanes_) {
    RETURN_IF_ERROR(CheckCuda(runtime_, cuda.event_record(lane.done, lane.stream.get()),
                              "cudaEventRecord"));
    RETURN_IF_ERROR(CheckCuda(runtime_, cuda.stream_wait_event(main, lane.done, 0),
                              "cudaStreamWaitEvent"));
  }
  return {};
}

}  // namespace jax_cudnn
