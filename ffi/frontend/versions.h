// SPDX-License-Identifier: Apache-2.0
// Which cuDNN and which cuDNN frontend the extension was compiled with.

#ifndef JAX_CUDNN_VERSIONS_H_
#define JAX_CUDNN_VERSIONS_H_

#include <string>

namespace jax_cudnn {

// "1.28.0"
std::string FrontendVersion();
// Of cuDNN's headers, as cuDNN counts versions.
int CudnnHeaderVersion();

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_VERSIONS_H_
