// SPDX-License-Identifier: Apache-2.0
// The dtypes of a graph specification, by the names that JAX prints.

#ifndef JAX_CUDNN_DTYPE_H_
#define JAX_CUDNN_DTYPE_H_

#include <cstdint>
#include <optional>
#include <string_view>

namespace jax_cudnn {

enum class DType {
  kBool,
  kU8,
  kI8,
  kI32,
  kI64,
  kF4E2m1fn,
  kF8E4m3fn,
  kF8E5m2,
  kF8E8m0fnu,
  kBf16,
  kF16,
  kF32,
  kF64,
};

constexpr std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return "bool";
    case DType::kU8:
      return "u8";
    case DType::kI8:
      return "i8";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kF4E2m1fn:
      return "f4_e2m1fn";
    case DType::kF8E4m3fn:
      return "f8_e4m3fn";
    case DType::kF8E5m2:
      return "f8_e5m2";
    case DType::kF8E8m0fnu:
      return "f8_e8m0fnu";
    case DType::kBf16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kF32:
      return "f32";
    case DType::kF64:
      return "f64";
  }
  return "";
}

inline constexpr DType kAllDTypes[] = {
    DType::kBool,     DType::kU8,       DType::kI8,     DType::kI32,       DType::kI64,
    DType::kF4E2m1fn, DType::kF8E4m3fn, DType::kF8E5m2, DType::kF8E8m0fnu, DType::kBf16,
    DType::kF16,      DType::kF32,      DType::kF64,
};

constexpr std::optional<DType> DTypeNamed(std::string_view name) {
  for (DType dtype : kAllDTypes) {
    if (DTypeName(dtype) == name) return dtype;
  }
  return std::nullopt;
}

constexpr int64_t DTypeBits(DType dtype) {
  switch (dtype) {
    case DType::kF4E2m1fn:
      return 4;
    case DType::kBool:
    case DType::kU8:
    case DType::kI8:
    case DType::kF8E4m3fn:
    case DType::kF8E5m2:
    case DType::kF8E8m0fnu:
      return 8;
    case DType::kBf16:
    case DType::kF16:
      return 16;
    case DType::kI32:
    case DType::kF32:
      return 32;
    case DType::kI64:
    case DType::kF64:
      return 64;
  }
  return 0;
}

// Whether the table's "float" stands for it: what a node can compute with by itself.
// Numbers of 4 bits, and powers of two, are read with their blocks alone.
constexpr bool IsFloat(DType dtype) {
  switch (dtype) {
    case DType::kF8E4m3fn:
    case DType::kF8E5m2:
    case DType::kBf16:
    case DType::kF16:
    case DType::kF32:
    case DType::kF64:
      return true;
    case DType::kBool:
    case DType::kU8:
    case DType::kI8:
    case DType::kI32:
    case DType::kI64:
    case DType::kF4E2m1fn:
    case DType::kF8E8m0fnu:
      return false;
  }
  return false;
}

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_DTYPE_H_
