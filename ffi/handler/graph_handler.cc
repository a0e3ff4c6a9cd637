// SPDX-License-Identifier: Apache-2.0
// Instantiate parses, Initialize plans, Execute launches.

#include "handler/graph_handler.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <nvtx3/nvtx3.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/guard.h"
#include "base/status.h"
#include "cudnn/cuda_device.h"
#include "cudnn/cudnn_library.h"
#include "cudnn/handle_pool.h"
#include "graph/graph_spec.h"
#include "handler/program_target.h"
#include "keeping/plan_cache.h"
#include "plans/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jax_cudnn {

namespace {

namespace ffi = xla::ffi;

// What one custom call of one executable knows; XLA owns it. Shared by all devices and
// threads that run the executable.
class GraphState {
 public:
  static ffi::TypeId id;

  GraphState(std::string op, std::string text, std::string request, GraphSpec graph,
             ProgramTarget target)
      : op_(std::move(op)),
        text_(std::move(text)),
        request_(std::move(request)),
        graph_(std::move(graph)),
        target_(target) {}

  const std::string& op() const { return op_; }
  const GraphSpec& graph() const { return graph_; }
  const ProgramTarget& target() const { return target_; }

  // The plan for a device, or null before Publish.
  const Plan* FindPlan(int device) const {
    return plans_[static_cast<size_t>(device)].load(std::memory_order_acquire);
  }

  // The plan from the cache, which builds it if need be.
  StatusOr<std::shared_ptr<const Plan>> GetPlan(int device) const {
    return PlanCache::Global().GetOrBuild(text_, graph_, request_, device);
  }

  // Lets FindPlan answer, once all that Execute relies on is in place.
  void Publish(int device, std::shared_ptr<const Plan> plan) {
    const std::scoped_lock lock(mutex_);
    auto& place = plans_[static_cast<size_t>(device)];
    if (place.load(std::memory_order_relaxed) != nullptr) return;
    place.store(plan.get(), std::memory_order_release);
    owners_.push_back(std::move(plan));
  }

 private:
  const std::string op_;
  const std::string text_;
  const std::string request_;
  const GraphSpec graph_;
  const ProgramTarget target_;
  // Written once each, under the mutex; read without it.
  std::array<std::atomic<const Plan*>, kMaxDevices> plans_{};
  std::mutex mutex_;  // guards owners_
  std::vector<std::shared_ptr<const Plan>> owners_;
};

// The timeline of a profiler shows each launch under the name of its operation.
struct NvtxDomain {
  static constexpr char const* name{"jax_cudnn"};  // NOLINT: NVTX wants this name
};
using NvtxRange = nvtx3::scoped_range_in<NvtxDomain>;

ffi::TypeId GraphState::id = XLA_FFI_UNKNOWN_TYPE_ID;

constexpr ffi::TypeInfo kStateTypeInfo = ffi::MakeTypeInfo<GraphState>();

// What workspaces get where their alignment is ours to choose. cuDNN asks for 16 bytes;
// XLA gives its own buffers 128 or more.
constexpr size_t kWorkspaceAlignment = 256;

// Execute keeps its pointers on the stack; Initialize refuses graphs with more.
constexpr size_t kMaxPointers = 128;
using Pointers = std::array<void*, kMaxPointers>;

ffi::ErrorCode ToErrorCode(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return ffi::ErrorCode::kOk;
    case StatusCode::kInvalidArgument:
      return ffi::ErrorCode::kInvalidArgument;
    case StatusCode::kUnimplemented:
      return ffi::ErrorCode::kUnimplemented;
    case StatusCode::kResourceExhausted:
      return ffi::ErrorCode::kResourceExhausted;
    case StatusCode::kFailedPrecondition:
      return ffi::ErrorCode::kFailedPrecondition;
    case StatusCode::kInternal:
      return ffi::ErrorCode::kInternal;
  }
  return ffi::ErrorCode::kInternal;
}

// Runs one stage; its failure becomes an error that names the operation.
template <typename Stage>
ffi::Error Run(std::string_view op, Stage&& stage) {
  const Status status = Guard("handler", std::forward<Stage>(stage));
  if (status.ok()) return ffi::Error::Success();
  std::string message = "jax_cudnn";
  message.append(1, ' ').append(op).append(": ").append(status.message());
  return {ToErrorCode(status.code()), std::move(message)};
}

