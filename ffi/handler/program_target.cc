// SPDX-License-Identifier: Apache-2.0
// Reading and comparing the targets of programs.

#include "handler/program_target.h"

#include <limits>
#include <string>

#include "cudnn/cudnn_library.h"

namespace jax_cudnn {
namespace {

bool IsPositiveInt(int64_t value) {
  return value > 0 && value <= std::numeric_limits<int>::max();
}

// "sm_90 with cuDNN 9.19.0"
std::string Text(const ProgramTarget& target) {
  return "sm_" + std::to_string(target.sm_version) + " with cuDNN " +
         VersionText(target.cudnn_version);
}

}  // namespace

StatusOr<ProgramTarget> ReadProgramTarget(int64_t sm_version, int64_t cudnn_version) {
  const bool is_unknown = sm_version == 0 && cudnn_version == 0;
  if (!is_unknown && !(IsPositiveInt(sm_version) && IsPositiveInt(cudnn_version))) {
    return InvalidArgument("sm_version=" + std::to_string(sm_version) +
                           " with cudnn_version=" + std::to_string(cudnn_version) +
                           " is no target: both are positive, or 0 where no GPU was "
                           "known. Lower the program again.");
  }
  return ProgramTarget{static_cast<int>(sm_version), static_cast<int>(cudnn_version)};
}

Status CheckRunsOn(const ProgramTarget& lowered_for, const ProgramTarget& here) {
  const bool is_for_any = lowered_for.sm_version == 0;
  if (is_for_any || (lowered_for.sm_version == here.sm_version &&
                     lowered_for.cudnn_version == here.cudnn_version)) {
    return {};
  }
  return FailedPrecondition(
      "the program was lowered for " + Text(lowered_for) + ", and this is " +
      Text(here) +
      ". Compile it here, or lower it for this GPU within plans.using(device=...) "
      "where cuDNN is of this version.");
}

}  // namespace jax_cudnn
