// SPDX-License-Identifier: Apache-2.0
// How matmul, grouped matmul and convolution nodes are written in the frontend's words.

#ifndef JAX_CUDNN_CONTRACTION_BUILDER_H_
#define JAX_CUDNN_CONTRACTION_BUILDER_H_

#include "base/status.h"
#include "frontend/node_writer.h"

namespace jax_cudnn {

Status AddBlockScaledMatmul(NodeWriter& writer);
Status AddMatmul(NodeWriter& writer);
Status AddConvFprop(NodeWriter& writer);
Status AddConvDgrad(NodeWriter& writer);
Status AddConvWgrad(NodeWriter& writer);
Status AddGroupedMatmul(NodeWriter& writer);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CONTRACTION_BUILDER_H_
