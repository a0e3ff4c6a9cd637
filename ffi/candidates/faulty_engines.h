// SPDX-License-Identifier: Apache-2.0
// Names the engines of cuDNN that must not run, for which graphs, and why.
//
// A bug that only some engines of a graph have is kept away by their numbers. Where the
// graph can be written so that no engine has it, jax_cudnn/legalize does that instead.

#ifndef JAX_CUDNN_FAULTY_ENGINES_H_
#define JAX_CUDNN_FAULTY_ENGINES_H_

#include <cstdint>
#include <string>

#include "graph/graph_spec.h"

namespace jax_cudnn {

// Why an engine must not run a graph, whatever a request allows; empty where it may.
std::string FaultOf(const GraphSpec& graph, int64_t engine);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_FAULTY_ENGINES_H_
