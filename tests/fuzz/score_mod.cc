// SPDX-License-Identifier: Apache-2.0
// Reads any lines as the steps of a score_mod, and those after an empty line as the
// steps of its gradient.

#include "graph/score_mod.h"

#include <string>
#include <vector>

#include "fuzzing.h"
#include "graph/graph_spec.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_cudnn;  // NOLINT(google-build-using-namespace)
  std::string_view rest = Text(data, size);
  std::vector<std::string> parts[2];
  size_t part = 0;
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    if (line.empty() && part == 0) {
      part = 1;
    } else {
      parts[part].emplace_back(line);
    }
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  NodeSpec node;
  node.kind = "sdpa_backward";
  node.inputs = {{"mod_a", "a"}, {"mod_c", "c"}};
  node.attributes["score_mod"] = parts[0];
  node.attributes["score_mod_grad"] = parts[1];
  const Status status = CheckScoreMod(node);
  if (!status.ok()) {
    RequireRefusal(status);
    return 0;
  }
  // As the builder reads them once they are checked.
  size_t results = 0;
  for (const auto& steps : parts) {
    for (const std::string& step : steps) {
      const auto words = ReadStep(step);
      for (size_t i = 1; i < words.size(); ++i) {
        const auto index = ResultIndex(words[i]);
        Require(!index.has_value() || *index < results, "a step reads earlier ones");
        static_cast<void>(StepNumber(words[i]));
      }
      ++results;
    }
  }
  return 0;
}
