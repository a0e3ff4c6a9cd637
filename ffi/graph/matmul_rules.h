// SPDX-License-Identifier: Apache-2.0
// Shape rule of the matmul node; the twin of that in jax_cudnn/graph/matmul.py.

#ifndef JAX_CUDNN_MATMUL_RULES_H_
#define JAX_CUDNN_MATMUL_RULES_H_

#include "base/status.h"
#include "graph/node_kinds.h"

namespace jax_cudnn {

Status CheckMatmul(const NodeSpec& node, const Roles& roles);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_MATMUL_RULES_H_
