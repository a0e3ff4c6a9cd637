// SPDX-License-Identifier: Apache-2.0
// The one way into the cuDNN frontend's headers.

#ifndef JAX_CUDNN_FRONTEND_H_
#define JAX_CUDNN_FRONTEND_H_

#include <dlfcn.h>

#include "cudnn/cudnn_library.h"

// The frontend (1.28.0, cudnn_frontend_shim.h) opens libcudart by name, trying CUDA 12
// before 13 whatever cuDNN was built for, unless an environment variable says
// otherwise. Answering its dlopen calls ourselves gives it the copies that
// cudnn_library.cc chose and leaves the process's environment alone.
#define dlopen(name, flags) ::jax_cudnn::OpenForFrontend(name, flags)
#include <cudnn_frontend.h>
#undef dlopen

#endif  // JAX_CUDNN_FRONTEND_H_
