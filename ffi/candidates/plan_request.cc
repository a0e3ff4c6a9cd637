// SPDX-License-Identifier: Apache-2.0
// Reading, writing and applying plan requests.

#include "candidates/plan_request.h"

#include <algorithm>
#include <iterator>

#include "base/json_text.h"

namespace jax_cudnn {
namespace {

constexpr std::pair<HeuristicMode, std::string_view> kModeNames[] = {
    {HeuristicMode::kA, "A"},
    {HeuristicMode::kB, "B"},
    {HeuristicMode::kFallback, "FALLBACK"},
};

// The names that engine_names.cc gives to the frontend's enumerators.
constexpr std::string_view kNoteNames[] = {
    "CUBLASLT_DEPENDENCY",
    "DOWN_CONVERT_INPUTS",
    "FFT",
    "NONDETERMINISTIC",
    kReducedPrecision,
    "REQUIRES_BIAS_INT8x32_REORDER",
    "REQUIRES_FILTER_INT8x32_REORDER",
    "RUNTIME_COMPILATION",
    "STRICT_NAN_PROP",
    "SUPPORTS_CUDA_GRAPH_NATIVE_API",
    "TENSOR_CORE",
    "WINOGRAD",
    "WINOGRAD_TILE_13x13",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
};
constexpr std::string_view kNondeterministic = "NONDETERMINISTIC";

// Preferences: {"preferred":[{"first_engine":7,"wanted":[{"engine":4}]}]}. What is
// wanted may have knobs, too: {"engine":4,"knobs":{"KERNEL_CFG":40}}.
constexpr std::string_view kPreferred = "preferred";
constexpr std::string_view kKnobs = "knobs";
// A pin without knobs: {"engine":45,"nth":2,"variant":0}.
constexpr std::string_view kNth = "nth";

// Each entry of a list is compared with the others: this many bytes take no second.
constexpr size_t kMaxTextBytes = size_t{256} << 10;

template <typename List, typename Value>
bool Contains(const List& list, const Value& value) {
  return std::find(std::begin(list), std::end(list), value) != std::end(list);
}

std::string Joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += ", ";
    text += word;
  }
  return text;
}

std::string Joined(const std::vector<int64_t>& numbers) {
  std::vector<std::string> words;
  for (const int64_t number : numbers) words.push_back(std::to_string(number));
  return Joined(words);
}

// 33554688 as "33,554,688".
std::string WithCommas(int64_t number) {
  std::string text = std::to_string(number);
  const size_t first = number < 0 ? 1 : 0;
  for (size_t end = text.size(); end > first + 3; end -= 3) text.insert(end - 3, ",");
  return text;
}

std::string Place(const std::string& path, size_t index) {
  return path + "[" + std::to_string(index) + "]";
}

Status NotKnown(const std::string& path, const std::string& what,
                const std::string& name, const std::vector<std::string>& known) {
  return InvalidArgument(path + ": '" + name + "' is not a known " + what +
                         "; known are " + Joined(known));
}

// --- reading ------------------------------------------------------------------------

StatusOr<std::vector<HeuristicMode>> ReadModes(const Json& json,
                                               const std::string& path) {
  ASSIGN_OR_RETURN(const auto names, ReadStrings(json, path));
  std::vector<std::string> known;
  for (const auto& [mode, name] : kModeNames) known.emplace_back(name);
  if (names.empty()) {
    return InvalidArgument(path + ": empty; name one or more of " + Joined(known));
  }
  std::vector<HeuristicMode> modes;
  for (size_t i = 0; i < names.size(); ++i) {
    const auto* row = std::find_if(std::begin(kModeNames), std::end(kModeNames),
                                   [&](const auto& r) { return r.second == names[i]; });
    if (row == std::end(kModeNames)) {
      return NotKnown(Place(path, i), "mode", names[i], known);
    }
    if (Contains(modes, row->first)) {
      return InvalidArgument(Place(path, i) + ": '" + names[i] + "' appears twice");
    }
    modes.push_back(row->first);
  }
  return modes;
}

StatusOr<std::vector<std::string>> ReadNotes(const Json& json,
                                             const std::string& path) {
  ASSIGN_OR_RETURN(auto notes, ReadStrings(json, path));
  for (size_t i = 0; i < notes.size(); ++i) {
    if (!Contains(kNoteNames, notes[i])) {
      return NotKnown(Place(path, i), "note", notes[i],
                      {std::begin(kNoteNames), std::end(kNoteNames)});
    }
  }
  return notes;
}

Status CheckEngine(int64_t engine, const std::string& path) {
  if (engine >= 0) return {};
  return InvalidArgument(path + ": " + std::to_string(engine) +
                         " is not an engine; engines count from 0");
}

