// SPDX-License-Identifier: Apache-2.0
// How a binding calls C++: without Python's lock, with failures as exceptions.

#ifndef JAX_CUDNN_CALLS_H_
#define JAX_CUDNN_CALLS_H_

#include <nanobind/nanobind.h>

#include <utility>

#include "base/guard.h"
#include "base/log.h"
#include "base/status.h"

namespace jax_cudnn {

// Raises the exception of a status that is not OK.
[[noreturn]] void Raise(const Status& status);

// Calls `function` without the GIL and returns its value, or raises its status.
template <typename Function>
auto Call(const char* what, Function&& function) {
  auto result = [&] {
    const nanobind::gil_scoped_release release;
    const DeferredLog deferred;
    return Guard(what, std::forward<Function>(function));
  }();
  if (!result.ok()) Raise(result.status());
  return std::move(*result);
}

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CALLS_H_
