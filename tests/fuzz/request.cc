// SPDX-License-Identifier: Apache-2.0
// Reads any bytes as a request for a plan, and applies one that is taken.

#include <cstdint>
#include <limits>

#include "candidates/plan_request.h"
#include "fuzzing.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_cudnn;  // NOLINT(google-build-using-namespace)
  const std::string_view text = Text(data, size);
  const auto request = ParsePlanRequest(text);
  if (!request.ok()) {
    RequireRefusal(request.status());
    return 0;
  }
  Require(text.empty() || WritePlanRequest(*request) == text,
          "a request that is taken is canonical");
  for (const int64_t number : {int64_t{0}, std::numeric_limits<int64_t>::max()}) {
    static_cast<void>(RefusalOf(*request, number, {"TENSOR_CORE", "NONDETERMINISTIC"}));
    static_cast<void>(WorkspaceRefusal(*request, number));
  }
  return 0;
}
