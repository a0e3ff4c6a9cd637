// SPDX-License-Identifier: Apache-2.0
// Which array of a call a pointer is of.

#ifndef JAX_CUDNN_POINTER_SOURCE_H_
#define JAX_CUDNN_POINTER_SOURCE_H_

#include <cstddef>
#include <cstdint>

namespace jax_cudnn {

struct PointerSource {
  bool is_result = false;
  size_t index = 0;
  int64_t offset_bytes = 0;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_POINTER_SOURCE_H_
