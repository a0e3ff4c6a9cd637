// SPDX-License-Identifier: Apache-2.0
// Reads any bytes as JSON; writes what was read, and reads that.

#include <cmath>
#include <string>
#include <variant>

#include "base/json_text.h"
#include "fuzzing.h"

namespace jax_cudnn {
namespace {

void Write(const Json& json, std::string& out);

struct Writer {
  std::string& out;

  void operator()(std::monostate) const { out += "null"; }
  void operator()(bool value) const { out += value ? "true" : "false"; }
  void operator()(int64_t value) const { out += std::to_string(value); }
  void operator()(const HugeInteger& value) const { out += value.digits; }
  void operator()(double value) const {
    Require(std::isfinite(value), "a number is finite");
    WriteJsonNumber(value, out);
  }
  void operator()(const std::string& value) const { WriteJsonString(value, out); }
  void operator()(const JsonList& list) const {
    out += '[';
    for (const Json& each : list) {
      if (out.back() != '[') out += ',';
      Write(each, out);
    }
    out += ']';
  }
  void operator()(const JsonObject& object) const {
    out += '{';
    for (const auto& [name, value] : object) {
      if (out.back() != '{') out += ',';
      WriteJsonString(name, out);
      out += ':';
      Write(value, out);
    }
    out += '}';
  }
};

void Write(const Json& json, std::string& out) { std::visit(Writer{out}, json.value); }

// Each typed reader takes what is of its type, and refuses all else.
void ReadAll(const Json& json) {
  int taken = 0;
  const auto count = [&](const Status& status) {
    if (status.ok()) {
      ++taken;
    } else {
      RequireRefusal(status);
    }
  };
  count(ReadBool(json, "input").status());
  count(ReadInteger(json, "input").status());
  count(ReadNumber(json, "input").status());
  count(ReadString(json, "input").status());
  count(ReadList(json, "input").status());
  count(ReadObject(json, "input").status());
  // An integer is a number, too.
  Require(taken <= 2, "a value has one type");
  count(ReadIntegers(json, "input").status());
  count(ReadStrings(json, "input").status());
  count(ReadFields(json, "input", {"dims", "name"}).status());
}

}  // namespace
}  // namespace jax_cudnn

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_cudnn;  // NOLINT(google-build-using-namespace)
  const auto json = ParseJson(Text(data, size), "input");
  if (!json.ok()) {
    RequireRefusal(json.status());
    return 0;
  }
  ReadAll(*json);
  std::string text;
  Write(*json, text);
  const auto again = ParseJson(text, "input");
  Require(again.ok(), "what was written is read");
  std::string second;
  Write(*again, second);
  Require(second == text, "a canonical text comes back");
  return 0;
}
