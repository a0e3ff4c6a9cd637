// SPDX-License-Identifier: Apache-2.0
// cuDNN's functions for causal depthwise convolutions, declared here: they are not in
// the graph API, and building needs no header of cuDNN's.
// tests/native/test_causal_conv1d.py compares the declarations with NVIDIA's header,
// cudnn_subquadratic_ops.h.

#ifndef JAX_CUDNN_CAUSAL_CONV_H_
#define JAX_CUDNN_CAUSAL_CONV_H_

#include <cstdint>

#include "base/status.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {

// cudnnDataType_t.
enum class CudnnDataType : int {
  kF32 = 0,
  kF64 = 1,
  kF16 = 2,
  kBf16 = 9,
};

// cudnnCausalConv1dActivation_t.
enum class CausalConvActivation : int {
  kIdentity = 0,
  kSilu = 1,
};

// cudnnCausalConv1dForward, and cudnnCausalConv1dNwhForward for channels-last arrays.
using CausalConvForward = int(CudaStream, const void* x, const void* weight,
                              const void* bias, void* y, int batch, int channels,
                              int steps, int taps, CudnnDataType, CausalConvActivation);

// cudnnCausalConv1dBackward, and cudnnCausalConv1dNwhBackward for channels-last arrays.
// They add to dweight and dbias by atomics.
using CausalConvBackward = int(CudaStream, const void* x, const void* weight,
                               const void* bias, const void* dy, void* dx,
                               void* dweight, void* dbias, int batch, int channels,
                               int steps, int taps, CudnnDataType, CudnnDataType sums,
                               CausalConvActivation);

struct CausalConvFunctions {
  CausalConvForward* forward = nullptr;
  CausalConvBackward* backward = nullptr;
};

// The functions of the libcudnn that `runtime` has opened, for arrays of one layout.
// UNIMPLEMENTED where it has none: 9.22 brought them.
StatusOr<CausalConvFunctions> LoadCausalConv(const CudnnRuntime& runtime,
                                             bool is_channels_last);

// OK for 0, cuDNN's success; UNIMPLEMENTED where it does not support something;
// INTERNAL for the other errors.
Status CheckCausalConv(const CudnnRuntime& runtime, int error, const char* call);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CAUSAL_CONV_H_
