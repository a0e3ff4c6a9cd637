// SPDX-License-Identifier: Apache-2.0
// Which code a failure of the frontend has.

#include "frontend/frontend_status.h"

#include "frontend/refusal.h"

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;

// By value: the frontend's accessor is not const.
std::string Text(fe::error_t error) { return error.get_message(); }

bool Mentions(const std::string& text, const char* words) {
  return text.find(words) != std::string::npos;
}

}  // namespace

std::string Message(const fe::error_t& error) { return OneLine(Text(error)); }

Status PlanningStatus(const fe::error_t& error) {
  const std::string text = Text(error);
  // The frontend's own words begin so when it cannot open or search a library.
  if (Mentions(text, "SUBLIBRARY_LOADING_FAILED") || Mentions(text, "Unable to ")) {
    return FailedPrecondition(OneLine(text));
  }
  if (Mentions(text, "ALLOC_FAILED")) return ResourceExhausted(OneLine(text));
  std::string lines;
  for (const std::string& reason : RefusalReasons(text)) {
    if (!lines.empty()) lines += '\n';
    lines += reason;
  }
  return Unimplemented(lines);
}

Status ExecutionStatus(const fe::error_t& error) {
  const std::string text = "cuDNN failed to launch: " + Message(error);
  if (Mentions(text, "ALLOC_FAILED")) return ResourceExhausted(text);
  return Internal(text);
}

}  // namespace jax_cudnn
