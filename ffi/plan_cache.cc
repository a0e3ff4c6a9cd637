// SPDX-License-Identifier: Apache-2.0
// The plan cache.

#include "plan_cache.h"

#include <chrono>
#include <utility>
#include <variant>

#include "cuda_device.h"
#include "cudnn_library.h"
#include "guard.h"
#include "handle_pool.h"
#include "log.h"

namespace jax_cudnn {
namespace {

// The process has one cuDNN and one frontend, so neither is part of the key.
std::string CacheKey(const std::string& text, const std::string& choice, int device) {
  std::string key = std::to_string(device);
  key.append(1, '\0').append(choice).append(1, '\0').append(text);
  return key;
}

// Calls `use` with a target for `device`, which is current during the call.
template <typename Use>
auto WithTarget(int device, Use&& use) -> decltype(use(PlanTarget())) {
  ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
  ASSIGN_OR_RETURN(const DeviceInfo info, QueryDevice(*runtime, device));
  ASSIGN_OR_RETURN(const DeviceGuard guard, DeviceGuard::Enter(*runtime, device));
  ASSIGN_OR_RETURN(const HandleLease lease,
                   HandlePool::Global().AcquireForBuild(*runtime, device));
  PlanTarget target;
  target.handle = lease.get();
  target.sm_version = info.sm_version;
  target.sm_count = info.sm_count;
  return use(target);
}

bool IsWorthKeeping(const StatusOr<std::shared_ptr<const Plan>>& result) {
  switch (result.status().code()) {
    case StatusCode::kOk:
    case StatusCode::kInvalidArgument:
    case StatusCode::kUnimplemented:
      return true;
    case StatusCode::kResourceExhausted:
    case StatusCode::kFailedPrecondition:
    case StatusCode::kInternal:
      return false;
  }
  return false;
}

// --- what the log says --------------------------------------------------------------

using Clock = std::chrono::steady_clock;

// What a graph computes, in a word: its kinds, or modes where it has them.
std::string Label(const GraphSpec& graph) {
  std::string label;
  for (const NodeSpec& node : graph.nodes) {
    std::string name = node.kind;
    if (const auto mode = node.attributes.find("mode"); mode != node.attributes.end()) {
      if (const auto* text = std::get_if<std::string>(&mode->second)) name = *text;
    }
    if (name == "constant" || name == "identity") continue;
    if (!label.empty()) label += '+';
    label += name;
  }
  return label;
}

void LogLine(const std::string& text) { Log(LogSource::kOurs, LogLevel::kDebug, text); }

void LogMiss(const GraphSpec& graph, const std::string& choice, int device) {
  if (!IsLogged(LogLevel::kDebug)) return;
  LogLine(Label(graph) + " on device " + std::to_string(device) +
          ": no plan in the cache" +
          (choice.empty() ? std::string() : " for the choice " + choice));
}

void LogBuild(const GraphSpec& graph, Clock::time_point start,
              const StatusOr<std::shared_ptr<const Plan>>& result) {
  if (!IsLogged(LogLevel::kDebug)) return;
  const std::string label = Label(graph);
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
  const std::string time = " after " + std::to_string(ms.count()) + " ms";
  if (!result.ok()) {
    LogLine(label + ": no plan" + time + ": " + result.status().message());
    return;
  }
  const Plan& plan = **result;
  for (const std::string& failure : plan.failures()) LogLine(label + ": " + failure);
  LogLine(label + ": built " + plan.candidate().name + time + ", workspace " +
          std::to_string(plan.workspace_bytes()) + " bytes");
}

}  // namespace

PlanCache& PlanCache::Global() {
  // Leaked: destroying a plan calls cuDNN, which may be gone at exit.
  static auto& cache = *new PlanCache;
  return cache;
}

StatusOr<std::shared_ptr<const Plan>> PlanCache::GetOrBuild(const std::string& text,
                                                            const GraphSpec& graph,
                                                            const std::string& choice,
                                                            int device) {
  const DeferredLog deferred;
  std::shared_ptr<Entry> entry;
  {
    const std::scoped_lock lock(mutex_);
    std::shared_ptr<Entry>& place = entries_[CacheKey(text, choice, device)];
    if (place == nullptr) place = std::make_shared<Entry>();
    entry = place;
  }
  const std::scoped_lock building(entry->mutex);
  if (entry->result.has_value()) {
    const std::scoped_lock lock(mutex_);
    ++hits_;
    return *entry->result;
  }
  LogMiss(graph, choice, device);
  const auto start = Clock::now();
  auto result = Guard("building a plan", [&] {
    return WithTarget(device, [&](const PlanTarget& target) {
      return Plan::Build(graph, choice, target);
    });
  });
  LogBuild(graph, start, result);
  if (IsWorthKeeping(result)) entry->result = result;
  const std::scoped_lock lock(mutex_);
  ++builds_;
  return result;
}

PlanCacheStats PlanCache::stats() const {
  const std::scoped_lock lock(mutex_);
  PlanCacheStats stats;
  stats.entries = static_cast<int64_t>(entries_.size());
  stats.builds = builds_;
  stats.hits = hits_;
  return stats;
}

void PlanCache::Clear() {
  std::unordered_map<std::string, std::shared_ptr<Entry>> dropped;
  const std::scoped_lock lock(mutex_);
  entries_.swap(dropped);
}

StatusOr<std::vector<Candidate>> ListDeviceCandidates(const GraphSpec& graph,
                                                      const std::string& choice,
                                                      int device) {
  return WithTarget(device, [&](const PlanTarget& target) {
    return ListCandidates(graph, choice, target, /*build=*/false);
  });
}

}  // namespace jax_cudnn
