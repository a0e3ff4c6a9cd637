// SPDX-License-Identifier: Apache-2.0
// What a compiled program was lowered for. Its graphs were legalised for one GPU and
// one cuDNN: with others they may have no plan, or be computed wrongly.

#ifndef JAX_CUDNN_PROGRAM_TARGET_H_
#define JAX_CUDNN_PROGRAM_TARGET_H_

#include <cstdint>

#include "base/status.h"

namespace jax_cudnn {

// Both are 0 where no GPU was known when the program was lowered.
struct ProgramTarget {
  int sm_version = 0;     // 90 is compute capability 9.0
  int cudnn_version = 0;  // as cuDNN counts it
};

// The target that two attributes of a program name; INVALID_ARGUMENT for numbers that
// the lowering does not write.
StatusOr<ProgramTarget> ReadProgramTarget(int64_t sm_version, int64_t cudnn_version);

// FAILED_PRECONDITION if a program was lowered for something else than what is here.
// One that was lowered for no GPU runs everywhere.
Status CheckRunsOn(const ProgramTarget& lowered_for, const ProgramTarget& here);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PROGRAM_TARGET_H_
