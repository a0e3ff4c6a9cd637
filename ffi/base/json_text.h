// SPDX-License-Identifier: Apache-2.0
// Reads JSON text strictly into a small tree, and writes its scalars canonically.
//
// Stricter than a general reader: duplicate fields, deep nesting and huge texts are
// refused. Numbers stay integers unless written as floats. Knows nothing of graphs.

#ifndef JAX_CUDNN_JSON_TEXT_H_
#define JAX_CUDNN_JSON_TEXT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"

namespace jax_cudnn {

struct Json;

using JsonList = std::vector<Json>;
// In the order of the text; no field appears twice.
using JsonObject = std::vector<std::pair<std::string, Json>>;

// An integer that does not fit in 64 bits, as its digits.
struct HugeInteger {
  std::string digits;
};

struct Json {
  std::variant<std::monostate, bool, int64_t, HugeInteger, double, std::string,
               JsonList, JsonObject>
      value;

  // "null", "a boolean", "an integer", "a number", "a string", "a list", "an object".
  const char* TypeName() const;
};

// Reads one JSON value. Errors are INVALID_ARGUMENT and start with `root`.
StatusOr<Json> ParseJson(std::string_view text, std::string_view root);

// Each Read function returns the value of the named type, or INVALID_ARGUMENT with the
// path of the field.
StatusOr<bool> ReadBool(const Json& json, const std::string& path);
StatusOr<int64_t> ReadInteger(const Json& json, const std::string& path);
StatusOr<double> ReadNumber(const Json& json, const std::string& path);
StatusOr<std::string> ReadString(const Json& json, const std::string& path);
StatusOr<std::vector<int64_t>> ReadIntegers(const Json& json, const std::string& path);
StatusOr<std::vector<std::string>> ReadStrings(const Json& json,
                                               const std::string& path);
StatusOr<const JsonList*> ReadList(const Json& json, const std::string& path);
StatusOr<const JsonObject*> ReadObject(const Json& json, const std::string& path);

// Checks that the object has exactly the fields `names`, and returns their values in
// that order; the pointers live as long as `json`.
StatusOr<std::vector<const Json*>> ReadFields(
    const Json& json, const std::string& path,
    const std::vector<std::string_view>& names);

// The canonical spelling of a string: ASCII, quoted. `text` is valid UTF-8.
void WriteJsonString(std::string_view text, std::string& out);
// The canonical spelling of a finite number: "%.17g", whatever the locale.
void WriteJsonNumber(double number, std::string& out);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_JSON_TEXT_H_
