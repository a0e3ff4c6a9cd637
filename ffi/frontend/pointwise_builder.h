// SPDX-License-Identifier: Apache-2.0
// How the nodes around a contraction are written in the frontend's words.

#ifndef JAX_CUDNN_POINTWISE_BUILDER_H_
#define JAX_CUDNN_POINTWISE_BUILDER_H_

#include "base/status.h"
#include "frontend/node_writer.h"

namespace jax_cudnn {

Status AddPointwise(NodeWriter& writer);
Status AddConstant(NodeWriter& writer);
Status AddReduction(NodeWriter& writer);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_POINTWISE_BUILDER_H_
