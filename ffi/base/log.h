// SPDX-License-Identifier: Apache-2.0
// Lines of log, to wherever the owner of the process wants them. Knows nothing of
// Python: bind_log.cc makes the sink.

#ifndef JAX_CUDNN_LOG_H_
#define JAX_CUDNN_LOG_H_

#include <functional>
#include <memory>
#include <string>

#include "base/status.h"

namespace jax_cudnn {

// The numbers are those of Python's logging.
enum class LogLevel : int { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };

// Who speaks: we, or the cuDNN library itself.
enum class LogSource { kOurs, kCudnn };

using LogSink =
    std::function<void(LogSource source, LogLevel level, const std::string& line)>;

// Hands lines of `level` and above to `sink` from now on; none to a null sink. Returns
// the sink before it, which nobody calls any more: waits for calls under way. So the
// caller holds no lock that a sink takes. FAILED_PRECONDITION inside a sink.
StatusOr<std::shared_ptr<const LogSink>> SetLogSink(std::shared_ptr<const LogSink> sink,
                                                    LogLevel level);

// Whether a line of this level would go anywhere; as cheap as one load.
bool IsLogged(LogLevel level);

// Hands a line to the sink, or keeps it while a DeferredLog of this thread is alive.
// A line that a sink itself brings about, by planning in a handler, is dropped.
void Log(LogSource source, LogLevel level, std::string line);

// Keeps this thread's lines until it goes out of scope. A sink may take any lock (the
// interpreter's, a handler's), so none of ours may be held when it is called: declared
// before the first lock, this one hands the lines over after the last is released.
class DeferredLog {
 public:
  DeferredLog();
  ~DeferredLog();
  DeferredLog(const DeferredLog&) = delete;
  DeferredLog& operator=(const DeferredLog&) = delete;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_LOG_H_
