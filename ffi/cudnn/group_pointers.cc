// SPDX-License-Identifier: Apache-2.0
// The kernels' code, loading and launching them.

#include "cudnn/group_pointers.h"

#include <atomic>
#include <mutex>

#include "cudnn/cuda_device.h"

namespace jax_cudnn {
namespace {

// The first kernel, for each group g below `groups`, in one thread:
//
//   pointers[m * groups + g] = memory[m] + starts[g] * row[m] + g * group[m]   m = 0..2
//   sizes[s * groups + g] = size[s]                                            s = 0..1
//
// where the sizes follow the pointers. The second one writes zeros from
// `memory + (starts[groups - 1] + sizes[groups - 1]) * row_bytes` on up to
// `memory + rows * row_bytes`, 16 bytes at a time.
//
// PTX is compiled by the driver, for any GPU from sm_80 on, so building needs no
// compiler of CUDA's.
constexpr char kCode[] = R"(
.version 7.0
.target sm_80
.address_size 64

.visible .entry jax_cudnn_group_pointers(
  .param .u64 pointers, .param .u64 starts, .param .u32 groups,
  .param .u64 memory_0, .param .u64 row_0, .param .u64 group_0,
  .param .u64 memory_1, .param .u64 row_1, .param .u64 group_1,
  .param .u64 memory_2, .param .u64 row_2, .param .u64 group_2,
  .param .u32 size_0, .param .u32 size_1)
{
  .reg .pred %is_beyond;
  .reg .b32 %block, %width, %thread, %g, %groups, %size;
  .reg .b64 %at, %step, %starts, %start, %number, %sum, %factor;

  mov.u32 %block, %ctaid.x;
  mov.u32 %width, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %g, %block, %width, %thread;
  ld.param.u32 %groups, [groups];
  setp.ge.u32 %is_beyond, %g, %groups;
  @%is_beyond bra done;

  ld.param.u64 %starts, [starts];
  cvta.to.global.u64 %starts, %starts;
  mul.wide.u32 %step, %g, 4;
  add.u64 %starts, %starts, %step;
  ld.global.s32 %start, [%starts];
  cvt.u64.u32 %number, %g;

  ld.param.u64 %at, [pointers];
  cvta.to.global.u64 %at, %at;
  mul.wide.u32 %step, %g, 8;
  add.u64 %at, %at, %step;
  mul.wide.u32 %step, %groups, 8;

  ld.param.u64 %sum, [memory_0];
  ld.param.u64 %factor, [row_0];
  mad.lo.s64 %sum, %start, %factor, %sum;
  ld.param.u64 %factor, [group_0];
  mad.lo.s64 %sum, %number, %factor, %sum;
  st.global.u64 [%at], %sum;
  add.u64 %at, %at, %step;

  ld.param.u64 %sum, [memory_1];
  ld.param.u64 %factor, [row_1];
  mad.lo.s64 %sum, %start, %factor, %sum;
  ld.param.u64 %factor, [group_1];
  mad.lo.s64 %sum, %number, %factor, %sum;
  st.global.u64 [%at], %sum;
  add.u64 %at, %at, %step;

  ld.param.u64 %sum, [memory_2];
  ld.param.u64 %factor, [row_2];
  mad.lo.s64 %sum, %start, %factor, %sum;
  ld.param.u64 %factor, [group_2];
  mad.lo.s64 %sum, %number, %factor, %sum;
  st.global.u64 [%at], %sum;
  add.u64 %at, %at, %step;

  // From 8 bytes for each group to 4.
  mul.wide.u32 %factor, %g, 4;
  sub.u64 %at, %at, %factor;
  ld.param.u32 %size, [size_0];
  st.global.u32 [%at], %size;
  mul.wide.u32 %step, %groups, 4;
  add.u64 %at, %at, %step;
  ld.param.u32 %size, [size_1];
  st.global.u32 [%at], %size;

done:
  ret;
}

.visible .entry jax_cudnn_zero_rows(
  .param .u64 memory, .param .u64 row_bytes, .param .u32 rows,
  .param .u64 starts, .param .u64 sizes, .param .u32 groups)
{
  .reg .pred %is_beyond;
  .reg .b32 %block, %blocks, %width, %thread, %number;
  .reg .b64 %at, %end, %step, %start, %size, %row, %rows, %zero;

  ld.param.u32 %number, [groups];
  sub.u32 %number, %number, 1;
  mul.wide.u32 %step, %number, 4;
  ld.param.u64 %at, [starts];
  cvta.to.global.u64 %at, %at;
  add.u64 %at, %at, %step;
  ld.global.s32 %start, [%at];
  ld.param.u64 %at, [sizes];
  cvta.to.global.u64 %at, %at;
  add.u64 %at, %at, %step;
  ld.global.s32 %size, [%at];
  add.u64 %start, %start, %size;

  ld.param.u64 %at, [memory];
  cvta.to.global.u64 %at, %at;
  ld.param.u64 %row, [row_bytes];
  ld.param.u32 %rows, [rows];
  mad.lo.s64 %end, %rows, %row, %at;
  mad.lo.s64 %at, %start, %row, %at;

  mov.u32 %block, %ctaid.x;
  mov.u32 %blocks, %nctaid.x;
  mov.u32 %width, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %number, %block, %width, %thread;
  mul.wide.u32 %step, %number, 16;
  add.u64 %at, %at, %step;
  mul.lo.u32 %number, %blocks, %width;
  mul.wide.u32 %step, %number, 16;
  mov.u64 %zero, 0;

next:
  setp.ge.u64 %is_beyond, %at, %end;
  @%is_beyond bra done;
  st.global.v2.u64 [%at], {%zero, %zero};
  add.u64 %at, %at, %step;
  bra next;

done:
  ret;
}
)";

constexpr unsigned kThreads = 128;
// How many rows there are to set is not known; two blocks for each SM of an H200.
constexpr unsigned kZeroBlocks = 264;

struct State {
  std::mutex mutex;  // held while the kernels are loaded
  CudaKernel pointers = nullptr;
  CudaKernel zero_rows = nullptr;
  std::atomic<bool> is_loaded{false};  // set after them
};

State& GlobalState() {
  static auto& state = *new State;  // leaked, as in cudnn_library.cc
  return state;
}

Status Launch(const CudnnRuntime& runtime, CudaStream stream, CudaKernel kernel,
              CudaDim3 grid, void** arguments) {
  return CheckCuda(runtime,
                   runtime.cuda.launch_kernel(kernel, grid, CudaDim3{kThreads},
                                              arguments, 0, stream),
                   "cudaLaunchKernel");
}

}  // namespace

