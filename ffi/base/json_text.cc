// SPDX-License-Identifier: Apache-2.0
// The strict JSON reader, on the event interface of nlohmann's parser.
//
// The event interface, because the frontend changes how nlohmann's own tree converts
// `float`, and because events can be cut short on depth and duplicates.

#include "base/json_text.h"

#include <algorithm>
#include <cstddef>
#include <iomanip>
#include <locale>
#include <sstream>

#include "cudnn_frontend/thirdparty/nlohmann/json.hpp"

namespace jax_cudnn {
namespace {

// A graph has 5 levels. The limits keep a hostile text from exhausting stack or memory.
constexpr size_t kMaxDepth = 16;
constexpr size_t kMaxTextBytes = size_t{8} << 20;

// Builds the tree from nlohmann's parse events; returning false stops the parser.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit TreeBuilder(std::string_view root) : root_(root) {}

  Json TakeTree() { return std::move(tree_); }
  const Status& status() const { return status_; }

  bool null() override { return Add({std::monostate()}); }
  bool boolean(bool value) override { return Add({value}); }
  bool number_integer(int64_t value) override { return Add({value}); }
  bool number_unsigned(uint64_t value) override {
    if (value > static_cast<uint64_t>(INT64_MAX)) {
      return Add({HugeInteger{std::to_string(value)}});
    }
    return Add({static_cast<int64_t>(value)});
  }
  bool number_float(double value, const std::string& digits) override {
    // The parser falls back to a float for an integer of more than 64 bits.
    if (digits.find_first_not_of("-0123456789") == std::string::npos) {
      return Add({HugeInteger{digits}});
    }
    return Add({value});
  }
  bool string(std::string& value) override { return Add({std::move(value)}); }
  bool binary(nlohmann::json::binary_t&) override { return Fail("binary value"); }

  bool start_object(size_t) override { return Open({JsonObject()}); }
  bool start_array(size_t) override { return Open({JsonList()}); }
  bool end_object() override { return HasDistinctNames() && Close(); }
  bool end_array() override { return Close(); }

  bool key(std::string& name) override {
    std::get<JsonObject>(open_.back()->value).emplace_back(std::move(name), Json());
    return true;
  }

  bool parse_error(size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    // Only the position: the parser's own words quote the text at length.
    const char* kind = error.id == 101 ? "syntax error" : "unreadable value";
    return Fail("not JSON: " + std::string(kind) + " at byte " +
                std::to_string(position));
  }

 private:
  bool Fail(const std::string& what) {
    if (status_.ok()) status_ = InvalidArgument(std::string(root_) + ": " + what);
    return false;
  }

  // Puts a value where the text has it and returns its place.
  Json* Place(Json value) {
    if (open_.empty()) {
      tree_ = std::move(value);
      return &tree_;
    }
    if (auto* list = std::get_if<JsonList>(&open_.back()->value)) {
      list->push_back(std::move(value));
      return &list->back();
    }
    Json& field = std::get<JsonObject>(open_.back()->value).back().second;
    field = std::move(value);
    return &field;
  }

  bool Add(Json value) {
    Place(std::move(value));
    return true;
  }

  bool Open(Json value) {
    if (open_.size() == kMaxDepth) {
      return Fail("nested deeper than " + std::to_string(kMaxDepth) + " levels");
    }
    // A pointer into a list stays valid: the list grows only once its last element is
    // closed again.
    open_.push_back(Place(std::move(value)));
    return true;
  }

  // Sorted: a hostile object has a million fields.
  bool HasDistinctNames() {
    const auto& fields = std::get<JsonObject>(open_.back()->value);
    std::vector<std::string_view> names;
    names.reserve(fields.size());
    for (const auto& field : fields) names.emplace_back(field.first);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice == names.end()) return true;
    return Fail("field '" + std::string(*twice) + "' appears twice in one object");
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  std::string_view root_;
  Json tree_;
  std::vector<Json*> open_;
  Status status_;
};

Status WrongType(const std::string& path, const char* expected, const Json& json) {
  return InvalidArgument(path + ": expected " + expected + ", got " + json.TypeName());
}

void AppendUnicodeEscape(unsigned code_unit, std::string& out) {
  constexpr char kDigits[] = "0123456789abcdef";
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) {
    out += kDigits[(code_unit >> shift) & 0xF];
  }
}

}  // namespace

const char* Json::TypeName() const {
  switch (value.index()) {
    case 0:
      return "null";
    case 1:
      return "a boolean";
    case 2:
    case 3:
      return "an integer";
    case 4:
      return "a number";
    case 5:
      return "a string";
    case 6:
      return "a list";
    default:
      return "an object";
  }
}

StatusOr<Json> ParseJson(std::string_view text, std::string_view root) {
  if (text.size() > kMaxTextBytes) {
    return InvalidArgument(std::string(root) + ": " + std::to_string(text.size()) +
                           " bytes of text, more than " +
                           std::to_string(kMaxTextBytes));
  }
  TreeBuilder builder(root);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  RETURN_IF_ERROR(builder.status());
  return builder.TakeTree();
}

