// SPDX-License-Identifier: Apache-2.0
// Building plans with the cuDNN frontend, and launching them.

#include "plans/plan.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <sstream>
#include <string_view>
#include <unordered_map>

#include "base/guard.h"
#include "base/json_text.h"
#include "frontend/graph_builder.h"
#include "keeping/plan_file.h"
#include "plans/plan_request.h"
#include "plans/refusal.h"
#include "plans/rehearsal.h"

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;

// Where a pointer of cuDNN's argument list comes from.
struct PointerSource {
  bool is_result;
  size_t index;
};

// --- names of enumerators -----------------------------------------------------------

using Knob = fe::KnobType_t;

constexpr std::pair<Knob, std::string_view> kKnobNames[] = {
    {Knob::ARRAY_SIZE_PER_THREAD, "ARRAY_SIZE_PER_THREAD"},
    {Knob::BLOCK_SIZE, "BLOCK_SIZE"},
    {Knob::CTA_COUNT, "CTA_COUNT"},
    {Knob::EDGE, "EDGE"},
    {Knob::IDX_MODE, "IDX_MODE"},
    {Knob::INPUT_TMA_ENABLE, "INPUT_TMA_ENABLE"},
    {Knob::KERNEL_CFG, "KERNEL_CFG"},
    {Knob::LOAD_SIZE, "LOAD_SIZE"},
    {Knob::MULTIPLY, "MULTIPLY"},
    {Knob::OCCUPANCY, "OCCUPANCY"},
    {Knob::OUTPUT_TMA_ENABLE, "OUTPUT_TMA_ENABLE"},
    {Knob::REDUCTION_MODE, "REDUCTION_MODE"},
    {Knob::SPECFILT, "SPECFILT"},
    {Knob::SPLIT_COLS, "SPLIT_COLS"},
    {Knob::SPLIT_K_BUF, "SPLIT_K_BUF"},
    {Knob::SPLIT_K_SLC, "SPLIT_K_SLC"},
    {Knob::SPLIT_P_SLC, "SPLIT_P_SLC"},
    {Knob::STAGES, "STAGES"},
    {Knob::STREAM_K, "STREAM_K"},
    {Knob::SWAP_AB, "SWAP_AB"},
    {Knob::SWIZZLE, "SWIZZLE"},
    {Knob::TILEK, "TILEK"},
    {Knob::TILE_CGA, "TILE_CGA"},
    {Knob::TILE_CGA_M, "TILE_CGA_M"},
    {Knob::TILE_CGA_N, "TILE_CGA_N"},
    {Knob::TILE_COLS, "TILE_COLS"},
    {Knob::TILE_M, "TILE_M"},
    {Knob::TILE_N, "TILE_N"},
    {Knob::TILE_ROWS, "TILE_ROWS"},
    {Knob::TILE_SIZE, "TILE_SIZE"},
    {Knob::WARP_SPEC_CFG, "WARP_SPEC_CFG"},
    {Knob::WORKSPACE, "WORKSPACE"},
};
// A knob newer than the frontend: such a candidate cannot be pinned.
constexpr std::string_view kUnknownKnob = "UNKNOWN";

std::string_view KnobName(Knob knob) {
  for (const auto& [value, name] : kKnobNames) {
    if (value == knob) return name;
  }
  return kUnknownKnob;
}

std::string NoteName(fe::BehaviorNote_t note) {
  switch (note) {
    case fe::BehaviorNote_t::NOT_SET:
      return "";
    case fe::BehaviorNote_t::RUNTIME_COMPILATION:
      return "RUNTIME_COMPILATION";
    case fe::BehaviorNote_t::REQUIRES_FILTER_INT8x32_REORDER:
      return "REQUIRES_FILTER_INT8x32_REORDER";
    case fe::BehaviorNote_t::REQUIRES_BIAS_INT8x32_REORDER:
      return "REQUIRES_BIAS_INT8x32_REORDER";
    case fe::BehaviorNote_t::SUPPORTS_CUDA_GRAPH_NATIVE_API:
      return "SUPPORTS_CUDA_GRAPH_NATIVE_API";
    case fe::BehaviorNote_t::CUBLASLT_DEPENDENCY:
      return "CUBLASLT_DEPENDENCY";
  }
  return "";
}

