// SPDX-License-Identifier: Apache-2.0
// Threads fight over the plan cache and the handle pool, with a cuDNN that does
// nothing.
//
// test_threads.py compiles this with the thread sanitizer. Plan is replaced by one that
// takes a while, so that the threads meet; the plan store is the real one.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "cudnn/cudnn_library.h"
#include "cudnn/handle_pool.h"
#include "graph/graph_spec.h"
#include "keeping/plan_cache.h"
#include "keeping/plan_store.h"
#include "plans/plan.h"

namespace jax_cudnn {

std::atomic<int> build_count{0};
std::atomic<int> read_count{0};

Plan::Plan(std::unique_ptr<const Launchable> launchable, Candidate candidate,
           std::vector<std::string> failures)
    : launchable_(std::move(launchable)),
      candidate_(std::move(candidate)),
      failures_(std::move(failures)) {}

Plan::~Plan() = default;

StatusOr<std::shared_ptr<const Plan>> Plan::Build(const GraphSpec&,
                                                  const std::string& request,
                                                  const PlanTarget& target) {
  ++build_count;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (target.handle == nullptr) return Internal("no handle");
  if (request == "refused") return Unimplemented("refused");
  if (request == "broken") return FailedPrecondition("broken");
  Candidate candidate;
  candidate.request = request;
  return std::shared_ptr<const Plan>(new Plan(nullptr, std::move(candidate), {}));
}

StatusOr<std::string> Plan::Serialize() const {
  if (candidate_.request == "not writable") return Unimplemented("not this engine");
  return candidate_.request;
}

StatusOr<std::shared_ptr<const Plan>> Plan::Deserialize(const GraphSpec&,
                                                        const std::string& bytes,
                                                        const PlanTarget& target) {
  ++read_count;
  if (target.handle == nullptr) return Internal("no handle");
  if (bytes == "spoiled") return Internal("spoiled");
  Candidate candidate;
  candidate.request = bytes;
  return std::shared_ptr<const Plan>(new Plan(nullptr, std::move(candidate), {}));
}

std::string FrontendVersion() { return "0"; }

StatusOr<std::vector<Candidate>> ListCandidates(const GraphSpec&, const std::string&,
                                                const PlanTarget&, bool) {
  return Internal("not here");
}

}  // namespace jax_cudnn

