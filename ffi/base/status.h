// SPDX-License-Identifier: Apache-2.0
// Status and StatusOr: how a function that can fail says so, with a code and a text.

#ifndef JAX_CUDNN_STATUS_H_
#define JAX_CUDNN_STATUS_H_

#include <cassert>
#include <optional>
#include <string>
#include <utility>

namespace jax_cudnn {

// The codes map one to one to those of the XLA FFI and to Python exceptions.
enum class StatusCode {
  kOk,
  kInvalidArgument,     // a graph, request or operand that we refuse: GraphError
  kUnimplemented,       // a graph that cuDNN refuses: UnsupportedError
  kResourceExhausted,   // out of host or device memory: MemoryError
  kFailedPrecondition,  // a wrong or missing library or driver: LibraryError
  kInternal,            // anything else: RuntimeError
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message)
      : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status InvalidArgument(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}
inline Status Unimplemented(std::string message) {
  return {StatusCode::kUnimplemented, std::move(message)};
}
inline Status ResourceExhausted(std::string message) {
  return {StatusCode::kResourceExhausted, std::move(message)};
}
inline Status FailedPrecondition(std::string message) {
  return {StatusCode::kFailedPrecondition, std::move(message)};
}
inline Status Internal(std::string message) {
  return {StatusCode::kInternal, std::move(message)};
}

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] StatusOr {
 public:
  StatusOr(T value) : value_(std::move(value)) {}         // NOLINT
  StatusOr(Status status) : status_(std::move(status)) {  // NOLINT
    assert(!status_.ok());
  }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  // Only after ok() has said yes.
  // NOLINTBEGIN(bugprone-unchecked-optional-access)
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  // NOLINTEND(bugprone-unchecked-optional-access)

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace jax_cudnn

#define RETURN_IF_ERROR(expression)                                  \
  do {                                                               \
    if (::jax_cudnn::Status status_ = (expression); !status_.ok()) { \
      return status_;                                                \
    }                                                                \
  } while (false)

// The arguments are declarations and names, which take no parentheses.
// NOLINTBEGIN(bugprone-macro-parentheses)
#define JAX_CUDNN_CONCAT_(a, b) a##b
#define JAX_CUDNN_CONCAT(a, b) JAX_CUDNN_CONCAT_(a, b)
#define JAX_CUDNN_ASSIGN_OR_RETURN_(temporary, target, expression) \
  auto temporary = (expression);                                   \
  if (!temporary.ok()) return temporary.status();                  \
  target = std::move(*temporary)
// NOLINTEND(bugprone-macro-parentheses)

// ASSIGN_OR_RETURN(auto x, F()): x is F's value, or the caller returns F's status.
#define ASSIGN_OR_RETURN(target, expression)                                  \
  JAX_CUDNN_ASSIGN_OR_RETURN_(JAX_CUDNN_CONCAT(status_or_, __LINE__), target, \
                              expression)

#endif  // JAX_CUDNN_STATUS_H_
