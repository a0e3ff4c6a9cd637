// SPDX-License-Identifier: Apache-2.0
// The cuDNN library's own log, through its callback.

#ifndef JAX_CUDNN_CUDNN_LOG_H_
#define JAX_CUDNN_CUDNN_LOG_H_

#include "base/log.h"
#include "base/status.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {

// Has cuDNN hand its messages of `level` and above to Log, from all threads of the
// process that use cuDNN, as it does to the file or stream that CUDNN_LOGDEST_DBG
// names. FAILED_PRECONDITION where this cuDNN has no such callback.
Status StartCudnnLog(const CudnnLibrary& cudnn, LogLevel level);

// Ends that; without effect where it is not on.
Status StopCudnnLog();

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CUDNN_LOG_H_