std::string NoteName(fe::NumericalNote_t note) {
  switch (note) {
    case fe::NumericalNote_t::NOT_SET:
      return "";
    case fe::NumericalNote_t::TENSOR_CORE:
      return "TENSOR_CORE";
    case fe::NumericalNote_t::DOWN_CONVERT_INPUTS:
      return "DOWN_CONVERT_INPUTS";
    case fe::NumericalNote_t::REDUCED_PRECISION_REDUCTION:
      return "REDUCED_PRECISION_REDUCTION";
    case fe::NumericalNote_t::FFT:
      return "FFT";
    case fe::NumericalNote_t::NONDETERMINISTIC:
      return "NONDETERMINISTIC";
    case fe::NumericalNote_t::WINOGRAD:
      return "WINOGRAD";
    case fe::NumericalNote_t::WINOGRAD_TILE_4x4:
      return "WINOGRAD_TILE_4x4";
    case fe::NumericalNote_t::WINOGRAD_TILE_6x6:
      return "WINOGRAD_TILE_6x6";
    case fe::NumericalNote_t::WINOGRAD_TILE_13x13:
      return "WINOGRAD_TILE_13x13";
    case fe::NumericalNote_t::STRICT_NAN_PROP:
      return "STRICT_NAN_PROP";
  }
  return "";
}

template <typename Note>
std::vector<std::string> NoteNames(const std::vector<Note>& notes) {
  std::vector<std::string> names;
  for (const Note note : notes) {
    // The frontend's lists contain entries that were never set.
    std::string name = NoteName(note);
    if (!name.empty()) names.push_back(std::move(name));
  }
  return names;
}

// --- errors -------------------------------------------------------------------------

// By value: the frontend's accessor is not const.
std::string Message(fe::error_t error) { return OneLine(error.get_message()); }

bool Mentions(const std::string& text, const char* words) {
  return text.find(words) != std::string::npos;
}

// While planning, a refusal by cuDNN is an answer about the graph unless its words say
// that a library or memory is missing. One line of the message per reason.
Status PlanningStatus(fe::error_t error) {
  const std::string text = error.get_message();
  // The frontend's own words begin so when it cannot open or search a library.
  if (Mentions(text, "SUBLIBRARY_LOADING_FAILED") || Mentions(text, "Unable to ")) {
    return FailedPrecondition(OneLine(text));
  }
  if (Mentions(text, "ALLOC_FAILED")) return ResourceExhausted(OneLine(text));
  std::string lines;
  for (const std::string& reason : RefusalReasons(text)) {
    if (!lines.empty()) lines += '\n';
    lines += reason;
  }
  return Unimplemented(lines);
}

Status ExecutionStatus(const fe::error_t& error) {
  const std::string text = "cuDNN failed to launch: " + Message(error);
  if (Mentions(text, "ALLOC_FAILED")) return ResourceExhausted(text);
  return Internal(text);
}

// --- requests -----------------------------------------------------------------------

