// SPDX-License-Identifier: Apache-2.0
// Plans as bytes: writing them down, and taking them up again.
//
// A number, the size of a JSON text; that text, what Candidate and the failures say;
// the frontend's bytes.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/guard.h"
#include "base/json_text.h"
#include "frontend/device_properties.h"
#include "frontend/frontend_status.h"
#include "plans/group_products.h"
#include "plans/launchable_graph.h"
#include "plans/plan.h"
#include "plans/rehearsal.h"

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;

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
  text += ",\"request\":";
  WriteJsonString(candidate.request, text);
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
                 {"behavior_notes", "build_ms", "engine", "failures", "knobs", "name",
                  "numeric_notes", "request", "variant", "workspace_bytes"}));
  size_t i = 0;
  ASSIGN_OR_RETURN(candidate.behavior_notes, ReadStrings(*fields[i++], "plan.notes"));
  ASSIGN_OR_RETURN(candidate.build_ms, ReadNumber(*fields[i++], "plan.build_ms"));
  ASSIGN_OR_RETURN(candidate.engine, ReadInteger(*fields[i++], "plan.engine"));
  ASSIGN_OR_RETURN(failures, ReadStrings(*fields[i++], "plan.failures"));
  RETURN_IF_ERROR(ReadKnobs(*fields[i++], candidate.knobs));
  ASSIGN_OR_RETURN(candidate.name, ReadString(*fields[i++], "plan.name"));
  ASSIGN_OR_RETURN(candidate.numeric_notes, ReadStrings(*fields[i++], "plan.notes"));
  ASSIGN_OR_RETURN(candidate.request, ReadString(*fields[i++], "plan.request"));
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
    ASSIGN_OR_RETURN(const std::string data, launchable_->Serialize());
    const std::string record = WriteRecord(candidate_, failures_);
    std::string bytes;
    AppendInteger(record.size(), bytes);
    return bytes.append(record).append(data);
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
    // It is made in no time, of matmuls that are not compiled.
    if (GroupProducts::Covers(graph)) return Build(graph, candidate.request, target);
    const std::vector<uint8_t> data(rest.begin(), rest.end());
    const auto frontend_graph = std::make_shared<FrontendGraph>();
    fe::error_t error;
    if (target.handle == nullptr) {
      ASSIGN_OR_RETURN(auto properties, ReadDeviceProperties(target.device_properties));
      frontend_graph->set_device_properties(std::move(properties));
      error = frontend_graph->deserialize(data, /*enforce_precompiled=*/true);
    } else {
      // No warm-up: it would launch on made-up pointers in a capture of its own.
      error = frontend_graph->deserialize(target.handle, data,
                                          /*enforce_precompiled=*/true,
                                          /*run_warmup=*/false);
    }
    if (error.is_bad()) return Internal(Message(error));
    int64_t workspace_bytes = 0;
    if (const auto asked = frontend_graph->get_workspace_size(workspace_bytes);
        asked.is_bad()) {
      return Internal(Message(asked));
    }
    // Some convolutions need less than they were written with (cuDNN 9.19, H200).
    if (workspace_bytes > candidate.workspace_bytes) {
      return Internal("the plan needs " + std::to_string(workspace_bytes) +
                      " bytes of workspace, and " +
                      std::to_string(candidate.workspace_bytes) +
                      " when it was written");
    }
    ASSIGN_OR_RETURN(auto launchable, LaunchableGraph::Make(graph, frontend_graph));
    std::shared_ptr<const Plan> plan(
        new Plan(std::move(launchable), std::move(candidate), std::move(failures)));
    RETURN_IF_ERROR(Rehearse(*plan, target));
    return plan;
  });
}

}  // namespace jax_cudnn
