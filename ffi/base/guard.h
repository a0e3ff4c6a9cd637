// SPDX-License-Identifier: Apache-2.0
// Guard: the one place where an exception of a library becomes a Status.

#ifndef JAX_CUDNN_GUARD_H_
#define JAX_CUDNN_GUARD_H_

#include <exception>
#include <new>
#include <string>

#include "base/status.h"

namespace jax_cudnn {

// Calls `function`, which returns a Status or a StatusOr, and lets nothing escape.
// `what` names the operation in the message.
template <typename Function>
auto Guard(const char* what, Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return ResourceExhausted(std::string(what) + ": out of host memory");
  } catch (const std::exception& error) {
    return Internal(std::string(what) + ": " + error.what());
  } catch (...) {
    return Internal(std::string(what) + ": unknown exception");
  }
}

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GUARD_H_
