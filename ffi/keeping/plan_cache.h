// SPDX-License-Identifier: Apache-2.0
// The process-wide cache of plans: each is built once, by whoever asks first, or comes
// from the plan store.

#ifndef JAX_CUDNN_PLAN_CACHE_H_
#define JAX_CUDNN_PLAN_CACHE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "graph/graph_spec.h"
#include "keeping/plan_store.h"
#include "plans/plan.h"

namespace jax_cudnn {

struct PlanCacheStats {
  int64_t entries = 0;
  int64_t builds = 0;  // plans asked of cuDNN, failed ones included
  int64_t hits = 0;    // requests answered from the cache, failures included
  PlanStoreStats store;
};

// Thread-safe. Plans stay alive while anyone holds them, also after Clear.
class PlanCache {
 public:
  static PlanCache& Global();

  // The plan of a graph on a device, loaded from the store or built (and stored) at the
  // first request while others for the same plan wait. A refusal is remembered; a
  // failure of memory or of a library is not, since the next attempt may succeed.
  // `text` is the canonical text of `graph`.
  StatusOr<std::shared_ptr<const Plan>> GetOrBuild(const std::string& text,
                                                   const GraphSpec& graph,
                                                   const std::string& request,
                                                   int device);

  // Makes `plan` the answer unless there is a plan already; returns the answer.
  std::shared_ptr<const Plan> Insert(const std::string& text,
                                     const std::string& request, int device,
                                     std::shared_ptr<const Plan> plan);

  PlanCacheStats stats() const;
  void Clear();

 private:
  struct Entry {
    std::mutex mutex;  // guards `result`; held by the thread that builds
    std::optional<StatusOr<std::shared_ptr<const Plan>>> result;
  };

  std::shared_ptr<Entry> FindEntry(const std::string& text, const std::string& request,
                                   int device);

  mutable std::mutex mutex_;  // guards the members below; never held during a build
  std::unordered_map<std::string, std::shared_ptr<Entry>> entries_;
  int64_t builds_ = 0;
  int64_t hits_ = 0;
};

// cuDNN's candidates for a graph on a device of this machine, none of them built; see
// ListCandidates.
StatusOr<std::vector<Candidate>> ListDeviceCandidates(const GraphSpec& graph,
                                                      const std::string& request,
                                                      int device);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLAN_CACHE_H_
