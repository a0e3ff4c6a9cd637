// SPDX-License-Identifier: Apache-2.0
// Handing lines of log to the sink, outside of all locks that others may want.

#include "base/log.h"

#include <atomic>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace jax_cudnn {
namespace {

constexpr int kOff = std::numeric_limits<int>::max();

struct State {
  std::atomic<int> level{kOff};
  // Guards `sink`. Shared by those who call it, so that SetLogSink waits for them;
  // nobody waits for them otherwise.
  std::shared_mutex mutex;
  std::shared_ptr<const LogSink> sink;
};

State& GlobalState() {
  // Leaked: handlers may still run while static objects are being destroyed.
  static auto& state = *new State;
  return state;
}

struct Line {
  LogSource source;
  LogLevel level;
  std::string text;
};

// Of this thread.
thread_local int deferral_depth = 0;
thread_local bool is_delivering = false;
thread_local std::vector<Line> deferred;

// Marks this thread as one that is inside the sink.
struct Delivering {
  Delivering() { is_delivering = true; }
  ~Delivering() { is_delivering = false; }
  Delivering(const Delivering&) = delete;
  Delivering& operator=(const Delivering&) = delete;
};

void Deliver(const Line& line) {
  State& state = GlobalState();
  const std::shared_lock lock(state.mutex);
  if (state.sink == nullptr || !IsLogged(line.level)) return;
  const Delivering delivering;
  (*state.sink)(line.source, line.level, line.text);
}

}  // namespace

StatusOr<std::shared_ptr<const LogSink>> SetLogSink(std::shared_ptr<const LogSink> sink,
                                                    LogLevel level) {
  if (is_delivering) {
    return FailedPrecondition("a log handler cannot change where the log goes");
  }
  State& state = GlobalState();
  const std::unique_lock lock(state.mutex);
  state.level.store(sink == nullptr ? kOff : static_cast<int>(level));
  std::swap(state.sink, sink);
  return sink;
}

bool IsLogged(LogLevel level) {
  return static_cast<int>(level) >= GlobalState().level.load(std::memory_order_relaxed);
}

void Log(LogSource source, LogLevel level, std::string line) {
  if (!IsLogged(level) || is_delivering) return;
  if (deferral_depth > 0) {
    deferred.push_back({source, level, std::move(line)});
  } else {
    Deliver({source, level, std::move(line)});
  }
}

DeferredLog::DeferredLog() { ++deferral_depth; }

DeferredLog::~DeferredLog() {
  if (--deferral_depth > 0) return;
  for (const Line& line : std::exchange(deferred, {})) Deliver(line);
}

}  // namespace jax_cudnn
