// SPDX-License-Identifier: Apache-2.0
// What a plan launches: a graph of cuDNN's, a product for each group of rows, a product
// by cuBLASLt, or one of cuDNN's functions.

#ifndef JAX_CUDNN_LAUNCHABLE_H_
#define JAX_CUDNN_LAUNCHABLE_H_

#include <cstddef>
#include <string>

#include "base/status.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {

// The most tensors that a plan takes: the frontend has at most 250 operations.
inline constexpr size_t kMaxOperands = 256;

// Immutable for its callers: several threads may execute it at once, each with a handle
// and a stream of its own.
class Launchable {
 public:
  Launchable() = default;
  Launchable(const Launchable&) = delete;
  Launchable& operator=(const Launchable&) = delete;
  virtual ~Launchable() = default;

  // Launches on `stream`, which is the handle's. The pointers are in the order of the
  // graph's inputs and outputs.
  virtual Status Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                         void* const* results, void* workspace) const = 0;

  // What it is made of again, as bytes; UNIMPLEMENTED where cuDNN cannot write it.
  virtual StatusOr<std::string> Serialize() const = 0;

  // Whether Execute waits for the device. If so, it cannot be captured.
  virtual bool Waits() const { return false; }
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_LAUNCHABLE_H_
