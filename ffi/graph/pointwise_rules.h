// SPDX-License-Identifier: Apache-2.0
// Shape rules of the nodes around a contraction; the twins of those in
// jax_cudnn/graph/pointwise.py.

#ifndef JAX_CUDNN_POINTWISE_RULES_H_
#define JAX_CUDNN_POINTWISE_RULES_H_

#include "base/status.h"
#include "graph/node_kinds.h"

namespace jax_cudnn {

Status CheckPointwise(const NodeSpec& node, const Roles& roles);
Status CheckConstant(const NodeSpec& node, const Roles& roles);
Status CheckReduction(const NodeSpec& node, const Roles& roles);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_POINTWISE_RULES_H_
