// SPDX-License-Identifier: Apache-2.0
// A plan: one engine with its knobs, built by cuDNN for one graph and one GPU.

#ifndef JAX_CUDNN_PLAN_H_
#define JAX_CUDNN_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "candidates/candidate.h"
#include "candidates/launchable.h"
#include "candidates/plan_target.h"
#include "cudnn/cudnn_library.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

// Immutable; executes on any handle of the device that it was built for, from several
// threads at once as long as each brings its own handle.
class Plan {
 public:
  // Builds the first of cuDNN's candidates that builds, that can be launched (known
  // where the target is a device, see rehearsal.h) and that `request` allows: its
  // text, see plan_request.h. UNIMPLEMENTED, with one line per reason, where
  // there is none.
  // The runtime must be loaded. Slow: up to seconds.
  static StatusOr<std::shared_ptr<const Plan>> Build(const GraphSpec& graph,
                                                     const std::string& request,
                                                     const PlanTarget& target);

  // A plan that Serialize wrote, for the same graph and kind of target, without asking
  // cuDNN's heuristics or compiling. The bytes hold code that will run: they must come
  // from someone trusted. INVALID_ARGUMENT where they are malformed.
  static StatusOr<std::shared_ptr<const Plan>> Deserialize(const GraphSpec& graph,
                                                           const std::string& bytes,
                                                           const PlanTarget& target);

  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Launches on `stream`, which is the handle's. The pointers are in the order of the
  // graph's inputs and outputs; `workspace` holds workspace_bytes() at 256-byte
  // alignment. Neither allocates nor waits, but for a plan that Waits().
  Status Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                 void* const* results, void* workspace) const;

  // Whether Execute waits for the device. If so, it cannot be captured.
  bool Waits() const { return launchable_->Waits(); }

  // The plan as bytes, with what candidate() and failures() say. UNIMPLEMENTED where
  // cuDNN cannot write this engine's plans.
  StatusOr<std::string> Serialize() const;

  const Candidate& candidate() const { return candidate_; }
  int64_t workspace_bytes() const { return candidate_.workspace_bytes; }
  // Why the candidates before this one did not build or are not allowed.
  const std::vector<std::string>& failures() const { return failures_; }

 private:
  Plan(std::unique_ptr<const Launchable> launchable, Candidate candidate,
       std::vector<std::string> failures);

  std::unique_ptr<const Launchable> launchable_;
  Candidate candidate_;
  std::vector<std::string> failures_;
};

// All candidates in cuDNN's order, with those that `request` does not allow marked by
// their refusal; UNIMPLEMENTED where it allows none. With `build`, tries the others in
// that order until one builds, as Plan::Build does; those after it are listed untried.
StatusOr<std::vector<Candidate>> ListCandidates(const GraphSpec& graph,
                                                const std::string& request,
                                                const PlanTarget& target, bool build);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLAN_H_
