// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolutions and their gradients by cuDNN's own functions.
//
// They are no part of cuDNN's graph API, which has neither engines nor heuristics for
// them. Here they are a plan like any other one: listed, filtered, timed, captured and
// kept, under a number that none of cuDNN's engines has.

#ifndef JAX_CUDNN_PLANS_CAUSAL_CONV_H_
#define JAX_CUDNN_PLANS_CAUSAL_CONV_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "candidates/candidate.h"
#include "candidates/launchable.h"
#include "candidates/plan_request.h"
#include "cudnn/causal_conv.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

class CausalConv : public Launchable {
 public:
  // Whether a graph is one causal convolution, or its gradient: cuDNN's graph API has
  // no operation for these.
  static bool Covers(const GraphSpec& graph);

  // The one candidate of a graph that is covered, with its refusal where the request
  // does not allow it. UNIMPLEMENTED where cuDNN has no function for it.
  static StatusOr<Candidate> Describe(const GraphSpec& graph,
                                      const PlanRequest& request);

  // What launches it.
  static StatusOr<std::unique_ptr<CausalConv>> Make(const GraphSpec& graph);

  Status Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                 void* const* results, void* workspace) const override;
  // There is nothing to it but the graph.
  StatusOr<std::string> Serialize() const override { return std::string(); }

 private:
  // The call that a graph is. The places are of operands and results.
  struct Problem {
    bool is_gradient = false;
    bool is_channels_last = true;
    int batch = 0;
    int channels = 0;
    int steps = 0;
    int taps = 0;
    CudnnDataType dtype = CudnnDataType::kF32;
    CudnnDataType sums = CudnnDataType::kF32;  // of the gradients of weight and bias
    CausalConvActivation activation = CausalConvActivation::kIdentity;
    size_t x = 0;
    size_t weight = 0;
    size_t bias = 0;
    size_t dy = 0;
    size_t output = 0;  // of x's shape: y or dx
    size_t dweight = 0;
    size_t dbias = 0;
    size_t dweight_bytes = 0;
    size_t dbias_bytes = 0;
  };

  CausalConv(const Problem& problem, const CausalConvFunctions& functions)
      : problem_(problem), functions_(functions) {}

  static StatusOr<Problem> Read(const GraphSpec& graph);

  const Problem problem_;
  const CausalConvFunctions functions_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLANS_CAUSAL_CONV_H_
