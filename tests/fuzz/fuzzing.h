// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets share: how an input is taken apart, and what must hold.

#ifndef JAX_CUDNN_FUZZING_H_
#define JAX_CUDNN_FUZZING_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "base/status.h"

// Called by the fuzzer for each input.
// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer names it
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace jax_cudnn {

inline std::string_view Text(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Stops the fuzzer, which then keeps the input, where something does not hold.
inline void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "this does not hold: %s\n", what);
  std::abort();
}

// A reader refuses an input in this one way.
inline void RequireRefusal(const Status& status) {
  Require(status.code() == StatusCode::kInvalidArgument,
          "a refusal is INVALID_ARGUMENT");
  Require(!status.message().empty(), "a refusal says why");
}

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_FUZZING_H_
