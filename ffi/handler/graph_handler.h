// SPDX-License-Identifier: Apache-2.0
// The XLA FFI handlers: one bundle for every graph, forward and backward.

#ifndef JAX_CUDNN_GRAPH_HANDLER_H_
#define JAX_CUDNN_GRAPH_HANDLER_H_

#include "xla/ffi/api/c_api.h"

namespace jax_cudnn {

// The stages of one target, to be registered under its name.
struct HandlerBundle {
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
};

// `jax_cudnn.graph`: the last result is the workspace, u8[bytes]. May be captured into
// a command buffer.
HandlerBundle CapturedHandlers();

// `jax_cudnn.graph_scratch`: takes its workspace from XLA's scratch allocator, for
// graphs that were lowered where nobody could ask cuDNN for its size. Never captured.
HandlerBundle ScratchHandlers();

// The registration of the state that Instantiate makes. XLA writes the id.
XLA_FFI_TypeId* StateTypeId();
const XLA_FFI_TypeInfo* StateTypeInfo();

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GRAPH_HANDLER_H_
