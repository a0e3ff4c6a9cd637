// SPDX-License-Identifier: Apache-2.0
// Writing and reading the record of a plan, as JSON behind the size of its text.

#include "plans/plan_record.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/bytes.h"
#include "base/json_text.h"
#include "plans/plan.h"

namespace jax_cudnn {
namespace {

void WriteStrings(const std::vector<std::string>& strings, std::string& out) {
  out += '[';
  for (const std::string& each : strings) {
    if (out.back() != '[') out += ',';
    WriteJsonString(each, out);
  }
  out += ']';
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

}  // namespace

std::string WritePlanRecord(const Candidate& candidate,
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
  text += '}';
  std::string bytes;
  AppendInteger(text.size(), bytes);
  return bytes + text;
}

StatusOr<PlanRecord> TakePlanRecord(std::string_view& bytes) {
  uint64_t size = 0;
  if (!TakeInteger(bytes, size) || size > bytes.size()) {
    return InvalidArgument("plan: it ends early");
  }
  const std::string_view text = bytes.substr(0, size);
  bytes.remove_prefix(size);
  ASSIGN_OR_RETURN(const Json json, ParseJson(text, "plan"));
  ASSIGN_OR_RETURN(
      const auto fields,
      ReadFields(json, "plan",
                 {"behavior_notes", "build_ms", "engine", "failures", "knobs", "name",
                  "numeric_notes", "request", "variant", "workspace_bytes"}));
  PlanRecord record;
  Candidate& candidate = record.candidate;
  size_t i = 0;
  ASSIGN_OR_RETURN(candidate.behavior_notes, ReadStrings(*fields[i++], "plan.notes"));
  ASSIGN_OR_RETURN(candidate.build_ms, ReadNumber(*fields[i++], "plan.build_ms"));
  ASSIGN_OR_RETURN(candidate.engine, ReadInteger(*fields[i++], "plan.engine"));
  ASSIGN_OR_RETURN(record.failures, ReadStrings(*fields[i++], "plan.failures"));
  RETURN_IF_ERROR(ReadKnobs(*fields[i++], candidate.knobs));
  ASSIGN_OR_RETURN(candidate.name, ReadString(*fields[i++], "plan.name"));
  ASSIGN_OR_RETURN(candidate.numeric_notes, ReadStrings(*fields[i++], "plan.notes"));
  ASSIGN_OR_RETURN(candidate.request, ReadString(*fields[i++], "plan.request"));
  ASSIGN_OR_RETURN(const int64_t variant, ReadInteger(*fields[i++], "plan.variant"));
  candidate.variant = static_cast<int>(std::clamp<int64_t>(variant, 0, kMaxOperands));
  ASSIGN_OR_RETURN(candidate.workspace_bytes,
                   ReadInteger(*fields[i++], "plan.workspace_bytes"));
  candidate.is_built = true;
  return record;
}

}  // namespace jax_cudnn