StatusOr<std::unordered_map<Knob, int64_t>> FrontendKnobs(const PlanPin& pin) {
  std::unordered_map<Knob, int64_t> knobs;
  for (const auto& [name, value] : pin.knobs) {
    const auto* known =
        std::find_if(std::begin(kKnobNames), std::end(kKnobNames),
                     [&name = name](const auto& each) { return each.second == name; });
    if (known == std::end(kKnobNames)) {
      return InvalidArgument("choice.knobs." + name + ": unknown knob");
    }
    knobs[known->first] = value;
  }
  return knobs;
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

// The text that asks for this candidate again, or nothing where it cannot be named.
std::string PinText(const Candidate& candidate, bool deterministic) {
  for (const auto& [name, value] : candidate.knobs) {
    if (name == kUnknownKnob) return "";
  }
  PlanRequest request;
  request.deterministic = deterministic;
  request.pin = PlanPin{candidate.engine, candidate.knobs, candidate.variant};
  return WritePlanRequest(request);
}

// --- one variant of the graph, with its list of candidates --------------------------

StatusOr<std::shared_ptr<const fe::DeviceProperties>> ReadDeviceProperties(
    const std::string& text) {
  auto properties = std::make_shared<fe::DeviceProperties>();
  if (const auto error =
          properties->deserialize(std::vector<uint8_t>(text.begin(), text.end()));
      error.is_bad()) {
    return InvalidArgument("cuDNN cannot use these device properties: " +
                           Message(error));
  }
  return std::shared_ptr<const fe::DeviceProperties>(std::move(properties));
}

class Attempt {
 public:
  // Writes the graph and asks cuDNN for its candidates.
  static StatusOr<Attempt> Make(const GraphSpec& spec, const PlanRequest& request,
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
    Attempt attempt;
    attempt.request_ = request;
    attempt.variant_ = variant;
    ASSIGN_OR_RETURN(attempt.graph_, BuildFrontendGraph(spec, style));
    RETURN_IF_ERROR(attempt.QueryCandidates(target));
    return attempt;
  }

  int64_t count() const { return graph_->get_execution_plan_count(); }

  // A candidate, and why the request does not allow it, as far as that can be known
  // before it is built.
  StatusOr<Candidate> Describe(int64_t index) const {
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
    candidate.choice = PinText(candidate, request_.deterministic);
    candidate.behavior_notes = NoteNames(behavior);
    candidate.numeric_notes = NoteNames(graph_->numeric_notes(index));
    std::vector<std::string> notes = candidate.behavior_notes;
    notes.insert(notes.end(), candidate.numeric_notes.begin(),
                 candidate.numeric_notes.end());
    candidate.refusal = RefusalOf(request_, candidate.engine, notes);
    if (const auto limit = request_.workspace_limit_bytes;
        limit.has_value() && candidate.refusal.empty()) {
      const auto bytes = graph_->WorkspaceAbove(*limit, index);
      if (bytes.has_value()) candidate.refusal = WorkspaceRefusal(request_, *bytes);
    }
    return candidate;
  }

  // Builds one candidate; a failure or a refusal is noted in it. Status is not OK where
  // the failure is not about this candidate.
  Status Build(int64_t index, Candidate& candidate) {
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

  // The plan that was built last is that of the graph, until another one is.
  std::shared_ptr<FrontendGraph> graph() const { return graph_; }

 private:
  Status QueryCandidates(const PlanTarget& target) {
    if (const auto error = graph_->validate(); error.is_bad()) {
      return PlanningStatus(error);
    }
    const auto lowered = target.handle == nullptr
                             ? graph_->build_operation_graph()
                             : graph_->build_operation_graph(target.handle);
    if (lowered.is_bad()) return PlanningStatus(lowered);
    if (request_.pin.has_value()) {
      ASSIGN_OR_RETURN(const auto knobs, FrontendKnobs(*request_.pin));
      const auto listed = graph_->create_execution_plan(request_.pin->engine, knobs);
      return listed.is_bad() ? PlanningStatus(listed) : Status();
    }
    const auto listed = graph_->create_execution_plans(FrontendModes(request_.modes));
    return listed.is_bad() ? PlanningStatus(listed) : Status();
  }

  std::shared_ptr<FrontendGraph> graph_;
  PlanRequest request_;
  int variant_ = 0;
};

// The variants to try, in order.
StatusOr<std::vector<int>> Variants(const GraphSpec& spec, const PlanRequest& request) {
  const int count = VariantCount(spec);
  std::vector<int> variants;
  if (request.pin.has_value()) {
    const int64_t variant = request.pin->variant;
    if (variant < 0 || variant >= count) {
      return InvalidArgument("choice.variant: " + std::to_string(variant) +
                             " is not one of the graph's " + std::to_string(count));
    }
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

  Status Refusal(const PlanTarget& target, const std::string& choice) const {
    const CudnnRuntime* runtime = LoadedCudnnRuntime();
    std::string text =
        "cuDNN " + VersionText(runtime == nullptr ? 0 : runtime->cudnn.version) +
        " has no plan for this graph on sm_" + std::to_string(target.sm_version);
    if (!choice.empty()) text += " with the choice " + choice;
    text += '.';
    for (const std::string& reason : reasons_) text += "\n  - " + reason;
    return Unimplemented(text);
  }

  const std::vector<std::string>& list() const { return reasons_; }

 private:
  std::vector<std::string> reasons_;
};

}  // namespace

struct Plan::Built {
  std::shared_ptr<FrontendGraph> graph;
  // In the order of cuDNN's argument list.
  std::vector<PointerSource> sources;
};

Plan::Plan(std::unique_ptr<Built> built, Candidate candidate,
           std::vector<std::string> failures)
    : built_(std::move(built)),
      candidate_(std::move(candidate)),
      failures_(std::move(failures)) {}

Plan::~Plan() = default;

namespace {

// Matches cuDNN's argument list with the graph's operands and results.
StatusOr<std::vector<PointerSource>> FindSources(const GraphSpec& spec,
                                                 const FrontendGraph& graph) {
  std::unordered_map<int64_t, PointerSource> by_uid;
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    by_uid[TensorUid(spec, spec.inputs[i])] = {false, i};
  }
  for (size_t i = 0; i < spec.outputs.size(); ++i) {
    by_uid[TensorUid(spec, spec.outputs[i])] = {true, i};
  }
  std::vector<PointerSource> sources;
  size_t results = 0;
  for (const int64_t uid : graph.get_variant_pack_uids_sorted()) {
    const auto found = by_uid.find(uid);
    if (found == by_uid.end()) {
      return Internal("cuDNN wants a pointer for tensor id " + std::to_string(uid) +
                      ", which is neither an operand nor a result");
    }
    results += found->second.is_result ? 1 : 0;
    sources.push_back(found->second);
  }
  if (results != spec.outputs.size() || sources.size() > kMaxOperands) {
    return Internal("cuDNN's plan takes " + std::to_string(sources.size()) +
                    " tensors and writes " + std::to_string(results) + " of the " +
                    std::to_string(spec.outputs.size()) + " results");
  }
  return sources;
}

// A device that is only described launches nothing.
Status RehearseFor(const PlanTarget& target, const Plan& plan) {
  if (target.handle == nullptr) return {};
  return Rehearse(plan, *LoadedCudnnRuntime(), target.handle);
}

// Calls `visit` with each candidate of each variant, with its attempt and its place
// there, until it says true: enough. Notes why a variant has none, and why a candidate
// is not allowed.
template <typename Visit>
Status VisitCandidates(const GraphSpec& graph, const std::string& choice,
                       const PlanTarget& target, Reasons& reasons, Visit&& visit) {
  ASSIGN_OR_RETURN(const PlanRequest request, ParsePlanRequest(choice));
  ASSIGN_OR_RETURN(const std::vector<int> variants, Variants(graph, request));
  for (const int variant : variants) {
    auto attempt = Attempt::Make(graph, request, target, variant);
    if (!attempt.ok()) {
      if (attempt.status().code() != StatusCode::kUnimplemented) {
        return attempt.status();
      }
      reasons.Add(attempt.status().message());
      continue;
    }
    for (int64_t i = 0; i < attempt->count(); ++i) {
      ASSIGN_OR_RETURN(Candidate candidate, attempt->Describe(i));
      if (!candidate.refusal.empty()) {
        reasons.Add(candidate.name + ": " + candidate.refusal);
      }
      ASSIGN_OR_RETURN(const bool is_enough, visit(*attempt, i, std::move(candidate)));
      if (is_enough) return {};
    }
  }
  return {};
}

}  // namespace

StatusOr<std::shared_ptr<const Plan>> Plan::Build(const GraphSpec& graph,
                                                  const std::string& choice,
                                                  const PlanTarget& target) {
  Reasons reasons;
  std::shared_ptr<const Plan> plan;
  const auto build = [&](Attempt& attempt, int64_t index,
                         Candidate candidate) -> StatusOr<bool> {
    if (!candidate.refusal.empty()) return false;
    RETURN_IF_ERROR(attempt.Build(index, candidate));
    if (!candidate.is_built) {
      reasons.Add(candidate.name + ": " + candidate.failure + candidate.refusal);
      return false;
    }
    auto built = std::make_unique<Built>();
    built->graph = attempt.graph();
    // The plan is built already; this prepares its argument list.
    if (const auto error = built->graph->build_plans(); error.is_bad()) {
      return Internal(Message(error));
    }
    ASSIGN_OR_RETURN(built->sources, FindSources(graph, *built->graph));
    const std::string name = candidate.name;
    plan.reset(new Plan(std::move(built), std::move(candidate), reasons.list()));
    const Status rehearsed = RehearseFor(target, *plan);
    if (rehearsed.ok()) return true;
    if (rehearsed.code() != StatusCode::kUnimplemented) return rehearsed;
    reasons.Add(name + ": " + rehearsed.message());
    plan = nullptr;
    return false;
  };
  RETURN_IF_ERROR(VisitCandidates(graph, choice, target, reasons, build));
  if (plan == nullptr) return reasons.Refusal(target, choice);
  return plan;
}

Status Plan::Execute(CudnnHandle handle, void* const* operands, void* const* results,
                     void* workspace) const {
  std::array<void*, kMaxOperands> pointers;
  const auto& sources = built_->sources;
  for (size_t i = 0; i < sources.size(); ++i) {
    pointers[i] = (sources[i].is_result ? results : operands)[sources[i].index];
  }
  const auto error = built_->graph->execute(
      handle, pointers.data(), static_cast<int>(sources.size()), workspace);
  return error.is_good() ? Status() : ExecutionStatus(error);
}

StatusOr<std::vector<Candidate>> ListCandidates(const GraphSpec& graph,
                                                const std::string& choice,
                                                const PlanTarget& target, bool build) {
  Reasons reasons;
  std::vector<Candidate> candidates;
  bool is_wanted = build;
  bool is_any_allowed = false;
  const auto collect = [&](Attempt& attempt, int64_t index,
                           Candidate candidate) -> StatusOr<bool> {
    if (is_wanted && candidate.refusal.empty()) {
      RETURN_IF_ERROR(attempt.Build(index, candidate));
      if (!candidate.refusal.empty()) {
        reasons.Add(candidate.name + ": " + candidate.refusal);
      }
    }
    if (candidate.is_built) is_wanted = false;
    if (candidate.refusal.empty()) is_any_allowed = true;
    candidates.push_back(std::move(candidate));
    return false;
  };
  RETURN_IF_ERROR(VisitCandidates(graph, choice, target, reasons, collect));
  if (!is_any_allowed) return reasons.Refusal(target, choice);
  return candidates;
}

StatusOr<std::string> DescribeDevice(int device) {
  fe::DeviceProperties properties;
  properties.set_device_id(device);
  std::vector<uint8_t> bytes;
  for (const auto& step : {properties.build(), properties.serialize(bytes)}) {
    if (step.is_bad()) {
      return Internal("cuDNN cannot describe device " + std::to_string(device) + ": " +
                      Message(step));
    }
  }
  std::string text(bytes.begin(), bytes.end());
  text.resize(std::min(text.size(), text.find('\0')));
  return text;
}

std::string FrontendVersion() {
  return std::to_string(CUDNN_FRONTEND_MAJOR_VERSION) + "." +
         std::to_string(CUDNN_FRONTEND_MINOR_VERSION) + "." +
         std::to_string(CUDNN_FRONTEND_PATCH_VERSION);
}

int CudnnHeaderVersion() { return CUDNN_VERSION; }

// --- plans as bytes -----------------------------------------------------------------
//
// A number, the size of a JSON text; that text, what Candidate and the failures say;
// the frontend's bytes.

namespace {

void WriteStrings(const std::vector<std::string>& strings, std::string& out) {
  out += '[';
  for (const std::string& each : strings) {
    if (out.back() != '[') out += ',';
    WriteJsonString(each, out);
  }
  out += ']';
}

std::string WriteRecord(const Candidate& candidate,
                        const std::vector<std::string>& failures) {
  std::string text = "{\"behavior_notes\":";
  WriteStrings(candidate.behavior_notes, text);
  text += ",\"build_ms\":";
  WriteJsonNumber(candidate.build_ms, text);
  text += ",\"choice\":";
  WriteJsonString(candidate.choice, text);
  text += ",\"engine\":" + std::to_string(candidate.engine) + ",\"failures\":";
  WriteStrings(failures, text);
  // Pairs, since knobs without a name of their own may be several.
  text += ",\"knobs\":[";
  for (const auto& [name, value] : candidate.knobs) {
    if (text.back() != '[') text += ',';
    text += '[';
    WriteJsonString(name, text);
    text += ',' + std::to_string(value) + ']';
  }
  text += "],\"name\":";
  WriteJsonString(candidate.name, text);
  text += ",\"numeric_notes\":";
  WriteStrings(candidate.numeric_notes, text);
  text += ",\"variant\":" + std::to_string(candidate.variant);
  text += ",\"workspace_bytes\":" + std::to_string(candidate.workspace_bytes);
  return text + '}';
}

Status ReadKnobs(const Json& json,
                 std::vector<std::pair<std::string, int64_t>>& knobs) {
  ASSIGN_OR_RETURN(const JsonList* pairs, ReadList(json, "plan.knobs"));
  for (const Json& each : *pairs) {
    ASSIGN_OR_RETURN(const JsonList* pair, ReadList(each, "plan.knobs"));
    if (pair->size() != 2) return InvalidArgument("plan.knobs: not a pair");
    ASSIGN_OR_RETURN(std::string name, ReadString((*pair)[0], "plan.knobs"));
    ASSIGN_OR_RETURN(const int64_t value, ReadInteger((*pair)[1], "plan.knobs"));
    knobs.emplace_back(std::move(name), value);
  }
  return {};
}

Status ReadRecord(std::string_view text, Candidate& candidate,
                  std::vector<std::string>& failures) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(text, "plan"));
  ASSIGN_OR_RETURN(
      const auto fields,
      ReadFields(json, "plan",
                 {"behavior_notes", "build_ms", "choice", "engine", "failures", "knobs",
                  "name", "numeric_notes", "variant", "workspace_bytes"}));
  size_t i = 0;
  ASSIGN_OR_RETURN(candidate.behavior_notes, ReadStrings(*fields[i++], "plan.notes"));
  ASSIGN_OR_RETURN(candidate.build_ms, ReadNumber(*fields[i++], "plan.build_ms"));
  ASSIGN_OR_RETURN(candidate.choice, ReadString(*fields[i++], "plan.choice"));
  ASSIGN_OR_RETURN(candidate.engine, ReadInteger(*fields[i++], "plan.engine"));
  ASSIGN_OR_RETURN(failures, ReadStrings(*fields[i++], "plan.failures"));
  RETURN_IF_ERROR(ReadKnobs(*fields[i++], candidate.knobs));
  ASSIGN_OR_RETURN(candidate.name, ReadString(*fields[i++], "plan.name"));
  ASSIGN_OR_RETURN(candidate.numeric_notes, ReadStrings(*fields[i++], "plan.notes"));
  ASSIGN_OR_RETURN(const int64_t variant, ReadInteger(*fields[i++], "plan.variant"));
  candidate.variant = static_cast<int>(std::clamp<int64_t>(variant, 0, kMaxOperands));
  ASSIGN_OR_RETURN(candidate.workspace_bytes,
                   ReadInteger(*fields[i++], "plan.workspace_bytes"));
  candidate.is_built = true;
  return {};
}

}  // namespace

