// SPDX-License-Identifier: Apache-2.0
// Shape rules of the convolution nodes; the twins of those in jax_cudnn/graph/conv.py.

#ifndef JAX_CUDNN_CONV_RULES_H_
#define JAX_CUDNN_CONV_RULES_H_

#include "base/status.h"
#include "graph/node_kinds.h"

namespace jax_cudnn {

Status CheckConvFprop(const NodeSpec& node, const Roles& roles);
Status CheckConvDgrad(const NodeSpec& node, const Roles& roles);
Status CheckConvWgrad(const NodeSpec& node, const Roles& roles);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CONV_RULES_H_
