// SPDX-License-Identifier: Apache-2.0
// Looking up cuDNN's functions for causal convolutions.

#include "cudnn/causal_conv.h"

#include <array>
#include <string>

namespace jax_cudnn {
namespace {

// cudnnStatus_t: 2000 to 2999 are bad parameters, 3000 to 3999 what is not supported.
constexpr int kFirstRefusal = 2000;
constexpr int kAfterRefusals = 4000;

}  // namespace

StatusOr<CausalConvFunctions> LoadCausalConv(const CudnnRuntime& runtime,
                                             bool is_channels_last) {
  const OpenLibrary& library = runtime.cudnn.library;
  const char* forward = "cudnnCausalConv1dForward";
  const char* backward = "cudnnCausalConv1dBackward";
  if (is_channels_last) {
    forward = "cudnnCausalConv1dNwhForward";
    backward = "cudnnCausalConv1dNwhBackward";
  }
  CausalConvFunctions found;
  const bool is_there = Resolve(library, forward, found.forward).ok() &&
                        Resolve(library, backward, found.backward).ok();
  if (!is_there) {
    return Unimplemented("cuDNN " + VersionText(runtime.cudnn.version) + " has no " +
                         forward + " and " + backward);
  }
  return found;
}

Status CheckCausalConv(const CudnnRuntime& runtime, int error, const char* call) {
  if (error == 0) return {};
  const CudnnFunctions& cudnn = runtime.cudnn.functions;
  std::array<char, 512> more{};
  cudnn.get_last_error_string(more.data(), more.size());
  std::string text = std::string(call) + " failed: " + cudnn.get_error_string(error);
  if (more.front() != '\0') text += std::string(" (") + more.data() + ")";
  const bool is_refused = error >= kFirstRefusal && error < kAfterRefusals;
  return is_refused ? Unimplemented(text) : Internal(text);
}

}  // namespace jax_cudnn
