// SPDX-License-Identifier: Apache-2.0
// Writing and reading integers byte by byte.

#include "base/bytes.h"

namespace jax_cudnn {

void AppendInteger(uint64_t value, std::string& out) {
  for (unsigned shift = 0; shift < 64; shift += 8) {
    out += static_cast<char>(static_cast<unsigned char>(value >> shift & 0xff));
  }
}

bool TakeInteger(std::string_view& bytes, uint64_t& value) {
  if (bytes.size() < 8) return false;
  value = 0;
  for (unsigned i = 0; i < 8; ++i) {
    value |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  bytes.remove_prefix(8);
  return true;
}

}  // namespace jax_cudnn
