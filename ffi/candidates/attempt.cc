// SPDX-License-Identifier: Apache-2.0
// Asking cuDNN for candidates, describing them and building them.

#include "candidates/attempt.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "candidates/faulty_engines.h"
#include "frontend/device_properties.h"
#include "frontend/engine_names.h"
#include "frontend/frontend_status.h"
#include "frontend/refusal.h"
#include "nodes/graph_builder.h"

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;
using Knob = fe::KnobType_t;

constexpr int64_t kNoEngine = -1;

StatusOr<std::unordered_map<Knob, int64_t>> FrontendKnobs(const Knobs& knobs) {
  std::unordered_map<Knob, int64_t> found;
  for (const auto& [name, value] : knobs) {
    const auto knob = FindKnob(name);
    if (!knob.has_value()) {
      return InvalidArgument("request.knobs." + name + ": unknown knob");
    }
    found[*knob] = value;
  }
  return found;
}

std::vector<fe::HeurMode_t> FrontendModes(const std::vector<HeuristicMode>& modes) {
  std::vector<fe::HeurMode_t> result;
  for (const HeuristicMode mode : modes) {
    switch (mode) {
      case HeuristicMode::kA:
        result.push_back(fe::HeurMode_t::A);
        break;
      case HeuristicMode::kB:
        result.push_back(fe::HeurMode_t::B);
        break;
      case HeuristicMode::kFallback:
        result.push_back(fe::HeurMode_t::FALLBACK);
        break;
    }
  }
  return result;
}

std::vector<std::string> NotesOf(const Candidate& candidate) {
  std::vector<std::string> notes = candidate.behavior_notes;
  notes.insert(notes.end(), candidate.numeric_notes.begin(),
               candidate.numeric_notes.end());
  return notes;
}

}  // namespace

StatusOr<Attempt> Attempt::Make(const GraphSpec& spec, const PlanRequest& request,
                                const PlanTarget& target, int variant) {
  GraphStyle style;
  style.deterministic = request.deterministic;
  style.sm_version = target.sm_version;
  style.variant = variant;
  if (target.handle == nullptr) {
    style.sm_count = target.sm_count;
    ASSIGN_OR_RETURN(style.device_properties,
                     ReadDeviceProperties(target.device_properties));
  }
  Attempt attempt(spec);
  attempt.request_ = request;
  attempt.variant_ = variant;
  ASSIGN_OR_RETURN(attempt.graph_, BuildFrontendGraph(spec, style));
  RETURN_IF_ERROR(attempt.QueryCandidates(target));
  RETURN_IF_ERROR(attempt.ListIndices());
  return attempt;
}

StatusOr<Candidate> Attempt::Describe(int64_t index) const {
  ASSIGN_OR_RETURN(Candidate candidate, Listed(index));
  candidate.request = PinText(candidate, index);
  candidate.refusal = FaultOf(*spec_, candidate.engine);
  if (candidate.refusal.empty()) {
    candidate.refusal = RefusalOf(request_, candidate.engine, NotesOf(candidate));
  }
  if (const auto limit = request_.workspace_limit_bytes;
      limit.has_value() && candidate.refusal.empty()) {
    const auto bytes = graph_->WorkspaceAbove(*limit, index);
    if (bytes.has_value()) candidate.refusal = WorkspaceRefusal(request_, *bytes);
  }
  return candidate;
}

std::string Attempt::PinText(const Candidate& candidate, int64_t index) const {
  PlanRequest request;
  const bool is_listed_so = request_.modes == request.modes;
  request.deterministic = request_.deterministic;
  request.pin = PlanPin{candidate.engine, candidate.knobs, 0, candidate.variant};
  if (HasUnknownKnob(candidate.knobs)) {
    if (!is_listed_so) return {};
    request.pin->knobs.reset();
    request.pin->nth = nth_of_engine_[index];
  }
  return WritePlanRequest(request);
}

