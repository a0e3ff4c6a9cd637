// SPDX-License-Identifier: Apache-2.0
// Reading and checking the steps of a score_mod, with the messages that Python gives.

#include "graph/score_mod.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/json_text.h"
#include "graph/node_kinds.h"

namespace jax_cudnn {
namespace {

constexpr std::string_view kOperands[] = {"mod_a", "mod_b", "mod_c", "mod_d"};
constexpr std::string_view kHidden = "-inf";
constexpr size_t kMostDigits = 9;

std::string Quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

bool IsOperand(std::string_view word) {
  return std::find(std::begin(kOperands), std::end(kOperands), word) !=
         std::end(kOperands);
}

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

class Checker {
 public:
  explicit Checker(const NodeSpec& node)
      : node_(node), pointwise_(*FindNodeKind("pointwise")) {}

  Status Check() {
    const auto& steps = node_.Attribute<Steps>("score_mod");
    const auto& gradient = node_.Attribute<Steps>("score_mod_grad");
    if (!gradient.empty() && steps.empty()) {
      return InvalidArgument("score_mod_grad without score_mod");
    }
    RETURN_IF_ERROR(CheckSteps("score_mod", steps, /*is_gradient=*/false));
    RETURN_IF_ERROR(CheckSteps("score_mod_grad", gradient, /*is_gradient=*/true));
    for (std::string_view role : kOperands) {
      if (node_.inputs.find(role) == node_.inputs.end()) continue;
      const bool is_read =
          std::any_of(steps.begin(), steps.end(), [&](const std::string& step) {
            const auto words = ReadStep(step);
            return std::find(words.begin() + 1, words.end(), role) != words.end();
          });
      if (!is_read) {
        return InvalidArgument("score_mod: it does not read " + std::string(role));
      }
    }
    return {};
  }

 private:
  Status CheckSteps(const std::string& name, const Steps& steps, bool is_gradient) {
    for (const std::string& text : steps) {
      const std::string where = name + ": " + Quoted(text);
      const auto words = ReadStep(text);
      const auto arity = pointwise_.arity.find(words[0]);
      if (arity == pointwise_.arity.end() ||
          (EndsWith(words[0], "_grad") && !is_gradient)) {
        return InvalidArgument(where + " has no known mode");
      }
      const size_t count = words.size() - 1;
      if (count != arity->second) {
        return InvalidArgument(where + " has " + std::to_string(count) +
                               " words, not " + std::to_string(arity->second));
      }
      for (size_t i = 1; i <= count; ++i) {
        if (!IsValue(words[i], is_gradient)) {
          return InvalidArgument(where + ": no value and no number is " +
                                 Quoted(words[i]));
        }
        const auto index = ResultIndex(words[i]);
        const bool is_bool = index.has_value() && are_bool_[*index];
        const bool wants_bool = words[0] == "select" && i == 3;
        if (is_bool != wants_bool) {
          return InvalidArgument(where + ": " + Quoted(words[i]) + " is not " +
                                 (wants_bool ? "a truth value" : "a number"));
        }
      }
      are_bool_.push_back(pointwise_.modes_to_bool.count(words[0]) != 0);
    }
    if (!steps.empty() && are_bool_.back()) {
      return InvalidArgument(name + ": the last step gives a truth value");
    }
    return {};
  }

  bool IsValue(const std::string& word, bool is_gradient) const {
    if (word == "score" || word == "query" || word == "key") return true;
    if (word == "grad" && is_gradient) return true;
    if (IsOperand(word)) return node_.inputs.find(word) != node_.inputs.end();
    if (const auto index = ResultIndex(word)) return *index < are_bool_.size();
    return StepNumber(word).has_value();
  }

  const NodeSpec& node_;
  const NodeKind& pointwise_;
  std::vector<bool> are_bool_;
};

}  // namespace

std::vector<std::string> ReadStep(std::string_view text) {
  std::vector<std::string> words;
  while (true) {
    const size_t space = text.find(' ');
    words.emplace_back(text.substr(0, space));
    if (space == std::string_view::npos) return words;
    text.remove_prefix(space + 1);
  }
}

std::optional<size_t> ResultIndex(std::string_view word) {
  if (word.size() < 2 || word.size() > 1 + kMostDigits || word[0] != '%') return {};
  const std::string_view digits = word.substr(1);
  if (digits[0] == '0' && digits.size() > 1) return {};
  size_t index = 0;
  for (const char digit : digits) {
    if (digit < '0' || digit > '9') return {};
    index = 10 * index + static_cast<size_t>(digit - '0');
  }
  return index;
}

std::optional<double> StepNumber(const std::string& word) {
  if (word == kHidden) return -std::numeric_limits<double>::infinity();
  const auto json = ParseJson(word, "number");
  if (!json.ok()) return {};
  const auto number = ReadNumber(*json, "number");
  if (!number.ok()) return {};
  std::string text;
  WriteJsonNumber(*number, text);
  if (text != word) return {};
  return *number;
}

Status CheckScoreMod(const NodeSpec& node) { return Checker(node).Check(); }

}  // namespace jax_cudnn