namespace {

using jax_cudnn::PlanCache;
using jax_cudnn::StatusCode;

constexpr int kThreads = 8;

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

template <typename Work>
void InThreads(Work work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

jax_cudnn::StatusOr<std::shared_ptr<const jax_cudnn::Plan>> Get(
    const std::string& request, int device = 0) {
  return PlanCache::Global().GetOrBuild("graph", jax_cudnn::GraphSpec(), request,
                                        device);
}

void EachPlanIsBuiltOnce() {
  std::set<const jax_cudnn::Plan*> plans[3];
  std::mutex mutex;
  InThreads([&](int thread) {
    for (int i = 0; i < 30; ++i) {
      const int key = (i + thread) % 3;
      const auto plan = Get("request " + std::to_string(key));
      Expect(plan.ok(), "a plan");
      const std::scoped_lock lock(mutex);
      plans[key].insert(plan->get());
    }
  });
  for (const auto& each : plans) Expect(each.size() == 1, "one plan per key");
  Expect(jax_cudnn::build_count == 3, "one build per key");
  const auto stats = PlanCache::Global().stats();
  Expect(stats.entries == 3 && stats.builds == 3, "entries and builds");
  Expect(stats.hits == kThreads * 30 - 3, "all others are hits");
}

void RefusalsAreRememberedAndFailuresAreNot() {
  jax_cudnn::build_count = 0;
  InThreads([](int) {
    Expect(Get("refused").status().code() == StatusCode::kUnimplemented, "refused");
  });
  Expect(jax_cudnn::build_count == 1, "a refusal is remembered");
  for (int i = 0; i < 2; ++i) {
    Expect(Get("broken").status().code() == StatusCode::kFailedPrecondition, "broken");
  }
  Expect(jax_cudnn::build_count == 3, "a failure is tried again");
}

void PlansOutliveTheCache() {
  const auto plan = Get("request 0");
  PlanCache::Global().Clear();
  Expect(PlanCache::Global().stats().entries == 0, "cleared");
  Expect((*plan)->candidate().request == "request 0", "still alive");
}

void DevicesAreKeptApart() {
  Expect(*Get("request 0", 0) != *Get("request 0", 1), "a plan per device");
  Expect(Get("request 0", 2).status().code() == StatusCode::kInvalidArgument,
         "a device that is not there");
}

// `directory` is not there yet.
void PlansComeFromTheStore(const std::string& directory) {
  jax_cudnn::build_count = 0;
  auto& store = jax_cudnn::PlanStore::Global();
  store.SetSource([directory]() -> jax_cudnn::StatusOr<jax_cudnn::PlanStoreSettings> {
    return jax_cudnn::PlanStoreSettings{directory, 1 << 20};
  });
  const auto get_all = [](int thread) {
    for (int i = 0; i < 4; ++i) {
      const std::string request = "request " + std::to_string((i + thread) % 4);
      const auto plan = Get(request);
      Expect(plan.ok() && (*plan)->candidate().request == request,
             "the plan asked for");
    }
  };
  PlanCache::Global().Clear();
  InThreads(get_all);
  Expect(jax_cudnn::build_count == 4, "all are built");
  Expect(store.stats().writes == 4 && store.stats().misses == 4, "and kept");
  for (int round = 1; round <= 2; ++round) {
    PlanCache::Global().Clear();
    InThreads(get_all);
    Expect(jax_cudnn::build_count == 4, "none is built again");
    Expect(jax_cudnn::read_count == 4 * round, "each is read once");
    Expect(store.stats().hits == 4 * round, "from the store");
  }
  Expect(*Get("request 0", 0) != *Get("request 0", 1), "a plan per device");
  Expect(jax_cudnn::build_count == 4, "the other device reads it too");
  Expect(store.stats().failures == 0, "nothing failed");
}

void PlansThatDoNotSerializeAreBuilt() {
  jax_cudnn::build_count = 0;
  auto& store = jax_cudnn::PlanStore::Global();
  for (int round = 1; round <= 2; ++round) {
    PlanCache::Global().Clear();
    Expect(Get("not writable").ok(), "a plan");
    Expect(jax_cudnn::build_count == round, "built each time");
    Expect(store.stats().failures == round, "with a note");
  }
  Expect(store.stats().last_failure == "the plan  cannot be stored: not this engine",
         "of the reason");
}

// A stored plan that cuDNN does not take is built and replaced.
void SpoiledPlansAreReplaced() {
  auto& store = jax_cudnn::PlanStore::Global();
  const auto before = store.stats();
  PlanCache::Global().Clear();
  jax_cudnn::build_count = 0;
  Expect(Get("spoiled").ok(), "a plan");  // is written as it cannot be read
  PlanCache::Global().Clear();
  Expect(Get("spoiled").ok(), "a plan");
  Expect(jax_cudnn::build_count == 2, "built twice");
  const auto after = store.stats();
  Expect(after.hits == before.hits && after.failures == before.failures + 1, "no hit");
  Expect(after.last_failure == "cuDNN does not take a stored plan: spoiled", "reason");
  Expect(after.writes == before.writes + 2, "written anew");
}

void NoHandleIsUsedByTwoThreads(const jax_cudnn::CudnnRuntime& runtime) {
  auto& pool = jax_cudnn::HandlePool::Global();
  Expect(pool.Acquire(7).status().code() == StatusCode::kFailedPrecondition,
         "no handle without a reservation");
  Expect(pool.Reserve(runtime, 0).ok(), "a reservation");
  std::set<jax_cudnn::CudnnHandle> in_use;
  std::mutex mutex;
  InThreads([&](int) {
    for (int i = 0; i < 200; ++i) {
      if (i % 50 == 0) Expect(pool.Reserve(runtime, 0).ok(), "a reservation");
      const auto lease = pool.Acquire(0);
      Expect(lease.ok(), "a lease");
      {
        const std::scoped_lock lock(mutex);
        Expect(in_use.insert(lease->get()).second, "a handle of its own");
      }
      std::this_thread::yield();
      const std::scoped_lock lock(mutex);
      in_use.erase(lease->get());
    }
  });
}

void LinesReachOneSinkOrTheOther() {
  using jax_cudnn::LogLevel;
  using jax_cudnn::LogSource;
  std::atomic<int> lines{0};
  const auto make_sink = [&] {
    return std::make_shared<const jax_cudnn::LogSink>(
        [&](LogSource, LogLevel, const std::string& line) {
          Expect(line == "a line", "the line");
          ++lines;
        });
  };
  Expect(jax_cudnn::SetLogSink(make_sink(), LogLevel::kDebug).ok(), "a sink");
  InThreads([&](int thread) {
    for (int i = 0; i < 200; ++i) {
      if (thread == 0) {
        const auto old = jax_cudnn::SetLogSink(make_sink(), LogLevel::kDebug);
        Expect(old.ok() && old->use_count() == 1, "nobody uses the old sink");
        continue;
      }
      const jax_cudnn::DeferredLog deferred;
      jax_cudnn::Log(LogSource::kOurs, LogLevel::kDebug, "a line");
    }
  });
  Expect(lines == (kThreads - 1) * 200, "no line is lost");
  Expect(jax_cudnn::SetLogSink(nullptr, LogLevel::kDebug).ok(), "no sink");
  jax_cudnn::Log(LogSource::kOurs, LogLevel::kError, "another line");
  Expect(lines == (kThreads - 1) * 200, "nobody listens");
}

}  // namespace

int main(int argc, char** argv) {
  Expect(argc == 3, "usage: race LIBRARIES STORE");
  jax_cudnn::SetLibraryDirectories({argv[1]});
  const auto runtime = jax_cudnn::LoadCudnnRuntime();
  Expect(runtime.ok(), runtime.status().message().c_str());
  EachPlanIsBuiltOnce();
  RefusalsAreRememberedAndFailuresAreNot();
  PlansOutliveTheCache();
  DevicesAreKeptApart();
  PlansComeFromTheStore(argv[2]);
  PlansThatDoNotSerializeAreBuilt();
  SpoiledPlansAreReplaced();
  NoHandleIsUsedByTwoThreads(**runtime);
  LinesReachOneSinkOrTheOther();
  std::puts("done");
}