StatusOr<std::vector<int64_t>> ReadEngines(const Json& json, const std::string& path) {
  ASSIGN_OR_RETURN(auto engines, ReadIntegers(json, path));
  for (size_t i = 0; i < engines.size(); ++i) {
    RETURN_IF_ERROR(CheckEngine(engines[i], Place(path, i)));
  }
  return engines;
}

bool IsNull(const Json& json) {
  return std::holds_alternative<std::monostate>(json.value);
}

StatusOr<PlanRequest> ReadFilter(const Json& json) {
  ASSIGN_OR_RETURN(
      const auto fields,
      ReadFields(json, "request",
                 {"denied_engines", "deterministic", "engines", "modes",
                  "refused_notes", "required_notes", "workspace_limit_bytes"}));
  PlanRequest request;
  ASSIGN_OR_RETURN(request.denied_engines,
                   ReadEngines(*fields[0], "request.denied_engines"));
  ASSIGN_OR_RETURN(request.deterministic,
                   ReadBool(*fields[1], "request.deterministic"));
  if (!IsNull(*fields[2])) {
    ASSIGN_OR_RETURN(request.engines, ReadEngines(*fields[2], "request.engines"));
  }
  ASSIGN_OR_RETURN(request.modes, ReadModes(*fields[3], "request.modes"));
  ASSIGN_OR_RETURN(request.refused_notes,
                   ReadNotes(*fields[4], "request.refused_notes"));
  ASSIGN_OR_RETURN(request.required_notes,
                   ReadNotes(*fields[5], "request.required_notes"));
  if (!IsNull(*fields[6])) {
    ASSIGN_OR_RETURN(request.workspace_limit_bytes,
                     ReadInteger(*fields[6], "request.workspace_limit_bytes"));
  }
  return request;
}

// What no field shows by itself.
Status CheckFilter(const PlanRequest& request) {
  if (request.engines.has_value()) {
    if (request.engines->empty()) {
      return InvalidArgument(
          "request.engines: empty, which allows no engine; null allows all");
    }
    for (const int64_t engine : *request.engines) {
      if (Contains(request.denied_engines, engine)) {
        return InvalidArgument("request.engines: engine " + std::to_string(engine) +
                               " is both allowed and denied; take it out of engines "
                               "or of denied_engines");
      }
    }
  }
  for (const std::string& note : request.required_notes) {
    if (Contains(request.refused_notes, note)) {
      return InvalidArgument("request.required_notes: '" + note +
                             "' is both required and refused; take it out of "
                             "required_notes or of refused_notes");
    }
    if (request.deterministic && note == kNondeterministic) {
      return InvalidArgument("request.required_notes: '" + note +
                             "' is what deterministic refuses; drop one of the two");
    }
  }
  if (const int64_t limit = request.workspace_limit_bytes.value_or(0); limit < 0) {
    return InvalidArgument("request.workspace_limit_bytes: " + std::to_string(limit) +
                           " is negative; 0 allows no workspace, null any");
  }
  return {};
}

bool HasField(const JsonObject& object, std::string_view name) {
  return std::any_of(object.begin(), object.end(),
                     [&](const auto& field) { return field.first == name; });
}

StatusOr<Knobs> ReadKnobs(const Json& json, const std::string& path) {
  ASSIGN_OR_RETURN(const JsonObject* object, ReadObject(json, path));
  Knobs knobs;
  for (const auto& [name, value] : *object) {
    ASSIGN_OR_RETURN(const int64_t number, ReadInteger(value, path + "." + name));
    knobs.emplace_back(name, number);
  }
  std::sort(knobs.begin(), knobs.end());
  return knobs;
}

StatusOr<int64_t> ReadEngine(const Json& json, const std::string& path) {
  ASSIGN_OR_RETURN(const int64_t engine, ReadInteger(json, path));
  RETURN_IF_ERROR(CheckEngine(engine, path));
  return engine;
}

StatusOr<WantedPlan> ReadWanted(const Json& json, const std::string& path) {
  ASSIGN_OR_RETURN(const JsonObject* object, ReadObject(json, path));
  std::vector<std::string_view> names = {"engine"};
  const bool has_knobs = HasField(*object, kKnobs);
  if (has_knobs) names.push_back(kKnobs);
  ASSIGN_OR_RETURN(const auto fields, ReadFields(json, path, names));
  WantedPlan wanted;
  ASSIGN_OR_RETURN(wanted.engine, ReadEngine(*fields[0], path + ".engine"));
  if (has_knobs) {
    ASSIGN_OR_RETURN(wanted.knobs, ReadKnobs(*fields[1], path + ".knobs"));
  }
  return wanted;
}