ffi::DataType ToFfiDType(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return ffi::DataType::PRED;
    case DType::kU8:
      return ffi::DataType::U8;
    case DType::kI8:
      return ffi::DataType::S8;
    case DType::kI32:
      return ffi::DataType::S32;
    case DType::kI64:
      return ffi::DataType::S64;
    case DType::kF4E2m1fn:
      return ffi::DataType::F4E2M1FN;
    case DType::kF8E4m3fn:
      return ffi::DataType::F8E4M3FN;
    case DType::kF8E5m2:
      return ffi::DataType::F8E5M2;
    case DType::kF8E8m0fnu:
      return ffi::DataType::F8E8M0FNU;
    case DType::kBf16:
      return ffi::DataType::BF16;
    case DType::kF16:
      return ffi::DataType::F16;
    case DType::kF32:
      return ffi::DataType::F32;
    case DType::kF64:
      return ffi::DataType::F64;
  }
  return ffi::DataType::INVALID;
}

// --- the call's buffers -------------------------------------------------------------

StatusOr<ffi::AnyBuffer> Operand(const ffi::RemainingArgs& args, size_t index) {
  const auto buffer = args.get<ffi::AnyBuffer>(index);
  if (!buffer.has_value()) return Internal(buffer.error().message());
  return *buffer;
}

StatusOr<ffi::AnyBuffer> Result(const ffi::RemainingRets& rets, size_t index) {
  auto buffer = rets.get<ffi::AnyBuffer>(index);
  if (!buffer.has_value()) return Internal(buffer.error().message());
  return **buffer;
}

Status CheckCount(const char* label, size_t found, size_t expected) {
  if (found == expected) return {};
  return InvalidArgument("the call has " + std::to_string(found) + " " + label +
                         ", its graph " + std::to_string(expected));
}

Status CheckBuffer(const TensorSpec& tensor, const ffi::AnyBuffer& buffer) {
  const auto found = buffer.dimensions();
  const std::vector<int64_t> shape(found.begin(), found.end());
  const std::vector<int64_t> expected = tensor.StoredShape();
  if (buffer.element_type() == ToFfiDType(tensor.dtype) && shape == expected) return {};
  return InvalidArgument("the buffer for '" + tensor.name + "' has XLA dtype " +
                         std::to_string(static_cast<int>(buffer.element_type())) +
                         " and shape " + ListText(shape) + "; its graph says " +
                         std::string(DTypeName(tensor.dtype)) + " (" +
                         std::to_string(static_cast<int>(ToFfiDType(tensor.dtype))) +
                         ") and " + ListText(expected));
}

// Compares the call with its graph. `extra_results` is 1 where a workspace follows.
Status CheckCall(const GraphSpec& graph, const ffi::RemainingArgs& args,
                 const ffi::RemainingRets& rets, size_t extra_results) {
  RETURN_IF_ERROR(CheckCount("operands", args.size(), graph.inputs.size()));
  RETURN_IF_ERROR(
      CheckCount("results", rets.size(), graph.outputs.size() + extra_results));
  if (args.size() > kMaxPointers || rets.size() > kMaxPointers) {
    return InvalidArgument("a call takes at most " + std::to_string(kMaxPointers) +
                           " operands and results");
  }
  for (size_t i = 0; i < args.size(); ++i) {
    ASSIGN_OR_RETURN(const ffi::AnyBuffer buffer, Operand(args, i));
    RETURN_IF_ERROR(CheckBuffer(graph.Tensor(graph.inputs[i]), buffer));
  }
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    ASSIGN_OR_RETURN(const ffi::AnyBuffer buffer, Result(rets, i));
    RETURN_IF_ERROR(CheckBuffer(graph.Tensor(graph.outputs[i]), buffer));
  }
  return {};
}