int64_t GroupPointersBytes(int64_t groups) { return groups * (3 * 8 + 2 * 4); }

Status LoadGroupKernels(const CudnnRuntime& runtime) {
  State& state = GlobalState();
  if (state.is_loaded.load(std::memory_order_acquire)) return {};
  const CudaFunctions& cuda = runtime.cuda;
  if (cuda.library_load == nullptr || cuda.library_get_kernel == nullptr ||
      cuda.launch_kernel == nullptr) {
    return Unimplemented("it needs CUDA 12.8 or newer, and " + runtime.cudart.path +
                         " is older");
  }
  const std::scoped_lock lock(state.mutex);
  if (state.is_loaded.load(std::memory_order_relaxed)) return {};
  CudaLibrary library = nullptr;  // never unloaded
  // The driver may have no compiler for PTX. Others can do without these kernels.
  const auto check = [&](int error, const char* call) -> Status {
    if (error == 0) return {};
    static_cast<void>(cuda.get_last_error());
    return Unimplemented(CheckCuda(runtime, error, call).message());
  };
  RETURN_IF_ERROR(check(
      cuda.library_load(&library, kCode, nullptr, nullptr, 0, nullptr, nullptr, 0),
      "cudaLibraryLoadData"));
  const auto get = [&](const char* name, CudaKernel& kernel) {
    return check(cuda.library_get_kernel(&kernel, library, name),
                 "cudaLibraryGetKernel");
  };
  RETURN_IF_ERROR(get("jax_cudnn_group_pointers", state.pointers));
  RETURN_IF_ERROR(get("jax_cudnn_zero_rows", state.zero_rows));
  state.is_loaded.store(true, std::memory_order_release);
  return {};
}

Status WriteGroupPointers(const CudnnRuntime& runtime, CudaStream stream,
                          const GroupPointers& pointers, void* memory) {
  GroupPointers given = pointers;
  std::array<GroupMatrix, 3>& matrices = given.matrices;
  std::array<void*, 14> arguments{
      static_cast<void*>(&memory),
      static_cast<void*>(&given.starts),
      &given.groups,
      static_cast<void*>(&matrices[0].memory),
      &matrices[0].row_bytes,
      &matrices[0].group_bytes,
      static_cast<void*>(&matrices[1].memory),
      &matrices[1].row_bytes,
      &matrices[1].group_bytes,
      static_cast<void*>(&matrices[2].memory),
      &matrices[2].row_bytes,
      &matrices[2].group_bytes,
      given.sizes.data(),
      &given.sizes[1],
  };
  const CudaDim3 grid{(static_cast<unsigned>(given.groups) + kThreads - 1) / kThreads};
  return Launch(runtime, stream, GlobalState().pointers, grid, arguments.data());
}

Status ZeroRows(const CudnnRuntime& runtime, CudaStream stream,
                const GroupedRows& rows) {
  GroupedRows given = rows;
  std::array<void*, 6> arguments{
      static_cast<void*>(&given.memory),
      &given.row_bytes,
      &given.rows,
      static_cast<void*>(&given.starts),
      static_cast<void*>(&given.sizes),
      &given.groups,
  };
  return Launch(runtime, stream, GlobalState().zero_rows, CudaDim3{kZeroBlocks},
                arguments.data());
}

}  // namespace jax_cudnn
