// SPDX-License-Identifier: Apache-2.0
// How pooling nodes are written in the frontend's words: a window is a "resample".

#ifndef JAX_CUDNN_RESAMPLE_BUILDER_H_
#define JAX_CUDNN_RESAMPLE_BUILDER_H_

#include "base/status.h"
#include "frontend/node_writer.h"

namespace jax_cudnn {

Status AddAvgPool(NodeWriter& writer);
Status AddAvgPoolBackward(NodeWriter& writer);
Status AddMaxPool(NodeWriter& writer);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_RESAMPLE_BUILDER_H_
