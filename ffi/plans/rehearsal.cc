// SPDX-License-Identifier: Apache-2.0
// Capturing a launch that never runs.

#include "plans/rehearsal.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cudnn/cuda_device.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {
namespace {

// cudaStreamCaptureModeRelaxed: cuDNN may load kernels meanwhile, and captures of other
// threads are not disturbed.
constexpr int kRelaxed = 2;

// cudaGraphNodeTypeKernel.
constexpr int kKernelNode = 0;

// Stands for every operand and result and for the workspace: no kernel that is captured
// reads it, one that cuDNN launches elsewhere is kept away (faulty_engines.h), and
// cuDNN looks at no more than that it is aligned and not null.
constexpr uintptr_t kNowhere = uintptr_t{1} << 40;

// The graph that a stream captures, from Begin until this is destroyed.
class Capture {
 public:
  Capture(const CudnnRuntime& runtime, CudaStream stream)
      : runtime_(runtime), stream_(stream) {}
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() {
    // What failed here is of no interest: nothing of it will run.
    if (is_open_) static_cast<void>(End());
    if (exec_ != nullptr) static_cast<void>(runtime_.cuda.graph_exec_destroy(exec_));
    if (graph_ != nullptr) static_cast<void>(runtime_.cuda.graph_destroy(graph_));
  }

  Status Begin() {
    RETURN_IF_ERROR(CheckCuda(runtime_,
                              runtime_.cuda.stream_begin_capture(stream_, kRelaxed),
                              "cudaStreamBeginCapture"));
    is_open_ = true;
    return {};
  }

  Status End() {
    is_open_ = false;
    return CheckCuda(runtime_, runtime_.cuda.stream_end_capture(stream_, &graph_),
                     "cudaStreamEndCapture");
  }

  // Leaves the kernels alone: CUDA looks at the addresses of the other nodes, which set
  // or copy memory, and ours is none.
  Status KeepKernels() {
    const CudaFunctions& cuda = runtime_.cuda;
    size_t count = 0;
    RETURN_IF_ERROR(CheckCuda(runtime_, cuda.graph_get_nodes(graph_, nullptr, &count),
                              "cudaGraphGetNodes"));
    std::vector<CudaGraphNode> nodes(count);
    RETURN_IF_ERROR(CheckCuda(runtime_,
                              cuda.graph_get_nodes(graph_, nodes.data(), &count),
                              "cudaGraphGetNodes"));
    for (CudaGraphNode node : nodes) {
      int type = kKernelNode;
      RETURN_IF_ERROR(CheckCuda(runtime_, cuda.graph_node_get_type(node, &type),
                                "cudaGraphNodeGetType"));
      if (type == kKernelNode) continue;
      RETURN_IF_ERROR(
          CheckCuda(runtime_, cuda.graph_destroy_node(node), "cudaGraphDestroyNode"));
    }
    return {};
  }

  // Checks what CUDA leaves unchecked while it captures: grids, shared memory.
  Status Instantiate() {
    return CheckCuda(runtime_, runtime_.cuda.graph_instantiate(&exec_, graph_, 0),
                     "cudaGraphInstantiate");
  }

 private:
  const CudnnRuntime& runtime_;
  CudaStream stream_;
  CudaGraph graph_ = nullptr;
  CudaGraphExec exec_ = nullptr;
  bool is_open_ = false;
};

Status LaunchIntoGraph(const Plan& plan, const CudnnRuntime& runtime,
                       CudnnHandle handle, CudaStream stream) {
  std::array<void*, kMaxOperands> nowhere;
  nowhere.fill(reinterpret_cast<void*>(kNowhere));  // NOLINT: never dereferenced
  Capture capture(runtime, stream);
  RETURN_IF_ERROR(capture.Begin());
  RETURN_IF_ERROR(
      plan.Execute(handle, stream, nowhere.data(), nowhere.data(), nowhere[0]));
  RETURN_IF_ERROR(capture.End());
  RETURN_IF_ERROR(capture.KeepKernels());
  return capture.Instantiate();
}

}  // namespace

Status Rehearse(const Plan& plan, const PlanTarget& target) {
  if (target.handle == nullptr || plan.Waits()) return {};
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  CudnnHandle handle = target.handle;
  ASSIGN_OR_RETURN(const OwnStream stream, OwnStream::Create(runtime));
  const auto& functions = runtime.cudnn.functions;
  if (const int error = functions.set_stream(handle, stream.get()); error != 0) {
    return Internal(std::string("cudnnSetStream failed: ") +
                    functions.get_error_string(error));
  }
  const Status launched = LaunchIntoGraph(plan, runtime, handle, stream.get());
  // Whoever launches with the handle sets his own stream; planning needs none.
  static_cast<void>(functions.set_stream(handle, nullptr));
  if (launched.ok()) return {};
  // The error was ours to provoke: the next caller of CUDA must not find it.
  static_cast<void>(runtime.cuda.get_last_error());
  return Unimplemented("it builds and cannot be launched: " + launched.message());
}

}  // namespace jax_cudnn
