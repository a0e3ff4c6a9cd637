// SPDX-License-Identifier: Apache-2.0
// The plan cache.

#include "plan_cache.h"

#include <optional>
#include <utility>

#include "build_site.h"
#include "guard.h"
#include "plan_file.h"

namespace jax_cudnn {
namespace {

// The process has one cuDNN and one frontend, so neither is part of the key.
std::string CacheKey(const std::string& text, const std::string& choice, int device) {
  std::string key = std::to_string(device);
  key.append(1, '\0').append(choice).append(1, '\0').append(text);
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
  const std::shared_ptr<Entry> entry = FindEntry(text, choice, device);
  const std::scoped_lock building(entry->mutex);
  if (entry->result.has_value()) {
    const std::scoped_lock lock(mutex_);
    ++hits_;
    return *entry->result;
  }
  bool is_stored = false;
  auto result =
      Guard("building a plan", [&]() -> StatusOr<std::shared_ptr<const Plan>> {
        ASSIGN_OR_RETURN(const BuildSite site, BuildSite::Enter(device));
        const std::string key = WriteKey(site.KeyOf(text, choice));
        std::shared_ptr<const Plan> plan = LoadPlan(key, graph, site.target());
        is_stored = plan != nullptr;
        if (is_stored) return plan;
        ASSIGN_OR_RETURN(plan, Plan::Build(graph, choice, site.target()));
        SavePlan(key, *plan);
        return plan;
      });
  if (IsWorthKeeping(result)) entry->result = result;
  const std::scoped_lock lock(mutex_);
  if (!is_stored) ++builds_;
  return result;
}

std::shared_ptr<const Plan> PlanCache::Insert(const std::string& text,
                                              const std::string& choice, int device,
                                              std::shared_ptr<const Plan> plan) {
  const std::shared_ptr<Entry> entry = FindEntry(text, choice, device);
  const std::scoped_lock lock(entry->mutex);
  // Compiled programs know the workspace of the plan that is there.
  if (!entry->result.has_value() || !entry->result->ok()) {
    entry->result = std::move(plan);
  }
  return **entry->result;
}

std::shared_ptr<PlanCache::Entry> PlanCache::FindEntry(const std::string& text,
                                                       const std::string& choice,
                                                       int device) {
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<Entry>& place = entries_[CacheKey(text, choice, device)];
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
                                                      int device) {
  ASSIGN_OR_RETURN(const BuildSite site, BuildSite::Enter(device));
  return ListCandidates(graph, /*choice=*/"", site.target(), /*build=*/false);
}

}  // namespace jax_cudnn
