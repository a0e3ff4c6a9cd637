// SPDX-License-Identifier: Apache-2.0
// A plan is launched once where nothing runs, before anyone relies on it.
//
// cuDNN has plans that it builds and cannot launch: cuDNN 9.19 on an H200 checks some
// of what they need only then. Such a plan must not reach a compiled program, where
// there is no other to take in its place.

#ifndef JAX_CUDNN_REHEARSAL_H_
#define JAX_CUDNN_REHEARSAL_H_

#include "base/status.h"
#include "candidates/plan_target.h"
#include "plans/plan.h"

namespace jax_cudnn {

// Launches a plan into a CUDA graph, instantiates the graph, and drops it: all checks
// of a launch are made, no kernel runs and no operand is read, so none is needed.
// The target's device must be current. Takes about as long as a launch. UNIMPLEMENTED,
// with what cuDNN or CUDA says, where the plan cannot be launched. A target that is
// only described launches nothing.
Status Rehearse(const Plan& plan, const PlanTarget& target);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_REHEARSAL_H_
