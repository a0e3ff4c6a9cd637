// SPDX-License-Identifier: Apache-2.0
// Building the first candidate that will do, cuDNN's over all ways of writing the graph
// and then cuBLASLt's, and listing them.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "blas/blas_engines.h"
#include "candidates/attempt.h"
#include "candidates/launchable_graph.h"
#include "candidates/plan_request.h"
#include "cudnn/cudnn_library.h"
#include "frontend/frontend_status.h"
#include "groups/group_products.h"
#include "nodes/graph_builder.h"
#include "plans/causal_conv.h"
#include "plans/plan.h"
#include "plans/rehearsal.h"

namespace jax_cudnn {
namespace {

// The variants to try, in order.
StatusOr<std::vector<int>> Variants(const GraphSpec& spec, const PlanRequest& request) {
  const int count = VariantCount(spec);
  std::vector<int> variants;
  if (request.pin.has_value()) {
    const bool is_blas = request.pin->engine == kCublasLtEngine;
    const int64_t variant = request.pin->variant;
    if (variant < 0 || variant >= (is_blas ? 1 : count)) {
      return InvalidArgument("request.variant: " + std::to_string(variant) +
                             " is not one of the graph's " + std::to_string(count));
    }
    if (is_blas) return variants;
    return std::vector<int>{static_cast<int>(variant)};
  }
  for (int variant = 0; variant < count; ++variant) variants.push_back(variant);
  return variants;
}

// Collects reasons, each once, and makes the refusal of them.
class Reasons {
 public:
  void Add(const std::string& lines) {
    std::istringstream stream(lines);
    for (std::string reason; std::getline(stream, reason);) {
      if (std::find(reasons_.begin(), reasons_.end(), reason) == reasons_.end()) {
        reasons_.push_back(reason);
      }
    }
  }

  Status Refusal(const PlanTarget& target, const std::string& request) const {
    const CudnnRuntime* runtime = LoadedCudnnRuntime();
    std::string text =
        "cuDNN " + VersionText(runtime == nullptr ? 0 : runtime->cudnn.version) +
        " has no plan for this graph on sm_" + std::to_string(target.sm_version);
    if (!request.empty()) text += " with the request " + request;
    text += '.';
    for (const std::string& reason : reasons_) text += "\n  - " + reason;
    return Unimplemented(text);
  }

  const std::vector<std::string>& list() const { return reasons_; }

 private:
  std::vector<std::string> reasons_;
};

// What is wanted before a first candidate of this engine.
const std::vector<WantedPlan>* WantedBefore(const PlanRequest& request,
                                            int64_t engine) {
  for (const PlanPreference& each : request.preferences) {
    if (each.first_engine == engine) return &each.wanted;
  }
  return nullptr;
}

// The indices of an attempt's candidates in the order in which they are tried: cuDNN's
// own, after those that the request prefers.
std::vector<int64_t> IndicesInOrder(const Attempt& attempt,
                                    const PlanRequest& request) {
  std::vector<int64_t> indices = attempt.indices();
  if (request.preferences.empty()) return indices;
  const std::vector<WantedPlan>* wanted = nullptr;
  std::vector<int64_t> found;  // for each wanted one; -1 where it is not listed
  for (const int64_t index : indices) {
    const auto candidate = attempt.Describe(index);
    // Why is said where it is tried.
    if (!candidate.ok() || !candidate->refusal.empty()) continue;
    if (wanted == nullptr) {
      wanted = WantedBefore(request, candidate->engine);
      if (wanted == nullptr) return indices;
      found.assign(wanted->size(), -1);
    }
    for (size_t i = 0; i < found.size(); ++i) {
      const auto& [engine, knobs] = (*wanted)[i];
      if (found[i] >= 0 || engine != candidate->engine) continue;
      if (!knobs.has_value() || *knobs == candidate->knobs) found[i] = index;
    }
  }
  auto next = indices.begin();
  for (const int64_t index : found) {
    const auto old = std::find(next, indices.end(), index);
    if (old == indices.end()) continue;  // not listed, or wanted twice
    std::rotate(next, old, old + 1);
    ++next;
  }
  return indices;
}

// A candidate's maker.
class Source {
 public:
  virtual ~Source() = default;