StatusOr<PlanPreference> ReadPreference(const Json& json, const std::string& path) {
  ASSIGN_OR_RETURN(const auto fields,
                   ReadFields(json, path, {"first_engine", "wanted"}));
  PlanPreference preference;
  ASSIGN_OR_RETURN(preference.first_engine,
                   ReadEngine(*fields[0], path + ".first_engine"));
  const std::string list_path = path + ".wanted";
  ASSIGN_OR_RETURN(const JsonList* list, ReadList(*fields[1], list_path));
  if (list->empty()) {
    return InvalidArgument(list_path + ": empty; name an engine to be tried first");
  }
  for (size_t i = 0; i < list->size(); ++i) {
    const std::string place = Place(list_path, i);
    ASSIGN_OR_RETURN(WantedPlan wanted, ReadWanted((*list)[i], place));
    const bool is_blas = preference.first_engine == kCublasLtEngine;
    if (is_blas && wanted.engine != kCublasLtEngine) {
      return InvalidArgument(place + ": engine " + std::to_string(wanted.engine) +
                             " is not cuBLASLt's, " + std::to_string(kCublasLtEngine));
    }
    if (!is_blas && !wanted.knobs && wanted.engine == preference.first_engine) {
      return InvalidArgument(place + ": engine " + std::to_string(wanted.engine) +
                             " comes first as it is; name its knobs, or another one");
    }
    if (Contains(preference.wanted, wanted)) {
      return InvalidArgument(place + ": the same appears twice");
    }
    preference.wanted.push_back(std::move(wanted));
  }
  return preference;
}

StatusOr<PlanRequest> ReadPreferences(const Json& json) {
  ASSIGN_OR_RETURN(const auto fields, ReadFields(json, "request", {kPreferred}));
  const std::string path = "request.preferred";
  ASSIGN_OR_RETURN(const JsonList* list, ReadList(*fields[0], path));
  if (list->empty()) {
    return InvalidArgument(path + ": empty; an empty request lets cuDNN choose");
  }
  PlanRequest request;
  for (size_t i = 0; i < list->size(); ++i) {
    const std::string place = Place(path, i);
    ASSIGN_OR_RETURN(PlanPreference read, ReadPreference((*list)[i], place));
    for (const PlanPreference& other : request.preferences) {
      if (other.first_engine >= read.first_engine) {
        return InvalidArgument(place +
                               ".first_engine: " + std::to_string(read.first_engine) +
                               " comes after " + std::to_string(other.first_engine) +
                               "; each is named once, smaller ones first");
      }
    }
    request.preferences.push_back(std::move(read));
  }
  return request;
}

StatusOr<PlanRequest> ReadPin(const Json& json, const JsonObject& object) {
  const bool has_nth = HasField(object, kNth);
  std::vector<std::string_view> names = {"engine", has_nth ? kNth : kKnobs, "variant"};
  const bool has_deterministic = HasField(object, "deterministic");
  if (has_deterministic) names.emplace_back("deterministic");
  ASSIGN_OR_RETURN(const auto fields, ReadFields(json, "request", names));
  PlanRequest request;
  PlanPin pin;
  ASSIGN_OR_RETURN(pin.engine, ReadEngine(*fields[0], "request.engine"));
  if (has_nth) {
    ASSIGN_OR_RETURN(pin.nth, ReadInteger(*fields[1], "request.nth"));
    if (pin.nth < 0) {
      return InvalidArgument("request.nth: " + std::to_string(pin.nth) +
                             " is negative; the first of an engine is 0");
    }
  } else {
    ASSIGN_OR_RETURN(pin.knobs, ReadKnobs(*fields[1], "request.knobs"));
  }
  ASSIGN_OR_RETURN(pin.variant, ReadInteger(*fields[2], "request.variant"));
  request.pin = std::move(pin);
  request.refused_notes.clear();  // It may name a plan that none gets by default.
  if (has_deterministic) {
    ASSIGN_OR_RETURN(request.deterministic,
                     ReadBool(*fields[3], "request.deterministic"));
    if (!request.deterministic) {
      return InvalidArgument(
          "request.deterministic: a pin leaves it out where it is not true");
    }
  }
  return request;
}

// --- writing ------------------------------------------------------------------------

std::string IntegerList(const std::vector<int64_t>& numbers) {
  std::string text = "[";
  for (const int64_t number : numbers) {
    if (text.back() != '[') text += ',';
    text += std::to_string(number);
  }
  return text + "]";
}

template <typename Words>
std::string StringList(const Words& words) {
  std::string text = "[";
  for (const auto& word : words) {
    if (text.back() != '[') text += ',';
    WriteJsonString(word, text);
  }
  return text + "]";
}

std::string KnobsObject(const Knobs& knobs) {
  std::string text = "{";
  for (const auto& [name, value] : knobs) {
    if (text.back() != '{') text += ',';
    WriteJsonString(name, text);
    text += ':' + std::to_string(value);
  }
  return text + "}";
}