StatusOr<bool> ReadBool(const Json& json, const std::string& path) {
  if (const auto* value = std::get_if<bool>(&json.value)) return *value;
  return WrongType(path, "a boolean", json);
}

StatusOr<int64_t> ReadInteger(const Json& json, const std::string& path) {
  if (const auto* value = std::get_if<int64_t>(&json.value)) return *value;
  if (const auto* huge = std::get_if<HugeInteger>(&json.value)) {
    return InvalidArgument(path + ": " + huge->digits + " does not fit in 64 bits");
  }
  return WrongType(path, "an integer", json);
}

StatusOr<double> ReadNumber(const Json& json, const std::string& path) {
  if (const auto* value = std::get_if<double>(&json.value)) return *value;
  if (const auto* value = std::get_if<int64_t>(&json.value)) {
    return static_cast<double>(*value);
  }
  if (const auto* huge = std::get_if<HugeInteger>(&json.value)) {
    // No float is written with so many digits and no exponent.
    return InvalidArgument(path + ": " + huge->digits + " does not fit in 64 bits");
  }
  return WrongType(path, "a number", json);
}

StatusOr<std::string> ReadString(const Json& json, const std::string& path) {
  if (const auto* value = std::get_if<std::string>(&json.value)) return *value;
  return WrongType(path, "a string", json);
}

StatusOr<const JsonList*> ReadList(const Json& json, const std::string& path) {
  if (const auto* value = std::get_if<JsonList>(&json.value)) return value;
  return WrongType(path, "a list", json);
}

StatusOr<const JsonObject*> ReadObject(const Json& json, const std::string& path) {
  if (const auto* value = std::get_if<JsonObject>(&json.value)) return value;
  return WrongType(path, "an object", json);
}

StatusOr<std::vector<int64_t>> ReadIntegers(const Json& json, const std::string& path) {
  ASSIGN_OR_RETURN(const JsonList* list, ReadList(json, path));
  std::vector<int64_t> values;
  for (size_t i = 0; i < list->size(); ++i) {
    ASSIGN_OR_RETURN(int64_t value,
                     ReadInteger((*list)[i], path + "[" + std::to_string(i) + "]"));
    values.push_back(value);
  }
  return values;
}

StatusOr<std::vector<std::string>> ReadStrings(const Json& json,
                                               const std::string& path) {
  ASSIGN_OR_RETURN(const JsonList* list, ReadList(json, path));
  std::vector<std::string> values;
  for (size_t i = 0; i < list->size(); ++i) {
    ASSIGN_OR_RETURN(std::string value,
                     ReadString((*list)[i], path + "[" + std::to_string(i) + "]"));
    values.push_back(std::move(value));
  }
  return values;
}

StatusOr<std::vector<const Json*>> ReadFields(
    const Json& json, const std::string& path,
    const std::vector<std::string_view>& names) {
  ASSIGN_OR_RETURN(const JsonObject* fields, ReadObject(json, path));
  for (const auto& field : *fields) {
    if (std::find(names.begin(), names.end(), field.first) == names.end()) {
      return InvalidArgument(path + "." + field.first + ": unknown field");
    }
  }
  std::vector<const Json*> values;
  for (std::string_view name : names) {
    const auto field = std::find_if(fields->begin(), fields->end(),
                                    [&](const auto& f) { return f.first == name; });
    if (field == fields->end()) {
      return InvalidArgument(path + "." + std::string(name) + ": missing field");
    }
    values.push_back(&field->second);
  }
  return values;
}

void WriteJsonString(std::string_view text, std::string& out) {
  out += '"';
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // The length of the UTF-8 sequence that starts here, and its first bits.
    const size_t length = byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
    unsigned code = length == 1 ? byte : byte & (0xFFU >> (length + 1));
    for (size_t j = 1; j < length && i + j < text.size(); ++j) {
      code = (code << 6) | (static_cast<unsigned char>(text[i + j]) & 0x3FU);
    }
    i += length;
    constexpr std::string_view kShort = "\"\"\\\\\nn\rr\tt\bb\ff";
    size_t short_escape = std::string_view::npos;
    for (size_t j = 0; j < kShort.size(); j += 2) {
      if (static_cast<unsigned char>(kShort[j]) == code) short_escape = j + 1;
    }
    if (short_escape != std::string_view::npos) {
      out += '\\';
      out += kShort[short_escape];
    } else if (code >= 0x20 && code < 0x7F) {
      out += static_cast<char>(code);
    } else if (code < 0x10000) {
      AppendUnicodeEscape(code, out);
    } else {
      AppendUnicodeEscape(0xD800 + ((code - 0x10000) >> 10), out);
      AppendUnicodeEscape(0xDC00 + ((code - 0x10000) & 0x3FF), out);
    }
  }
  out += '"';
}

void WriteJsonNumber(double number, std::string& out) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  // Adding zero: -0.0 equals 0.0, so it is written alike.
  text << std::setprecision(17) << number + 0.0;
  out += text.str();
}

}  // namespace jax_cudnn