  // Builds the candidate; a failure or a refusal is noted in it. Status is not OK where
  // the failure is not about this candidate.
  virtual Status Build(Candidate& candidate) = 0;

  // What launches the candidate that was built last.
  virtual StatusOr<std::unique_ptr<const Launchable>> MakeLaunchable(
      Candidate& candidate) = 0;
};

// One of cuDNN's.
class CudnnSource : public Source {
 public:
  CudnnSource(const GraphSpec& graph, const PlanTarget& target, Attempt& attempt,
              int64_t index)
      : graph_(graph), target_(target), attempt_(attempt), index_(index) {}

  Status Build(Candidate& candidate) override {
    return attempt_.Build(index_, candidate);
  }

  StatusOr<std::unique_ptr<const Launchable>> MakeLaunchable(
      Candidate& candidate) override {
    if (GroupProducts::Covers(graph_)) {
      ASSIGN_OR_RETURN(auto products, GroupProducts::Make(graph_, target_, candidate));
      return std::unique_ptr<const Launchable>(std::move(products));
    }
    // The plan is built already; this prepares its argument list.
    if (const auto error = attempt_.graph()->build_plans(); error.is_bad()) {
      return Internal(Message(error));
    }
    ASSIGN_OR_RETURN(auto launchable, LaunchableGraph::Make(graph_, attempt_.graph()));
    return std::unique_ptr<const Launchable>(std::move(launchable));
  }

 private:
  const GraphSpec& graph_;
  const PlanTarget& target_;
  Attempt& attempt_;
  int64_t index_;
};

// One of cuBLASLt's.
class BlasSource : public Source {
 public:
  BlasSource(const BlasEngine& engine, const GraphSpec& graph)
      : engine_(engine), graph_(graph) {}

  Status Build(Candidate& candidate) override {
    const auto start = std::chrono::steady_clock::now();
    auto made = engine_.make(graph_, candidate);
    candidate.build_ms = std::chrono::duration<double, std::milli>(
                             std::chrono::steady_clock::now() - start)
                             .count();
    candidate.is_built = made.ok();
    if (made.ok()) {
      made_ = std::move(*made);
      return {};
    }
    candidate.failure = made.status().message();
    const bool is_its_own = made.status().code() == StatusCode::kUnimplemented;
    return is_its_own ? Status() : made.status();
  }

  StatusOr<std::unique_ptr<const Launchable>> MakeLaunchable(
      Candidate& /*candidate*/) override {
    return std::move(made_);
  }

 private:
  const BlasEngine& engine_;
  const GraphSpec& graph_;
  std::unique_ptr<const Launchable> made_;
};

// Calls `visit` with each of cuBLASLt's candidates that the request leaves and `seen`
// has not, until it says true: enough, which is returned. What goes wrong is a reason:
// cuDNN and XLA are there.
template <typename Visit>
StatusOr<bool> VisitBlas(const BlasEngine& engine, const GraphSpec& graph,
                         const PlanRequest& request, const PlanTarget& target,
                         Reasons& reasons, std::set<std::string>& seen, Visit&& visit) {
  const auto candidates = engine.list(graph, request, target);
  if (!candidates.ok()) {
    reasons.Add("cuBLASLt: " + candidates.status().message());
    return false;
  }
  for (const Candidate& candidate : *candidates) {
    if (!seen.insert(candidate.request).second) continue;
    if (!candidate.refusal.empty()) {
      reasons.Add(candidate.name + ": " + candidate.refusal);
    }
    BlasSource source(engine, graph);
    ASSIGN_OR_RETURN(const bool is_enough, visit(source, candidate));
    if (is_enough) return true;
  }
  return false;
}

// cuDNN's function for a causal convolution.
class CausalConvSource : public Source {
 public:
  explicit CausalConvSource(const GraphSpec& graph) : graph_(graph) {}