std::string WritePin(const PlanPin& pin, bool deterministic) {
  std::string text = deterministic ? "{\"deterministic\":true," : "{";
  text += "\"engine\":" + std::to_string(pin.engine);
  text += pin.knobs ? ",\"knobs\":" + KnobsObject(*pin.knobs)
                    : ",\"nth\":" + std::to_string(pin.nth);
  return text + ",\"variant\":" + std::to_string(pin.variant) + "}";
}

std::string WriteWanted(const WantedPlan& wanted) {
  std::string text = "{\"engine\":" + std::to_string(wanted.engine);
  if (wanted.knobs) text += ",\"knobs\":" + KnobsObject(*wanted.knobs);
  return text + "}";
}

std::string WritePreferences(const std::vector<PlanPreference>& preferences) {
  std::string text = "{\"preferred\":[";
  for (const PlanPreference& each : preferences) {
    if (text.back() != '[') text += ',';
    text += "{\"first_engine\":" + std::to_string(each.first_engine) + ",\"wanted\":[";
    for (const WantedPlan& wanted : each.wanted) {
      if (text.back() != '[') text += ',';
      text += WriteWanted(wanted);
    }
    text += "]}";
  }
  return text + "]}";
}

std::string WriteFilter(const PlanRequest& request) {
  std::vector<std::string_view> modes;
  for (const HeuristicMode mode : request.modes) {
    for (const auto& [known, name] : kModeNames) {
      if (known == mode) modes.push_back(name);
    }
  }
  std::string text =
      "{\"denied_engines\":" + IntegerList(request.denied_engines) +
      ",\"deterministic\":" + (request.deterministic ? "true" : "false") +
      ",\"engines\":" + (request.engines ? IntegerList(*request.engines) : "null") +
      ",\"modes\":" + StringList(modes) +
      ",\"refused_notes\":" + StringList(request.refused_notes) +
      ",\"required_notes\":" + StringList(request.required_notes) +
      ",\"workspace_limit_bytes\":";
  const auto limit = request.workspace_limit_bytes;
  return text + (limit ? std::to_string(*limit) : "null") + "}";
}

}  // namespace

StatusOr<PlanRequest> ParsePlanRequest(std::string_view text) {
  if (text.empty()) return PlanRequest();
  if (text.size() > kMaxTextBytes) {
    return InvalidArgument("request: " + std::to_string(text.size()) +
                           " bytes of text, more than " +
                           std::to_string(kMaxTextBytes));
  }
  ASSIGN_OR_RETURN(const Json json, ParseJson(text, "request"));
  ASSIGN_OR_RETURN(const JsonObject* object, ReadObject(json, "request"));
  const bool is_pin = HasField(*object, "engine") || HasField(*object, "knobs") ||
                      HasField(*object, "variant");
  ASSIGN_OR_RETURN(PlanRequest request, is_pin ? ReadPin(json, *object)
                                        : HasField(*object, kPreferred)
                                            ? ReadPreferences(json)
                                            : ReadFilter(json));
  RETURN_IF_ERROR(CheckFilter(request));
  if (std::string canonical = WritePlanRequest(request); canonical != text) {
    return InvalidArgument(
        "request: the text is valid but not in canonical form, which is " + canonical);
  }
  return request;
}

std::string WritePlanRequest(const PlanRequest& request) {
  if (request.pin) return WritePin(*request.pin, request.deterministic);
  return request.preferences.empty() ? WriteFilter(request)
                                     : WritePreferences(request.preferences);
}

std::string RefusalOf(const PlanRequest& request, int64_t engine,
                      const std::vector<std::string>& notes) {
  const std::string number = std::to_string(engine);
  if (request.engines && !Contains(*request.engines, engine)) {
    return "engine " + number + " is not allowed; allowed are " +
           Joined(*request.engines);
  }
  if (Contains(request.denied_engines, engine)) {
    return "engine " + number + " is denied";
  }
  for (const std::string& note : notes) {
    if (request.deterministic && note == kNondeterministic) {
      return "has the note " + note + ", which deterministic refuses";
    }
    if (Contains(request.refused_notes, note)) {
      return "has the note " + note + ", which is refused" +
             (note == kReducedPrecision
                  ? " unless PlanOptions has reduced_precision_reduction=True"
                  : "");
    }
  }
  for (const std::string& note : request.required_notes) {
    if (!Contains(notes, note)) {
      return "lacks the note " + note + ", which is required";
    }
  }
  return "";
}

std::string WorkspaceRefusal(const PlanRequest& request, int64_t bytes) {
  if (!request.workspace_limit_bytes || bytes <= *request.workspace_limit_bytes) {
    return "";
  }
  return "needs " + WithCommas(bytes) + " bytes of workspace, more than the limit of " +
         WithCommas(*request.workspace_limit_bytes);
}

}  // namespace jax_cudnn
