// SPDX-License-Identifier: Apache-2.0
// How the nodes around a contraction are written in the frontend's words.

#ifndef JAX_CUDNN_POINTWISE_BUILDER_H_
#define JAX_CUDNN_POINTWISE_BUILDER_H_

#include <string>

#include "base/status.h"
#include "frontend/node_writer.h"

namespace jax_cudnn {

// A known mode with its constants; the frontend hands on only those that it has.
cudnn_frontend::graph::Pointwise_attributes PointwiseMode(const std::string& name,
                                                          float alpha);

// Whether the mode's two inputs may be exchanged.
bool Commutes(cudnn_frontend::PointwiseMode_t mode);

Status AddPointwise(NodeWriter& writer);
Status AddConstant(NodeWriter& writer);
Status AddReduction(NodeWriter& writer);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_POINTWISE_BUILDER_H_
