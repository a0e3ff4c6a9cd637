// SPDX-License-Identifier: Apache-2.0
// The kernels that are our own: one writes where the matrices of each group are, and
// one zeros to the rows in no group.
//
// cuBLASLt's products in groups take arrays of pointers and of sizes, in the device's
// memory, and leave rows in no group as they are. Where a group's rows begin and end is
// known on the device only.

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

// A result whose rows lie group by group, and memory on the device that says where its
// groups start and how many rows they have.
struct GroupedRows {
  void* memory = nullptr;  // aligned to 16 bytes
  int64_t row_bytes = 0;   // a multiple of 16
  int32_t rows = 0;
  const int32_t* starts = nullptr;
  const int32_t* sizes = nullptr;
  int32_t groups = 0;  // at least one
};

// Loads the kernels, which must not happen during a capture. Thread-safe, cheap after
// the first success. UNIMPLEMENTED where CUDA is older than 12.8.
Status LoadGroupKernels(const CudnnRuntime& runtime);

// Launches the first loaded kernel.
Status WriteGroupPointers(const CudnnRuntime& runtime, CudaStream stream,
                          const GroupPointers& pointers, void* memory);

// Launches the second: it sets the rows beyond the last group to 0.
Status ZeroRows(const CudnnRuntime& runtime, CudaStream stream,
                const GroupedRows& rows);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GROUP_POINTERS_H_
