// SPDX-License-Identifier: Apache-2.0
// A folder of plan files, one per key, that processes share.
//
// Nothing that goes wrong on disk is an error: the store then answers nothing, keeps
// the reason and counts it, and the plan is built.

#ifndef JAX_CUDNN_PLAN_STORE_H_
#define JAX_CUDNN_PLAN_STORE_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "base/status.h"

namespace jax_cudnn {

struct PlanStoreSettings {
  std::string directory;  // empty: nothing is read or written
  int64_t limit_bytes = 0;
};

struct PlanStoreStats {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t writes = 0;
  int64_t failures = 0;
  std::string last_failure;
};

// What lies in the folder.
struct PlanStoreUsage {
  int64_t files = 0;
  int64_t bytes = 0;
};

// Thread-safe, and safe with other processes: files appear whole, by renaming, and are
// checked whole when read. Plans are native code, so that files count only if they
// belong to this user (or root) and nobody else may write them.
class PlanStore {
 public:
  using Source = std::function<StatusOr<PlanStoreSettings>()>;

  static PlanStore& Global();

  // Where the settings come from when they are first needed. The folder is made at the
  // first save.
  void SetSource(Source source);
  // The settings from now on, whatever the source would say.
  void Configure(PlanStoreSettings settings);
  bool is_on();

  // The payload that was saved under `key`, if it is there and whole. What is corrupt
  // is removed.
  std::optional<std::string> Load(const std::string& key);
  // Keeps a payload; then removes what was used least recently until the limit holds.
  void Save(const std::string& key, const std::string& payload);
  // What Load gave for `key` is of no use: counts it as a failure, and removes it.
  void Reject(const std::string& key, const std::string& reason);
  // Something about a plan kept it from being saved.
  void NoteFailure(const std::string& reason);

  PlanStoreUsage Usage();
  // Removes all plan files.
  void Clear();
  PlanStoreStats stats() const;

 private:
  PlanStoreSettings Settings();
  void Count(int64_t PlanStoreStats::* counter);

  std::mutex resolving_;  // guards source_; held while it is asked
  Source source_;
  mutable std::mutex mutex_;  // guards the members below; never held during I/O
  PlanStoreSettings settings_;
  PlanStoreStats stats_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLAN_STORE_H_
