// SPDX-License-Identifier: Apache-2.0
// From the frontend's errors to a Status.

#ifndef JAX_CUDNN_FRONTEND_STATUS_H_
#define JAX_CUDNN_FRONTEND_STATUS_H_

#include <string>

#include "base/status.h"
#include "frontend/frontend.h"

namespace jax_cudnn {

// The error's text on one line.
std::string Message(const cudnn_frontend::error_t& error);

// While planning, a refusal by cuDNN is an answer about the graph unless its words say
// that a library or memory is missing. One line of the message per reason.
Status PlanningStatus(const cudnn_frontend::error_t& error);

Status ExecutionStatus(const cudnn_frontend::error_t& error);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_FRONTEND_STATUS_H_
