// SPDX-License-Identifier: Apache-2.0
// Reads the table of node kinds.

#include "graph/node_kinds.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "base/json_text.h"
#include "base/status.h"
#include "graph/node_kinds_table.h"

namespace jax_cudnn {
namespace {

// The table is part of this library: what is wrong with it shows in every test.
template <typename T>
T Value(StatusOr<T> value) {
  if (!value.ok()) std::abort();
  return *std::move(value);
}

const JsonObject& Object(const Json& json) {
  return *Value(ReadObject(json, "node_kinds"));
}

std::string String(const Json& json) { return Value(ReadString(json, "node_kinds")); }

std::vector<std::string> Strings(const Json& json) {
  return Value(ReadStrings(json, "node_kinds"));
}

const Json* Field(const JsonObject& object, std::string_view name) {
  for (const auto& [key, value] : object) {
    if (key == name) return &value;
  }
  return nullptr;
}

const Json& RequiredField(const JsonObject& object, std::string_view name) {
  const Json* const field = Field(object, name);
  if (field == nullptr) std::abort();
  return *field;
}

std::vector<std::string> Words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

Axis ReadAxis(std::string text) {
  Axis axis;
  if (text.front() == '[') {
    axis.is_optional = true;
    text = text.substr(1, text.size() - 2);
  }
  if (text.back() == '*') {
    axis.is_starred = true;
    text.pop_back();
  }
  if (text != "1") axis.letters = text;
  return axis;
}

Role ReadRole(const NodeKind& kind, std::string name, const std::string& text,
              bool is_input) {
  Role role;
  if (text.rfind("= ", 0) == 0) {
    role = *kind.Find(text.substr(2));
    role.same_as = text.substr(2);
  } else {
    const size_t colon = text.find(" : ");
    for (const std::string& axis : Words(text.substr(0, colon))) {
      role.axes.push_back(ReadAxis(axis));
    }
    // What a role counts, or that it is positive, is for those who draw numbers.
    const std::string dtype = text.substr(colon + 3);
    role.dtype = dtype.substr(
        0, std::min({dtype.find(" up to "), dtype.find(" below "),
                     dtype.find(" starts along "), dtype.find(" positive")}));
  }
  role.is_required = name.back() != '?';
  if (!role.is_required) name.pop_back();
  role.name = std::move(name);
  role.is_input = is_input;
  return role;
}

AttributeType TypeNamed(const std::string& name) {
  static const std::map<std::string, AttributeType> types = {
      {"bool", AttributeType::kBool},       {"integer", AttributeType::kInteger},
      {"number", AttributeType::kNumber},   {"string", AttributeType::kString},
      {"strings", AttributeType::kStrings}, {"integers", AttributeType::kIntegers},
  };
  return types.at(name);
}

AttributeValue ReadDefault(const Json& json, AttributeType type) {
  switch (type) {
    case AttributeType::kBool:
      return Value(ReadBool(json, "default"));
    case AttributeType::kInteger:
      return Value(ReadInteger(json, "default"));
    case AttributeType::kNumber:
      return Value(ReadNumber(json, "default"));
    case AttributeType::kString:
      return Value(ReadString(json, "default"));
    case AttributeType::kStrings:
      return Strings(json);
    case AttributeType::kIntegers:
      return Value(ReadIntegers(json, "default"));
  }
  std::abort();
}

// "integers y >= 1", or an object that has this as "type" beside its other fields.
AttributeField ReadAttributeField(const Json& json) {
  const bool is_text = std::holds_alternative<std::string>(json.value);
  const Json& type = is_text ? json : RequiredField(Object(json), "type");
  const std::vector<std::string> words = Words(String(type));
  AttributeField field;
  field.type = TypeNamed(words[0]);
  field.has_entry_per_star = words.size() > 1 && words[1] != ">=";
  if (words.size() > 2) field.least = std::stoll(words.back());
  if (!is_text) {
    if (const Json* const entries = Field(Object(json), "entries")) {
      field.entries = Value(ReadIntegers(*entries, "entries"));
    }
    if (const Json* const value = Field(Object(json), "default")) {
      field.value = ReadDefault(*value, field.type);
    }
  }
  return field;
}

std::set<std::string, std::less<>> Set(const std::vector<std::string>& names) {
  return {names.begin(), names.end()};
}

// The fields of both, those of `own` where both have one. Those that are new come
// first.
JsonObject Merged(const JsonObject& old, const JsonObject& own) {
  JsonObject merged;
  for (const auto& field : own) {
    if (Field(old, field.first) == nullptr) merged.push_back(field);
  }
  for (const auto& [name, value] : old) {
    const Json* const changed = Field(own, name);
    merged.emplace_back(name, changed == nullptr ? value : *changed);
  }
  return merged;
}

// A row as it is of nodes with an operand that changes it.
JsonObject WithForm(const JsonObject& row, const JsonObject& form) {
  JsonObject changed = Merged(row, form);
  std::set<std::string, std::less<>> without;
  if (const Json* const names = Field(form, "without")) without = Set(Strings(*names));
  for (auto& [side, value] : changed) {
    if (side != "inputs" && side != "outputs") continue;
    const JsonObject roles = Merged(Object(RequiredField(row, side)), Object(value));
    JsonObject kept;
    for (const auto& role : roles) {
      const std::string name = role.first.substr(0, role.first.find('?'));
      if (without.count(name) == 0) kept.push_back(role);
    }
    value.value = std::move(kept);
  }
  return changed;
}

NodeKind ReadKind(const std::string& name, const JsonObject& row, const Json* forms) {
  const auto field = [&](std::string_view key) { return Field(row, key); };
  NodeKind kind;
  kind.name = name;
  for (const char* side : {"inputs", "outputs"}) {
    for (const auto& [role, text] : Object(*field(side))) {
      kind.roles.push_back(
          ReadRole(kind, role, String(text), side == std::string_view("inputs")));
    }
  }
  if (const Json* const attributes = field("attributes")) {
    for (const auto& [key, value] : Object(*attributes)) {
      kind.attributes[key] = ReadAttributeField(value);
    }
  }
  if (const Json* const letters = field("letters")) {
    for (const auto& [letter, text] : Object(*letters)) {
      kind.letters[letter] = String(text);
    }
  }
  if (const Json* const ranks = field("ranks")) {
    const std::vector<int64_t> both = Value(ReadIntegers(*ranks, "ranks"));
    kind.least_stars = both[0];
    kind.most_stars = both[1];
  }
  if (const Json* const windows = field("windows")) {
    for (const auto& [result, text] : Object(*windows)) {
      const std::vector<std::string> words = Words(String(text));
      kind.windows.push_back({result, words[0], words[1]});
    }
  }
  if (const Json* const modes = field("modes")) {
    for (const auto& [count, names] : Object(*modes)) {
      for (const std::string& mode : Strings(names)) {
        kind.arity[mode] = std::stoul(count);
      }
    }
  }
  if (const Json* const modes = field("modes_to_bool")) {
    kind.modes_to_bool = Set(Strings(*modes));
  }
  if (const Json* const modes = field("modes_with_alpha")) {
    kind.modes_with_alpha = Set(Strings(*modes));
  }
  if (forms == nullptr) return kind;
  for (const auto& [operand, form] : Object(*forms)) {
    kind.forms.push_back(ReadKind(name, WithForm(row, Object(form)), nullptr));
    kind.forms.back().operand = operand;
  }
  return kind;
}

std::vector<NodeKind> ReadTable() {
  const Json table = Value(ParseJson(kNodeKindsTable, "node_kinds"));
  std::vector<NodeKind> kinds;
  for (const auto& [name, row] : Object(table)) {
    const Json* const like = Field(Object(row), "like");
    const Json& model =
        like == nullptr ? row : RequiredField(Object(table), String(*like));
    const Json* const forms = Field(Object(row), "with");
    kinds.push_back(ReadKind(name, Merged(Object(model), Object(row)), forms));
  }
  return kinds;
}

}  // namespace

const Role* NodeKind::Find(std::string_view role) const {
  const auto found = std::find_if(roles.begin(), roles.end(),
                                  [&](const Role& each) { return each.name == role; });
  return found == roles.end() ? nullptr : &*found;
}

const NodeKind& NodeKind::Form(
    const std::map<std::string, std::string, std::less<>>& inputs) const {
  const auto found = std::find_if(
      forms.begin(), forms.end(),
      [&](const NodeKind& form) { return inputs.count(form.operand) != 0; });
  return found == forms.end() ? *this : *found;
}

const std::vector<NodeKind>& NodeKinds() {
  // Leaked, so that a thread that outlives static destruction can still read it.
  static const auto& kinds = *new std::vector<NodeKind>(ReadTable());
  return kinds;
}

const NodeKind* FindNodeKind(std::string_view name) {
  const auto& kinds = NodeKinds();
  const auto kind = std::find_if(kinds.begin(), kinds.end(),
                                 [&](const NodeKind& k) { return k.name == name; });
  return kind == kinds.end() ? nullptr : &*kind;
}

}  // namespace jax_cudnn