Status CheckWorkspace(const ffi::RemainingRets& rets, const Plan& plan) {
  if (plan.Waits()) {
    return FailedPrecondition("the plan " + plan.candidate().name +
                              " waits for the device, so this target, which may be "
                              "captured, cannot run it. Lower the program again.");
  }
  ASSIGN_OR_RETURN(const ffi::AnyBuffer buffer, Result(rets, rets.size() - 1));
  if (buffer.element_type() != ffi::DataType::U8) {
    return InvalidArgument("the workspace, the last result, is not u8");
  }
  const auto bytes = static_cast<int64_t>(buffer.element_count());
  if (bytes >= plan.workspace_bytes()) return {};
  return FailedPrecondition("the program was compiled with a workspace of " +
                            std::to_string(bytes) + " bytes, but the plan " +
                            plan.candidate().name + " of this device needs " +
                            std::to_string(plan.workspace_bytes()) +
                            ". Compile it on this kind of GPU with this cuDNN.");
}

Status LoadPointers(const ffi::RemainingArgs& args, Pointers& pointers) {
  for (size_t i = 0; i < args.size(); ++i) {
    ASSIGN_OR_RETURN(const ffi::AnyBuffer buffer, Operand(args, i));
    pointers[i] = buffer.untyped_data();
  }
  return {};
}

Status LoadPointers(const ffi::RemainingRets& rets, Pointers& pointers) {
  for (size_t i = 0; i < rets.size(); ++i) {
    ASSIGN_OR_RETURN(const ffi::AnyBuffer buffer, Result(rets, i));
    pointers[i] = buffer.untyped_data();
  }
  return {};
}

// --- the stages ---------------------------------------------------------------------

ffi::ErrorOr<std::unique_ptr<GraphState>> Instantiate(std::string_view graph,
                                                      std::string_view request,
                                                      std::string_view op,
                                                      int64_t sm_version,
                                                      int64_t cudnn_version) {
  std::unique_ptr<GraphState> state;
  const ffi::Error error = Run(op, [&]() -> Status {
    ASSIGN_OR_RETURN(GraphSpec spec, ParseGraph(graph));
    ASSIGN_OR_RETURN(const ProgramTarget target,
                     ReadProgramTarget(sm_version, cudnn_version));
    state = std::make_unique<GraphState>(std::string(op), std::string(graph),
                                         std::string(request), std::move(spec), target);
    return {};
  });
  if (error.failure()) return ffi::Unexpected(error);
  return state;
}

// XLA calls this before every execution. Shapes, dtypes and the plan cannot change
// between two calls for one device, so all but the first return at once.
ffi::Error Initialize(GraphState* state, int32_t device, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, bool has_workspace) {
  if (device >= 0 && device < kMaxDevices && state->FindPlan(device) != nullptr) {
    return ffi::Error::Success();
  }
  return Run(state->op(), [&]() -> Status {
    ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
    ASSIGN_OR_RETURN(const DeviceInfo info, QueryDevice(*runtime, device));
    RETURN_IF_ERROR(
        CheckRunsOn(state->target(), {info.sm_version, runtime->cudnn.version}));
    RETURN_IF_ERROR(CheckCall(state->graph(), args, rets, has_workspace ? 1 : 0));
    ASSIGN_OR_RETURN(const std::shared_ptr<const Plan> plan, state->GetPlan(device));
    if (has_workspace) RETURN_IF_ERROR(CheckWorkspace(rets, *plan));
    RETURN_IF_ERROR(HandlePool::Global().Reserve(*runtime, device));
    state->Publish(device, plan);
    return {};
  });
}

ffi::Error InitializeCaptured(GraphState* state, int32_t device,
                              ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Initialize(state, device, args, rets, /*has_workspace=*/true);
}

ffi::Error InitializeScratch(GraphState* state, int32_t device, ffi::RemainingArgs args,
                             ffi::RemainingRets rets) {
  return Initialize(state, device, args, rets, /*has_workspace=*/false);
}

StatusOr<const Plan*> InitializedPlan(const GraphState& state, int32_t device) {
  const Plan* plan =
      device >= 0 && device < kMaxDevices ? state.FindPlan(device) : nullptr;
  if (plan != nullptr) return plan;
  return FailedPrecondition("device " + std::to_string(device) +
                            " executes a call that was not initialized there");
}

