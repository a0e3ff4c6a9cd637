// SPDX-License-Identifier: Apache-2.0
// Reading what cuDNN tells in words only.

#include "frontend/frontend_graph.h"

#include <cstdlib>
#include <string>
#include <string_view>

namespace jax_cudnn {

std::optional<int64_t> FrontendGraph::WorkspaceAbove(int64_t limit_bytes,
                                                     int64_t index) {
  // cuDNN's share is compared before a plan is built, and told in words only.
  constexpr std::string_view kMark = "workspace violation. Requires ";
  const int64_t own_bytes = get_fe_workspace_size_subtree();
  plans.set_max_workspace_allowed(limit_bytes - own_bytes);
  const std::string text = plans.check_support_at_index(index).get_message();
  const size_t start = text.find(kMark);
  if (start == std::string::npos) return std::nullopt;
  return own_bytes + std::strtoll(text.c_str() + start + kMark.size(), nullptr, 10);
}

}  // namespace jax_cudnn
