// SPDX-License-Identifier: Apache-2.0
// Integers as bytes.

#ifndef JAX_CUDNN_BYTES_H_
#define JAX_CUDNN_BYTES_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace jax_cudnn {

// Little-endian on every machine.
void AppendInteger(uint64_t value, std::string& out);
// Takes what AppendInteger wrote off the front of `bytes`; false where it is too short.
bool TakeInteger(std::string_view& bytes, uint64_t& value);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_BYTES_H_
