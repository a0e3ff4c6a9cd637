// SPDX-License-Identifier: Apache-2.0
// The plan cache.

#include "keeping/plan_cache.h"

#include <chrono>
#include <optional>
#include <utility>
#include <variant>

#include "base/guard.h"
#include "base/log.h"
#include "keeping/build_site.h"
#include "keeping/plan_file.h"

namespace jax_cudnn {
namespace {

// The process has one cuDNN and one frontend, so neither is part of the key.
std::string CacheKey(const std::string& text, const std::string& request, int device) {
  std::string key = std::to_string(device);
  key.append(1, '\0').append(request).append(1, '\0').append(text);
  return key;
}

// The plan that the store has under a key, or null.
std::shared_ptr<const Plan> LoadPlan(const std::string& key, const GraphSpec& graph,
                                     const PlanTarget& target) {
  PlanStore& store = PlanStore::Global();
  const std::optional<std::string> bytes = store.Load(key);
  if (!bytes.has_value()) return nullptr;
  auto plan = Plan::Deserialize(graph, *bytes, target);
  if (plan.ok()) return std::move(*plan);
  store.Reject(key, "cuDNN does not take a stored plan: " + plan.status().message());
  return nullptr;
}

void SavePlan(const std::string& key, const Plan& plan) {
  PlanStore& store = PlanStore::Global();
  if (!store.is_on()) return;
  const auto bytes = plan.Serialize();
  if (bytes.ok()) {
    store.Save(key, *bytes);
  } else {
    store.NoteFailure("the plan " + plan.candidate().name +
                      " cannot be stored: " + bytes.status().message());
  }
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

void LogMiss(const GraphSpec& graph, const std::string& request, int device) {
  if (!IsLogged(LogLevel::kDebug)) return;
  LogLine(Label(graph) + " on device " + std::to_string(device) +
          ": no plan in the cache" +
          (request.empty() ? std::string() : " for the request " + request));
}

void LogBuild(const GraphSpec& graph, Clock::time_point start,
              const StatusOr<std::shared_ptr<const Plan>>& result, bool is_stored) {
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
  LogLine(label + (is_stored ? ": loaded " : ": built ") + plan.candidate().name +
          time + ", workspace " + std::to_string(plan.workspace_bytes()) + " bytes");
}

}  // namespace

PlanCache& PlanCache::Global() {
  // Leaked: destroying a plan calls cuDNN, which may be gone at exit.
  static auto& cache = *new PlanCache;
  return cache;
}

StatusOr<std::shared_ptr<const Plan>> PlanCache::GetOrBuild(const std::string& text,
                                                            const GraphSpec& graph,
                                                            const std::string& request,
                                                            int device) {
  const DeferredLog deferred;
  const std::shared_ptr<Entry> entry = FindEntry(text, request, device);
  const std::scoped_lock building(entry->mutex);
  if (entry->result.has_value()) {
    const std::scoped_lock lock(mutex_);
    ++hits_;
    return *entry->result;
  }
  LogMiss(graph, request, device);
  const auto start = Clock::now();
  bool is_stored = false;
  auto result =
      Guard("building a plan", [&]() -> StatusOr<std::shared_ptr<const Plan>> {
        ASSIGN_OR_RETURN(const BuildSite site, BuildSite::Enter(device));
        const std::string key = WriteKey(site.KeyOf(text, request));
        std::shared_ptr<const Plan> plan = LoadPlan(key, graph, site.target());
        is_stored = plan != nullptr;
        if (is_stored) return plan;
        ASSIGN_OR_RETURN(plan, Plan::Build(graph, request, site.target()));
        SavePlan(key, *plan);
        return plan;
      });
  LogBuild(graph, start, result, is_stored);
  if (IsWorthKeeping(result)) entry->result = result;
  const std::scoped_lock lock(mutex_);
  if (!is_stored) ++builds_;
  return result;
}

std::shared_ptr<const Plan> PlanCache::Insert(const std::string& text,
                                              const std::string& request, int device,
                                              std::shared_ptr<const Plan> plan) {
  const std::shared_ptr<Entry> entry = FindEntry(text, request, device);
  const std::scoped_lock lock(entry->mutex);
  // Compiled programs know the workspace of the plan that is there.
  if (!entry->result.has_value() || !entry->result->ok()) {
    entry->result = std::move(plan);
  }
  return **entry->result;
}

std::shared_ptr<PlanCache::Entry> PlanCache::FindEntry(const std::string& text,
                                                       const std::string& request,
                                                       int device) {
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<Entry>& place = entries_[CacheKey(text, request, device)];
  if (place == nullptr) place = std::make_shared<Entry>();
  return place;
}

PlanCacheStats PlanCache::stats() const {
  PlanCacheStats stats;
  stats.store = PlanStore::Global().stats();
  const std::scoped_lock lock(mutex_);
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
                                                      const std::string& request,
                                                      int device) {
  ASSIGN_OR_RETURN(const BuildSite site, BuildSite::Enter(device));
  return ListCandidates(graph, request, site.target(), /*build=*/false);
}

}  // namespace jax_cudnn
