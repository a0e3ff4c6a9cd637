// SPDX-License-Identifier: Apache-2.0
// The versions that the headers say of themselves.

#include "frontend/versions.h"

#include "frontend/frontend.h"

namespace jax_cudnn {

std::string FrontendVersion() {
  return std::to_string(CUDNN_FRONTEND_MAJOR_VERSION) + "." +
         std::to_string(CUDNN_FRONTEND_MINOR_VERSION) + "." +
         std::to_string(CUDNN_FRONTEND_PATCH_VERSION);
}

int CudnnHeaderVersion() { return CUDNN_VERSION; }

}  // namespace jax_cudnn