  // There is nothing to build; whether it can be launched is rehearsed.
  Status Build(Candidate& candidate) override {
    candidate.is_built = true;
    return {};
  }

  StatusOr<std::unique_ptr<const Launchable>> MakeLaunchable(
      Candidate& /*candidate*/) override {
    ASSIGN_OR_RETURN(auto made, CausalConv::Make(graph_));
    return std::unique_ptr<const Launchable>(std::move(made));
  }

 private:
  const GraphSpec& graph_;
};

// Calls `visit` with the candidate for a causal convolution, or notes why there is
// none.
template <typename Visit>
Status VisitCausalConv(const GraphSpec& graph, const PlanRequest& request,
                       Reasons& reasons, Visit&& visit) {
  auto candidate = CausalConv::Describe(graph, request);
  if (!candidate.ok()) {
    reasons.Add(candidate.status().message());
    return {};
  }
  if (!candidate->refusal.empty()) {
    reasons.Add(candidate->name + ": " + candidate->refusal);
  }
  CausalConvSource source(graph);
  return visit(source, std::move(*candidate)).status();
}

// The requests for those of cuBLASLt's candidates that are wanted before cuDNN's.
std::vector<PlanRequest> WantedOfBlas(const PlanRequest& request) {
  std::vector<PlanRequest> found;
  const auto* wanted = WantedBefore(request, kCublasLtEngine);
  if (wanted == nullptr) return found;
  for (const WantedPlan& each : *wanted) {
    PlanRequest one;
    one.pin = PlanPin{kCublasLtEngine, each.knobs.value_or(Knobs()), 0, 0};
    found.push_back(std::move(one));
  }
  return found;
}

// Calls `visit` with each candidate of each variant and what makes it, until it says
// true: enough. Notes why a variant has none, and why a candidate is not allowed.
template <typename Visit>
Status VisitCandidates(const GraphSpec& graph, const std::string& request,
                       const PlanTarget& target, Reasons& reasons, Visit&& visit) {
  ASSIGN_OR_RETURN(const PlanRequest parsed, ParsePlanRequest(request));
  std::set<std::string> seen;  // of cuBLASLt's
  if (kBlasGroups.covers(graph)) {
    return VisitBlas(kBlasGroups, graph, parsed, target, reasons, seen, visit).status();
  }
  if (CausalConv::Covers(graph)) {
    return VisitCausalConv(graph, parsed, reasons, visit);
  }
  const bool is_of_groups = GroupProducts::Covers(graph);
  GraphSpec matmul;
  if (is_of_groups) {
    ASSIGN_OR_RETURN(matmul, GroupProducts::TypicalMatmul(graph));
  }
  const GraphSpec& asked = is_of_groups ? matmul : graph;
  ASSIGN_OR_RETURN(const std::vector<int> variants, Variants(asked, parsed));
  const bool is_blas = kBlasProduct.covers(graph);
  for (const PlanRequest& one : WantedOfBlas(parsed)) {
    if (!is_blas) break;
    ASSIGN_OR_RETURN(const bool is_enough,
                     VisitBlas(kBlasProduct, graph, one, target, reasons, seen, visit));
    if (is_enough) return {};
  }
  for (const int variant : variants) {
    auto attempt = Attempt::Make(asked, parsed, target, variant);
    if (!attempt.ok()) {
      if (attempt.status().code() != StatusCode::kUnimplemented) {
        return attempt.status();
      }
      reasons.Add(attempt.status().message());
      continue;
    }
    for (const int64_t i : IndicesInOrder(*attempt, parsed)) {
      ASSIGN_OR_RETURN(Candidate candidate, attempt->Describe(i));
      if (is_of_groups && candidate.refusal.empty()) {
        candidate.refusal = GroupProducts::RefusalOf(candidate);
      }
      if (!candidate.refusal.empty()) {
        reasons.Add(candidate.name + ": " + candidate.refusal);
      }
      CudnnSource source(graph, target, *attempt, i);
      ASSIGN_OR_RETURN(const bool is_enough, visit(source, std::move(candidate)));
      if (is_enough) return {};
    }
  }
  const bool is_pinned = parsed.pin && parsed.pin->engine == kCublasLtEngine;
  if (is_pinned && !is_blas) reasons.Add("cuBLASLt has no kernel for this graph");
  const bool is_described = target.handle == nullptr;
  if (!is_blas || (parsed.pin && !is_pinned) || (is_described && !is_pinned)) return {};
  return VisitBlas(kBlasProduct, graph, parsed, target, reasons, seen, visit).status();
}

}  // namespace

StatusOr<std::shared_ptr<const Plan>> Plan::Build(const GraphSpec& graph,
                                                  const std::string& request,
                                                  const PlanTarget& target) {
  ASSIGN_OR_RETURN(const PlanRequest parsed, ParsePlanRequest(request));
  Reasons reasons;
  std::shared_ptr<const Plan> plan;
  const auto build = [&](Source& source, Candidate candidate) -> StatusOr<bool> {
    if (!candidate.refusal.empty()) return false;
    RETURN_IF_ERROR(source.Build(candidate));
    if (!candidate.is_built) {
      reasons.Add(candidate.name + ": " + candidate.failure + candidate.refusal);
      return false;
    }
    auto launchable = source.MakeLaunchable(candidate);
    if (!launchable.ok()) {
      if (launchable.status().code() != StatusCode::kUnimplemented) {
        return launchable.status();
      }
      reasons.Add(candidate.name + ": " + launchable.status().message());
      return false;
    }
    // That of a product for each group is known by now.
    candidate.refusal = WorkspaceRefusal(parsed, candidate.workspace_bytes);
    if (!candidate.refusal.empty()) {
      reasons.Add(candidate.name + ": " + candidate.refusal);
      return false;
    }
    const std::string name = candidate.name;
    plan.reset(new Plan(std::move(*launchable), std::move(candidate), reasons.list()));
    const Status rehearsed = Rehearse(*plan, target);
    if (rehearsed.ok()) return true;
    if (rehearsed.code() != StatusCode::kUnimplemented) return rehearsed;
    reasons.Add(name + ": " + rehearsed.message());
    plan = nullptr;
    return false;
  };
  RETURN_IF_ERROR(VisitCandidates(graph, request, target, reasons, build));
  if (plan == nullptr) return reasons.Refusal(target, request);
  return plan;
}

StatusOr<std::vector<Candidate>> ListCandidates(const GraphSpec& graph,
                                                const std::string& request,
                                                const PlanTarget& target, bool build) {
  ASSIGN_OR_RETURN(const PlanRequest parsed, ParsePlanRequest(request));
  Reasons reasons;
  std::vector<Candidate> candidates;
  bool is_wanted = build;
  bool is_any_allowed = false;
  const auto collect = [&](Source& source, Candidate candidate) -> StatusOr<bool> {
    if (is_wanted && candidate.refusal.empty()) {
      RETURN_IF_ERROR(source.Build(candidate));
      if (candidate.is_built && GroupProducts::Covers(graph)) {
        const auto products = source.MakeLaunchable(candidate);
        if (products.ok()) {
          candidate.refusal = WorkspaceRefusal(parsed, candidate.workspace_bytes);
        } else if (products.status().code() == StatusCode::kUnimplemented) {
          candidate.failure = products.status().message();
        } else {
          return products.status();
        }
        candidate.is_built = candidate.failure.empty() && candidate.refusal.empty();
      }
      if (!candidate.refusal.empty()) {
        reasons.Add(candidate.name + ": " + candidate.refusal);
      }
    }
    if (candidate.is_built) is_wanted = false;
    if (candidate.refusal.empty()) is_any_allowed = true;
    candidates.push_back(std::move(candidate));
    return false;
  };
  RETURN_IF_ERROR(VisitCandidates(graph, request, target, reasons, collect));
  if (!is_any_allowed) return reasons.Refusal(target, request);
  return candidates;
}

}  // namespace jax_cudnn
