// SPDX-License-Identifier: Apache-2.0
// Reading cuDNN's error texts.

#include "frontend/refusal.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <utility>

namespace jax_cudnn {
namespace {

// cuDNN 9's text is a block per engine: a JSON line with its number, then one line per
// level of the call stack, innermost first.
constexpr std::string_view kEngineMark = "{\"engineId\":";
constexpr std::string_view kReasonMark = "Reason: ";

// The lines of outer stack frames only repeat that the inner call failed.
bool IsTelling(std::string_view reason) {
  constexpr std::string_view kFrames[] = {"()", "(CUDNN_STATUS_"};
  if (reason.empty()) return false;
  if (reason.size() >= 2 && reason.substr(reason.size() - 2) == kFrames[0]) {
    return false;
  }
  return reason.substr(0, kFrames[1].size()) != kFrames[1];
}

std::string_view Trim(std::string_view text) {
  const auto is_space = [](char c) {
    return std::isspace(static_cast<unsigned char>(c)) != 0;
  };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

// The first telling reason of one engine's block, or the first of all.
std::string_view FirstReason(std::string_view block) {
  std::string_view first;
  for (size_t at = block.find(kReasonMark); at != std::string_view::npos;
       at = block.find(kReasonMark, at)) {
    at += kReasonMark.size();
    const std::string_view reason = Trim(block.substr(at, block.find('\n', at) - at));
    if (IsTelling(reason)) return reason;
    if (first.empty()) first = reason;
  }
  return first;
}

}  // namespace

std::string OneLine(std::string_view text) {
  std::string line(Trim(text));
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

std::vector<std::string> RefusalReasons(std::string_view text) {
  // Reasons in the order of the text, each with the engines that gave it.
  std::vector<std::pair<std::string_view, std::string>> found;
  for (size_t at = text.find(kEngineMark); at != std::string_view::npos;) {
    const size_t number = at + kEngineMark.size();
    const size_t next = text.find(kEngineMark, number);
    const std::string_view block = text.substr(number, next - number);
    at = next;
    const std::string_view reason = FirstReason(block);
    if (reason.empty()) continue;
    const std::string engine(block.substr(0, block.find(',')));
    const auto same = std::find_if(found.begin(), found.end(),
                                   [&](const auto& f) { return f.first == reason; });
    if (same == found.end()) {
      found.emplace_back(reason, "engine " + engine);
    } else {
      same->second += ", " + engine;
    }
  }
  if (found.empty()) return {OneLine(text)};
  std::vector<std::string> reasons;
  for (const auto& [reason, engines] : found) {
    reasons.push_back(engines + ": " + std::string(reason));
  }
  return reasons;
}

}  // namespace jax_cudnn