Status Attempt::ListIndices() {
  const std::optional<PlanPin>& pin = request_.pin;
  const bool is_by_index = pin.has_value() && !pin->knobs.has_value();
  std::unordered_map<int64_t, int64_t> listed;  // of each engine
  for (int64_t index = 0; index < graph_->get_execution_plan_count(); ++index) {
    int64_t engine = 0;
    std::unordered_map<Knob, int64_t> knobs;
    // What has no engine to ask for is described when it comes to it.
    if (graph_->get_engine_and_knobs_at_index(index, engine, knobs).is_bad()) {
      engine = kNoEngine;
    }
    nth_of_engine_.push_back(listed[engine]++);
    const bool is_asked_for =
        !is_by_index || (engine == pin->engine && nth_of_engine_.back() == pin->nth);
    if (is_asked_for) indices_.push_back(index);
  }
  if (!pin.has_value() || !indices_.empty()) return {};
  return Unimplemented("engine " + std::to_string(pin->engine) + " has " +
                       std::to_string(listed[pin->engine]) + " candidates, and nth, " +
                       "which counts from 0, is " + std::to_string(pin->nth));
}

StatusOr<Candidate> Attempt::Listed(int64_t index) const {
  Candidate candidate;
  candidate.variant = variant_;
  std::unordered_map<Knob, int64_t> knobs;
  std::vector<fe::BehaviorNote_t> behavior;
  for (const auto& error : {
           graph_->get_plan_name_at_index(index, candidate.name),
           graph_->get_engine_and_knobs_at_index(index, candidate.engine, knobs),
           graph_->get_behavior_notes_for_plan_at_index(index, behavior),
       }) {
    if (error.is_bad()) return Internal(Message(error));
  }
  for (const auto& [knob, value] : knobs) {
    candidate.knobs.emplace_back(KnobName(knob), value);
  }
  std::sort(candidate.knobs.begin(), candidate.knobs.end());
  candidate.behavior_notes = NoteNames(behavior);
  candidate.numeric_notes = NoteNames(graph_->numeric_notes(index));
  return candidate;
}

Status Attempt::Build(int64_t index, Candidate& candidate) {
  const auto start = std::chrono::steady_clock::now();
  const auto error = graph_->build_plan_at_index(index);
  candidate.build_ms = std::chrono::duration<double, std::milli>(
                           std::chrono::steady_clock::now() - start)
                           .count();
  if (error.is_bad()) {
    const Status status = PlanningStatus(error);
    candidate.failure = OneLine(status.message());
    return status.code() == StatusCode::kUnimplemented ? Status() : status;
  }
  int64_t bytes = 0;
  if (const auto size = graph_->get_workspace_size_plan_at_index(index, bytes);
      size.is_bad()) {
    return Internal(Message(size));
  }
  candidate.workspace_bytes = bytes;
  candidate.refusal = WorkspaceRefusal(request_, bytes);
  candidate.is_built = candidate.refusal.empty();
  return {};
}

Status Attempt::QueryCandidates(const PlanTarget& target) {
  if (const auto error = graph_->validate(); error.is_bad()) {
    return PlanningStatus(error);
  }
  const auto lowered = target.handle == nullptr
                           ? graph_->build_operation_graph()
                           : graph_->build_operation_graph(target.handle);
  if (lowered.is_bad()) return PlanningStatus(lowered);
  if (request_.pin.has_value() && request_.pin->knobs.has_value()) {
    ASSIGN_OR_RETURN(const auto knobs, FrontendKnobs(*request_.pin->knobs));
    const auto listed = graph_->create_execution_plan(request_.pin->engine, knobs);
    return listed.is_bad() ? PlanningStatus(listed) : Status();
  }
  const auto listed = graph_->create_execution_plans(FrontendModes(request_.modes));
  return listed.is_bad() ? PlanningStatus(listed) : Status();
}

}  // namespace jax_cudnn
