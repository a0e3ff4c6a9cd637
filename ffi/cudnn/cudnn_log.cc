// SPDX-License-Identifier: Apache-2.0
// From cudnnSetCallback to Log.

#include "cudnn/cudnn_log.h"

#include <dlfcn.h>

#include <atomic>
#include <string>
#include <string_view>
#include <utility>

namespace jax_cudnn {
namespace {

// cudnnCallback_t and cudnnSetCallback, of cudnn_graph.h in 9.27; the third argument of
// the callback is a cudnnDebug_t, which repeats what the message says.
using Callback = void (*)(int, void*, const void*, const char*);
using SetCallback = int (*)(unsigned, void*, Callback);

// cudnnSeverity_t.
constexpr int kSeverityWarning = 2;
constexpr int kSeverityInfo = 3;
constexpr unsigned kErrors = 1U << 1;
constexpr unsigned kWarnings = 1U << kSeverityWarning;
constexpr unsigned kInfos = 1U << kSeverityInfo;

// cudnnSetCallback where our callback is in place, else null.
std::atomic<SetCallback> active{nullptr};

// cuDNN's "info" is every call of its API with all arguments: that is for debugging.
LogLevel LevelOf(int severity) {
  if (severity == kSeverityInfo) return LogLevel::kDebug;
  if (severity == kSeverityWarning) return LogLevel::kWarning;
  return LogLevel::kError;
}

unsigned MaskOf(LogLevel level) {
  unsigned mask = kErrors;
  if (level <= LogLevel::kWarning) mask |= kWarnings;
  if (level <= LogLevel::kDebug) mask |= kInfos;
  return mask;
}

void TakeMessage(int severity, void*, const void*, const char* message) {
  if (message == nullptr || !IsLogged(LevelOf(severity))) return;
  // Lines that end with a null each, and an empty one after the last.
  std::string text;
  for (std::string_view line = message; !line.empty();
       line = std::string_view(line.data() + line.size() + 1)) {
    if (!text.empty()) text += '\n';
    text += line;
  }
  Log(LogSource::kCudnn, LevelOf(severity), std::move(text));
}

Status Apply(SetCallback set_callback, unsigned mask, Callback callback) {
  const int status = set_callback(mask, nullptr, callback);
  if (status == 0) return {};
  return Internal("cudnnSetCallback failed with status " + std::to_string(status));
}

}  // namespace

Status StartCudnnLog(const CudnnLibrary& cudnn, LogLevel level) {
  auto set_callback =
      reinterpret_cast<SetCallback>(dlsym(cudnn.library.handle, "cudnnSetCallback"));
  if (set_callback == nullptr) {
    return FailedPrecondition(cudnn.library.path +
                              " has no function cudnnSetCallback, so that its log "
                              "cannot be had; leave cudnn=True out");
  }
  RETURN_IF_ERROR(Apply(set_callback, MaskOf(level), TakeMessage));
  active.store(set_callback);
  return {};
}

Status StopCudnnLog() {
  const SetCallback set_callback = active.exchange(nullptr);
  return set_callback == nullptr ? Status() : Apply(set_callback, 0, nullptr);
}

}  // namespace jax_cudnn
