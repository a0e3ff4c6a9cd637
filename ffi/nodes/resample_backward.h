// SPDX-License-Identifier: Apache-2.0
// cuDNN's gradient of a resample as a node of the frontend, which has none.
//
// Includes the frontend: for the files that talk to it.

#ifndef JAX_CUDNN_RESAMPLE_BACKWARD_H_
#define JAX_CUDNN_RESAMPLE_BACKWARD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "frontend/frontend.h"

namespace jax_cudnn {

// The windows, with an entry for each spatial axis, and what is done in them.
struct ResampleGeometry {
  cudnn_frontend::ResampleMode_t mode = cudnn_frontend::ResampleMode_t::NOT_SET;
  cudnn_frontend::PaddingMode_t padding_mode = cudnn_frontend::PaddingMode_t::NOT_SET;
  cudnn_frontend::DataType_t compute_dtype = cudnn_frontend::DataType_t::NOT_SET;
  std::vector<int64_t> window;
  std::vector<int64_t> strides;
  std::vector<int64_t> padding_low;
  std::vector<int64_t> padding_high;
};

// The node that gives grad_x, of an average: it needs no more than grad_output.
std::shared_ptr<cudnn_frontend::graph::INode> MakeResampleBackward(
    const cudnn_frontend::detail::Context& context, ResampleGeometry geometry,
    std::shared_ptr<cudnn_frontend::graph::Tensor_attributes> grad_output,
    std::shared_ptr<cudnn_frontend::graph::Tensor_attributes> grad_x);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_RESAMPLE_BACKWARD_H_
