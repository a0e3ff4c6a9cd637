// SPDX-License-Identifier: Apache-2.0
// How the attention nodes are written in the frontend's words.

#ifndef JAX_CUDNN_SDPA_BUILDER_H_
#define JAX_CUDNN_SDPA_BUILDER_H_

#include "base/status.h"
#include "frontend/node_writer.h"

namespace jax_cudnn {

// Has two variants, see sdpa_builder.cc.
Status AddSdpa(NodeWriter& writer);
Status AddSdpaBackward(NodeWriter& writer);
// Two variants as well.
Status AddSdpaCached(NodeWriter& writer);
Status AddSdpaF8(NodeWriter& writer);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_SDPA_BUILDER_H_
