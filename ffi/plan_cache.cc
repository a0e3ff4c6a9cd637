// SPDX-License-Identifier: Apache-2.0
// The plan cache.

#include "plan_cache.h"

#include <utility>

#include "cuda_device.h"
#include "cudnn_library.h"
#include "guard.h"
#include "handle_pool.h"

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
  auto result = Guard("building a plan", [&] {
    return WithTarget(device, [&](const PlanTarget& target) {
      return Plan::Build(graph, choice, target);
    });
  });
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
