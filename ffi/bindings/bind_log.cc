// SPDX-License-Identifier: Apache-2.0
// Lines of log to a sink of Python's.

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/status.h"
#include "bindings/bindings.h"
#include "bindings/calls.h"
#include "cudnn/cudnn_library.h"
#include "cudnn/cudnn_log.h"

namespace nb = nanobind;

namespace jax_cudnn {
namespace {

const char* SourceName(LogSource source) {
  switch (source) {
    case LogSource::kOurs:
      return "jax_cudnn";
    case LogSource::kCudnn:
      return "cudnn";
  }
  return "";
}

// A sink that calls a Python object, from any thread.
std::shared_ptr<const LogSink> MakeSink(nb::object callable) {
  return std::make_shared<const LogSink>(
      [callable = std::move(callable)](LogSource source, LogLevel level,
                                       const std::string& line) {
        const nb::gil_scoped_acquire acquire;
        try {
          // cuDNN's texts may hold any bytes.
          const nb::object text = nb::steal(PyUnicode_DecodeUTF8(
              line.data(), static_cast<Py_ssize_t>(line.size()), "replace"));
          callable(static_cast<int>(level), text, SourceName(source));
        } catch (nb::python_error& error) {
          error.discard_as_unraisable(callable);
        }
      });
}

// The sink before, if any, is dropped here, where Python's lock is held again.
void SetSink(const nb::object& callable, int level, bool cudnn) {
  const auto chosen = static_cast<LogLevel>(level);
  const auto sink = callable.is_none() ? nullptr : MakeSink(callable);
  Call("setting where the log goes", [&]() -> StatusOr<std::shared_ptr<const LogSink>> {
    RETURN_IF_ERROR(StopCudnnLog());
    if (cudnn && sink != nullptr) {
      ASSIGN_OR_RETURN(const CudnnLibrary* library, LoadCudnn());
      RETURN_IF_ERROR(StartCudnnLog(*library, chosen));
    }
    return SetLogSink(sink, chosen);
  });
}

}  // namespace

void BindLog(nb::module_& m) {
  m.def("set_log_sink", SetSink, nb::arg("sink").none(), nb::arg("level"),
        nb::arg("cudnn"));
}

}  // namespace jax_cudnn
