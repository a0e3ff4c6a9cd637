// SPDX-License-Identifier: Apache-2.0
// The one kernel that is our own: it writes where the matrices of each group are.
//
// cuBLASLt's products in groups take arrays of pointers and of sizes, in the device's
// memory. Where a group's rows begin is known on the device only.

#ifndef JAX_CUDNN_GROUP_POINTERS_H_
#define JAX_CUDNN_GROUP_POINTERS_H_

#include <array>
#include <cstdint>

#include "base/status.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {

// The matrix of group g begins at `memory + starts[g] * row_bytes + g * group_bytes`.
struct GroupMatrix {
  const void* memory = nullptr;
  int64_t row_bytes = 0;
  int64_t group_bytes = 0;
};

// The addresses of three matrices for each group, and two sizes that all groups share.
struct GroupPointers {
  std::array<GroupMatrix, 3> matrices;
  const int32_t* starts = nullptr;
  int32_t groups = 0;
  std::array<int32_t, 2> sizes{};
};

// The memory that is written: `groups` addresses of 8 bytes for each matrix, and then
// `groups` numbers of 4 bytes for each size. It has to be aligned to 8 bytes.
int64_t GroupPointersBytes(int64_t groups);

// Loads the kernel, which must not happen during a capture. Thread-safe, cheap after
// the first success. UNIMPLEMENTED where CUDA is older than 12.8.
Status LoadGroupPointersKernel(const CudnnRuntime& runtime);

// Launches the loaded kernel.
Status WriteGroupPointers(const CudnnRuntime& runtime, CudaStream stream,
                          const GroupPointers& pointers, void* memory);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GROUP_POINTERS_H_
