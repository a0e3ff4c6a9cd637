// SPDX-License-Identifier: Apache-2.0
// Shape rules of the attention nodes; the twins of those in jax_cudnn/graph/sdpa.py.

#ifndef JAX_CUDNN_SDPA_RULES_H_
#define JAX_CUDNN_SDPA_RULES_H_

#include "base/status.h"
#include "graph/node_kinds.h"

namespace jax_cudnn {

Status CheckSdpa(const NodeSpec& node, const Roles& roles);
Status CheckSdpaBackward(const NodeSpec& node, const Roles& roles);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_SDPA_RULES_H_
