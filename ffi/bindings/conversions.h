// SPDX-License-Identifier: Apache-2.0
// Between Python's values and ours, for more than one theme.

#ifndef JAX_CUDNN_CONVERSIONS_H_
#define JAX_CUDNN_CONVERSIONS_H_

#include <nanobind/nanobind.h>

#include <string>

#include "candidates/candidate.h"
#include "candidates/plan_target.h"
#include "plans/plan.h"

namespace jax_cudnn {

std::string Text(const nanobind::bytes& bytes);
nanobind::bytes ToBytes(const std::string& text);

nanobind::dict ToDict(const Candidate& candidate);
// The plan's candidate, with its failures.
nanobind::dict ToDict(const Plan& plan);

// The target that need not be there.
PlanTarget DescribedTarget(const nanobind::bytes& device_properties, int sm_version,
                           int sm_count);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CONVERSIONS_H_
