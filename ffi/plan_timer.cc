// SPDX-License-Identifier: Apache-2.0
// A stream, two events, and launches between them.

#include "plan_timer.h"

#include <string>

#include "cuda_device.h"
#include "handle_pool.h"

namespace jax_cudnn {
namespace {

// cudaStreamNonBlocking: does not wait for the default stream.
constexpr unsigned kNonBlocking = 1;

Status Check(const CudnnRuntime& runtime, int error, const char* call) {
  if (error == 0) return {};
  const char* text = runtime.cuda.get_error_string(error);
  return Internal(std::string(call) +
                  " failed: " + (text == nullptr ? "unknown CUDA error" : text));
}

// The stream and the events of one measurement.
class Stopwatch {
 public:
  explicit Stopwatch(const CudnnRuntime& runtime) : runtime_(runtime) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    // A failure here has shown itself in the call before, or does in the next one.
    for (CudaEvent event : {start_, stop_}) {
      if (event != nullptr) static_cast<void>(runtime_.cuda.event_destroy(event));
    }
    if (stream_ != nullptr) static_cast<void>(runtime_.cuda.stream_destroy(stream_));
  }

  Status Init() {
    const CudaFunctions& cuda = runtime_.cuda;
    RETURN_IF_ERROR(Check(runtime_, cuda.stream_create(&stream_, kNonBlocking),
                          "cudaStreamCreateWithFlags"));
    RETURN_IF_ERROR(Check(runtime_, cuda.event_create(&start_), "cudaEventCreate"));
    return Check(runtime_, cuda.event_create(&stop_), "cudaEventCreate");
  }

  CudaStream stream() const { return stream_; }

  Status Start() {
    return Check(runtime_, runtime_.cuda.event_record(start_, stream_),
                 "cudaEventRecord");
  }

  // Microseconds since Start, on the device.
  StatusOr<double> Stop() {
    const CudaFunctions& cuda = runtime_.cuda;
    RETURN_IF_ERROR(
        Check(runtime_, cuda.event_record(stop_, stream_), "cudaEventRecord"));
    RETURN_IF_ERROR(
        Check(runtime_, cuda.event_synchronize(stop_), "cudaEventSynchronize"));
    float milliseconds = 0;
    RETURN_IF_ERROR(Check(runtime_,
                          cuda.event_elapsed_time(&milliseconds, start_, stop_),
                          "cudaEventElapsedTime"));
    return static_cast<double>(milliseconds) * 1e3;
  }

 private:
  const CudnnRuntime& runtime_;
  CudaStream stream_ = nullptr;
  CudaEvent start_ = nullptr;
  CudaEvent stop_ = nullptr;
};

}  // namespace

StatusOr<std::vector<double>> TimePlan(const Plan& plan, const CudnnRuntime& runtime,
                                       int device, const TimingRequest& request) {
  if (request.sets.empty() || request.launches < 1) {
    return InvalidArgument("timing needs buffers and at least one launch");
  }
  ASSIGN_OR_RETURN(const DeviceGuard guard, DeviceGuard::Enter(runtime, device));
  ASSIGN_OR_RETURN(const HandleLease handle,
                   HandlePool::Global().AcquireForBuild(runtime, device));
  Stopwatch watch(runtime);
  RETURN_IF_ERROR(watch.Init());
  if (runtime.cudnn.functions.set_stream(handle.get(), watch.stream()) != 0) {
    return Internal("cudnnSetStream failed");
  }
  const auto launch = [&](size_t i) {
    const LaunchBuffers& set = request.sets[i % request.sets.size()];
    return plan.Execute(handle.get(), set.operands.data(), set.results.data(),
                        request.workspace);
  };
  for (size_t i = 0; i < request.sets.size(); ++i) RETURN_IF_ERROR(launch(i));
  std::vector<double> samples;
  size_t turn = 0;
  for (int sample = 0; sample < request.samples; ++sample) {
    RETURN_IF_ERROR(watch.Start());
    for (int i = 0; i < request.launches; ++i) RETURN_IF_ERROR(launch(turn++));
    ASSIGN_OR_RETURN(const double microseconds, watch.Stop());
    samples.push_back(microseconds / request.launches);
  }
  return samples;
}

}  // namespace jax_cudnn
