// SPDX-License-Identifier: Apache-2.0
// Queries, keys and values that are parts of one array, as attention's own operands.
//
// Attention and its gradient may have one operand for all three, and one result for
// their gradients. cuDNN takes three tensors, whose strides say that they share memory.

#ifndef JAX_CUDNN_QKV_PARTS_H_
#define JAX_CUDNN_QKV_PARTS_H_

#include "base/status.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

// The graph with a tensor for each part, in the roles that attention has for it; the
// array stays operand or result. A graph without such parts is returned as it is.
StatusOr<GraphSpec> WithQkvParts(GraphSpec graph);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_QKV_PARTS_H_
