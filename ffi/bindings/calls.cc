// SPDX-License-Identifier: Apache-2.0
// Which exception a status becomes.

#include "bindings/calls.h"

#include <nanobind/stl/string.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace nb = nanobind;

namespace jax_cudnn {
namespace {

// Splits "summary\n  - reason\n  - reason" for the exception that takes them apart.
std::pair<std::string, nb::list> SplitReasons(const std::string& message) {
  constexpr std::string_view kMark = "\n  - ";
  nb::list reasons;
  size_t end = message.find(kMark);
  const std::string summary = message.substr(0, end);
  while (end != std::string::npos) {
    const size_t start = end + kMark.size();
    end = message.find(kMark, start);
    reasons.append(message.substr(start, end == std::string::npos ? end : end - start));
  }
  return {summary, reasons};
}

nb::object ToException(const Status& status) {
  const auto plain = [&](const char* module, const char* name) {
    return nb::module_::import_(module).attr(name)(status.message());
  };
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
      return plain("jax_cudnn.errors", "GraphError");
    case StatusCode::kUnimplemented: {
      auto [summary, reasons] = SplitReasons(status.message());
      return nb::module_::import_("jax_cudnn.errors")
          .attr("UnsupportedError")(summary, reasons);
    }
    case StatusCode::kResourceExhausted:
      return plain("builtins", "MemoryError");
    case StatusCode::kFailedPrecondition:
      return plain("jax_cudnn.errors", "LibraryError");
    case StatusCode::kOk:
    case StatusCode::kInternal:
      break;
  }
  return plain("builtins", "RuntimeError");
}

}  // namespace

void Raise(const Status& status) {
  const nb::object exception = ToException(status);
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
  throw nb::python_error();
}

}  // namespace jax_cudnn
