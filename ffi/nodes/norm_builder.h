// SPDX-License-Identifier: Apache-2.0
// How norms and their gradients are written in the frontend's words.

#ifndef JAX_CUDNN_NORM_BUILDER_H_
#define JAX_CUDNN_NORM_BUILDER_H_

#include "base/status.h"
#include "frontend/node_writer.h"

namespace jax_cudnn {

Status AddAdaptiveLayerNorm(NodeWriter& writer);
Status AddAdaptiveLayerNormBackward(NodeWriter& writer);
Status AddBatchNorm(NodeWriter& writer);
Status AddBatchNormBackward(NodeWriter& writer);
Status AddGroupNorm(NodeWriter& writer);
Status AddGroupNormBackward(NodeWriter& writer);
Status AddLayerNorm(NodeWriter& writer);
Status AddLayerNormBackward(NodeWriter& writer);
Status AddRmsNorm(NodeWriter& writer);
Status AddRmsNormBackward(NodeWriter& writer);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_NORM_BUILDER_H_