Status Launch(const Plan& plan, int32_t device, CudaStream stream,
              const ffi::RemainingArgs& args, Pointers& results, void* workspace) {
  Pointers operands;
  RETURN_IF_ERROR(LoadPointers(args, operands));
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  ASSIGN_OR_RETURN(const DeviceGuard guard, DeviceGuard::Enter(runtime, device));
  ASSIGN_OR_RETURN(const HandleLease lease, HandlePool::Global().Acquire(device));
  const int status = runtime.cudnn.functions.set_stream(lease.get(), stream);
  if (status != 0) {
    return Internal(std::string("cudnnSetStream failed: ") +
                    runtime.cudnn.functions.get_error_string(status));
  }
  return plan.Execute(lease.get(), stream, operands.data(), results.data(), workspace);
}

ffi::Error ExecuteCaptured(GraphState* state, CudaStream stream, int32_t device,
                           ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Run(state->op(), [&]() -> Status {
    const NvtxRange range(state->op().c_str());
    ASSIGN_OR_RETURN(const Plan* plan, InitializedPlan(*state, device));
    Pointers results;
    RETURN_IF_ERROR(LoadPointers(rets, results));
    void* workspace = results[rets.size() - 1];
    return Launch(*plan, device, stream, args, results, workspace);
  });
}

// XLA's scratch memory refuses to promise more than 64-byte alignment, so that the
// alignment is made here.
StatusOr<void*> AllocateWorkspace(ffi::ScratchAllocator& scratch, int64_t bytes) {
  size_t space = static_cast<size_t>(bytes) + kWorkspaceAlignment;
  const auto memory = scratch.Allocate(space);
  if (!memory.has_value()) {
    return ResourceExhausted("no device memory for a workspace of " +
                             std::to_string(bytes) + " bytes");
  }
  void* start = *memory;
  return std::align(kWorkspaceAlignment, static_cast<size_t>(bytes), start, space);
}

ffi::Error ExecuteScratch(GraphState* state, CudaStream stream, int32_t device,
                          ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                          ffi::RemainingRets rets) {
  return Run(state->op(), [&]() -> Status {
    const NvtxRange range(state->op().c_str());
    ASSIGN_OR_RETURN(const Plan* plan, InitializedPlan(*state, device));
    void* workspace = nullptr;
    if (plan->workspace_bytes() > 0) {
      ASSIGN_OR_RETURN(workspace, AllocateWorkspace(scratch, plan->workspace_bytes()));
    }
    Pointers results;
    RETURN_IF_ERROR(LoadPointers(rets, results));
    return Launch(*plan, device, stream, args, results, workspace);
  });
}

// --- bindings -----------------------------------------------------------------------

auto BindInstantiate() {
  return ffi::Ffi::BindInstantiate()
      .Attr<std::string_view>("graph")
      .Attr<std::string_view>("request")
      .Attr<std::string_view>("op")
      .Attr<int64_t>("sm_version")
      .Attr<int64_t>("cudnn_version");
}

auto BindInitialize() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
      .Ctx<ffi::State<GraphState>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets();
}

auto BindExecuteCaptured() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<GraphState>>()
      .Ctx<ffi::PlatformStream<CudaStream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets();
}

auto BindExecuteScratch() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<GraphState>>()
      .Ctx<ffi::PlatformStream<CudaStream>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::ScratchAllocator>()
      .RemainingArgs()
      .RemainingRets();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, BindInstantiate());
XLA_FFI_DEFINE_HANDLER(kInitializeCaptured, InitializeCaptured, BindInitialize());
XLA_FFI_DEFINE_HANDLER(kInitializeScratch, InitializeScratch, BindInitialize());
XLA_FFI_DEFINE_HANDLER(kExecuteCaptured, ExecuteCaptured, BindExecuteCaptured(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecuteScratch, ExecuteScratch, BindExecuteScratch());

}  // namespace

HandlerBundle CapturedHandlers() {
  return {kInstantiate, kInitializeCaptured, kExecuteCaptured};
}

HandlerBundle ScratchHandlers() {
  return {kInstantiate, kInitializeScratch, kExecuteScratch};
}

XLA_FFI_TypeId* StateTypeId() { return &GraphState::id; }
const XLA_FFI_TypeInfo* StateTypeInfo() { return &kStateTypeInfo; }

}  // namespace jax_cudnn