StatusOr<std::string> Plan::Serialize() const {
  return Guard("writing a plan", [&]() -> StatusOr<std::string> {
    std::vector<uint8_t> data;
    try {
      // This overload, of vectors of uint8_t, writes plans; another one writes graphs.
      const auto error = built_->graph->serialize(data, /*serialize_structure=*/false);
      if (error.is_bad()) return Unimplemented(Message(error));
    } catch (const fe::cudnnException& error) {
      return Unimplemented(OneLine(error.what()));
    }
    const std::string record = WriteRecord(candidate_, failures_);
    std::string bytes;
    AppendInteger(record.size(), bytes);
    bytes.append(record).append(data.begin(), data.end());
    return bytes;
  });
}

StatusOr<std::shared_ptr<const Plan>> Plan::Deserialize(const GraphSpec& graph,
                                                        const std::string& bytes,
                                                        const PlanTarget& target) {
  using Result = StatusOr<std::shared_ptr<const Plan>>;
  return Guard("reading a plan", [&]() -> Result {
    std::string_view rest = bytes;
    uint64_t size = 0;
    if (!TakeInteger(rest, size) || size > rest.size()) {
      return InvalidArgument("plan: it ends early");
    }
    Candidate candidate;
    std::vector<std::string> failures;
    RETURN_IF_ERROR(ReadRecord(rest.substr(0, size), candidate, failures));
    rest.remove_prefix(size);
    const std::vector<uint8_t> data(rest.begin(), rest.end());
    auto built = std::make_unique<Built>();
    built->graph = std::make_shared<FrontendGraph>();
    fe::error_t error;
    if (target.handle == nullptr) {
      ASSIGN_OR_RETURN(auto properties, ReadDeviceProperties(target.device_properties));
      built->graph->set_device_properties(std::move(properties));
      error = built->graph->deserialize(data, /*enforce_precompiled=*/true);
    } else {
      // No warm-up: it would launch on made-up pointers in a capture of its own.
      error = built->graph->deserialize(target.handle, data,
                                        /*enforce_precompiled=*/true,
                                        /*run_warmup=*/false);
    }
    if (error.is_bad()) return Internal(Message(error));
    int64_t workspace_bytes = 0;
    if (const auto asked = built->graph->get_workspace_size(workspace_bytes);
        asked.is_bad()) {
      return Internal(Message(asked));
    }
    if (workspace_bytes != candidate.workspace_bytes) {
      return Internal("the plan needs " + std::to_string(workspace_bytes) +
                      " bytes of workspace, and " +
                      std::to_string(candidate.workspace_bytes) +
                      " when it was written");
    }
    ASSIGN_OR_RETURN(built->sources, FindSources(graph, *built->graph));
    std::shared_ptr<const Plan> plan(
        new Plan(std::move(built), std::move(candidate), std::move(failures)));
    RETURN_IF_ERROR(RehearseFor(target, *plan));
    return plan;
  });
}

}  // namespace jax_cudnn
