// SPDX-License-Identifier: Apache-2.0
// Stands in for CUDA's nvrtc.h, so that building needs no 90 MB nvrtc wheel.
//
// The cuDNN frontend (1.28.0) includes <nvrtc.h> unconditionally for its open-source
// engines, which this package never asks for, and looks every function up at run time.
// Only the types and the two error codes that it compares with have to exist.

#ifndef JAX_CUDNN_COMPAT_NVRTC_H_
#define JAX_CUDNN_COMPAT_NVRTC_H_

#include <stddef.h>

typedef enum {
  NVRTC_SUCCESS = 0,
  NVRTC_ERROR_INTERNAL_ERROR = 11,
} nvrtcResult;

typedef struct _nvrtcProgram* nvrtcProgram;

#endif  // JAX_CUDNN_COMPAT_NVRTC_H_
