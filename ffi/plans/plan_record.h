// SPDX-License-Identifier: Apache-2.0
// What a stored plan says of itself, in front of the bytes that are cuDNN's.

#ifndef JAX_CUDNN_PLAN_RECORD_H_
#define JAX_CUDNN_PLAN_RECORD_H_

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "candidates/candidate.h"

namespace jax_cudnn {

struct PlanRecord {
  Candidate candidate;
  // Why the candidates before this one did not build or are not allowed.
  std::vector<std::string> failures;
};

std::string WritePlanRecord(const Candidate& candidate,
                            const std::vector<std::string>& failures);

// Takes what WritePlanRecord wrote off the front of `bytes`; INVALID_ARGUMENT where it
// is malformed.
StatusOr<PlanRecord> TakePlanRecord(std::string_view& bytes);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLAN_RECORD_H_
