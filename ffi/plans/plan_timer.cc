// SPDX-License-Identifier: Apache-2.0
// A stream, two events, and launches between them.

#include "plans/plan_timer.h"

#include <string>

#include "cudnn/cuda_device.h"
#include "cudnn/handle_pool.h"

namespace jax_cudnn {
namespace {

// The events of one measurement on a stream.
class Stopwatch {
 public:
  Stopwatch(const CudnnRuntime& runtime, CudaStream stream)
      : runtime_(runtime), stream_(stream) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    // A failure here has shown itself in the call before, or does in the next one.
    for (CudaEvent event : {start_, stop_}) {
      if (event != nullptr) static_cast<void>(runtime_.cuda.event_destroy(event));
    }
  }

  Status Init() {
    const CudaFunctions& cuda = runtime_.cuda;
    RETURN_IF_ERROR(CheckCuda(runtime_, cuda.event_create(&start_), "cudaEventCreate"));
    return CheckCuda(runtime_, cuda.event_create(&stop_), "cudaEventCreate");
  }

  Status Start() {
    return CheckCuda(runtime_, runtime_.cuda.event_record(start_, stream_),
                     "cudaEventRecord");
  }

  // Microseconds since Start, on the device.
  StatusOr<double> Stop() {
    const CudaFunctions& cuda = runtime_.cuda;
    RETURN_IF_ERROR(
        CheckCuda(runtime_, cuda.event_record(stop_, stream_), "cudaEventRecord"));
    RETURN_IF_ERROR(
        CheckCuda(runtime_, cuda.event_synchronize(stop_), "cudaEventSynchronize"));
    float milliseconds = 0;
    RETURN_IF_ERROR(CheckCuda(runtime_,
                              cuda.event_elapsed_time(&milliseconds, start_, stop_),
                              "cudaEventElapsedTime"));
    return static_cast<double>(milliseconds) * 1e3;
  }

 private:
  const CudnnRuntime& runtime_;
  CudaStream stream_;
  CudaEvent start_ = nullptr;
  CudaEvent stop_ = nullptr;
};

}  // namespace

StatusOr<std::vector<double>> TimePlan(const Plan& plan, const CudnnRuntime& runtime,
                                       int device, const TimingSettings& settings) {
  if (settings.sets.empty() || settings.launches < 1) {
    return InvalidArgument("timing needs buffers and at least one launch");
  }
  ASSIGN_OR_RETURN(const DeviceGuard guard, DeviceGuard::Enter(runtime, device));
  ASSIGN_OR_RETURN(const HandleLease handle,
                   HandlePool::Global().AcquireForBuild(runtime, device));
  ASSIGN_OR_RETURN(const OwnStream stream, OwnStream::Create(runtime));
  Stopwatch watch(runtime, stream.get());
  RETURN_IF_ERROR(watch.Init());
  if (runtime.cudnn.functions.set_stream(handle.get(), stream.get()) != 0) {
    return Internal("cudnnSetStream failed");
  }
  const auto launch = [&](size_t i) {
    const LaunchBuffers& set = settings.sets[i % settings.sets.size()];
    return plan.Execute(handle.get(), stream.get(), set.operands.data(),
                        set.results.data(), settings.workspace);
  };
  for (size_t i = 0; i < settings.sets.size(); ++i) RETURN_IF_ERROR(launch(i));
  std::vector<double> samples;
  size_t turn = 0;
  for (int sample = 0; sample < settings.samples; ++sample) {
    RETURN_IF_ERROR(watch.Start());
    for (int i = 0; i < settings.launches; ++i) RETURN_IF_ERROR(launch(turn++));
    ASSIGN_OR_RETURN(const double microseconds, watch.Stop());
    samples.push_back(microseconds / settings.launches);
  }
  return samples;
}

}  // namespace jax_cudnn
