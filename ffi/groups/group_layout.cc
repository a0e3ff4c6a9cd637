// SPDX-License-Identifier: Apache-2.0
// Taking a grouped product apart.

#include "groups/group_layout.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

namespace jax_cudnn {
namespace {

using Part = GroupLayout::Part;

constexpr std::string_view kSizes = "group_sizes";
constexpr std::string_view kStarts = "starts";
constexpr std::string_view kForward = "grouped_matmul";
constexpr std::string_view kBackward = "grouped_matmul_backward";

// What this file calls an array of rows is stored row by row.
constexpr std::array<int64_t, 3> kRowMajor = {0, 1, 2};

// The tensor with its last two axes exchanged, in the same memory.
TensorSpec Turned(TensorSpec tensor) {
  std::swap(tensor.dims[1], tensor.dims[2]);
  for (int64_t& axis : tensor.order) {
    if (axis != 0) axis = 3 - axis;
  }
  return tensor;
}

StatusOr<Part> PartOf(const GraphSpec& graph, const std::string& tensor, bool has_rows,
                      bool is_turned) {
  Part part;
  part.tensor = graph.Tensor(tensor);
  TensorSpec& spec = part.tensor;
  if (spec.IsEmpty()) {
    return Unimplemented("tensor '" + tensor + "' has no elements");
  }
  const bool is_in_order = has_rows ? std::equal(spec.order.begin(), spec.order.end(),
                                                 kRowMajor.begin(), kRowMajor.end())
                                    : spec.order[0] == 0;
  if (!is_in_order) {
    return Unimplemented("tensor '" + tensor + "' is stored in the order " +
                         ListText(spec.order) + ", not group by group, row by row");
  }
  for (const bool is_result : {false, true}) {
    const auto& names = is_result ? graph.outputs : graph.inputs;
    const auto found = std::find(names.begin(), names.end(), tensor);
    if (found == names.end()) continue;
    part.memory = {is_result, static_cast<size_t>(found - names.begin())};
  }
  const int64_t step = has_rows ? spec.dims[2] : spec.dims[1] * spec.dims[2];
  part.step_bytes = step * DTypeBits(spec.dtype) / 8;
  if (has_rows) {
    part.rows_axis = is_turned ? 2 : 1;
    spec.dims[1] = 1;
  }
  spec.dims[0] = 1;
  if (is_turned) spec = Turned(std::move(spec));
  return part;
}

}  // namespace

bool HasGroupSizes(const GraphSpec& graph) {
  if (graph.nodes.size() != 1) return false;
  const NodeSpec& node = graph.nodes.front();
  const bool is_grouped = node.kind == kForward || node.kind == kBackward;
  return is_grouped && node.inputs.find(kSizes) != node.inputs.end();
}

StatusOr<GroupLayout> ReadGroupLayout(const GraphSpec& graph) {
  const NodeSpec& node = graph.nodes.front();
  const auto name = [&](std::string_view role) -> const std::string& {
    const auto found = node.inputs.find(role);
    return found != node.inputs.end() ? found->second : node.outputs.find(role)->second;
  };
  GroupLayout layout;
  const auto sizes = std::find(graph.inputs.begin(), graph.inputs.end(), name(kSizes));
  layout.sizes = static_cast<size_t>(sizes - graph.inputs.begin());
  if (node.inputs.count(kStarts) > 0) {
    const auto starts =
        std::find(graph.inputs.begin(), graph.inputs.end(), name(kStarts));
    layout.starts = static_cast<size_t>(starts - graph.inputs.begin());
  }
  layout.rows = graph.Tensor(name("a")).dims[1];
  layout.groups = graph.Tensor(name("b")).dims[0];
  const auto rows = [&](std::string_view role, bool is_turned) {
    return PartOf(graph, name(role), /*has_rows=*/true, is_turned);
  };
  const auto matrix = [&](std::string_view role, bool is_turned) {
    return PartOf(graph, name(role), /*has_rows=*/false, is_turned);
  };
  const auto add = [&](StatusOr<Part> a, StatusOr<Part> b,
                       StatusOr<Part> output) -> Status {
    RETURN_IF_ERROR(a.status());
    RETURN_IF_ERROR(b.status());
    RETURN_IF_ERROR(output.status());
    layout.products.push_back({std::move(*a), std::move(*b), std::move(*output)});
    return {};
  };
  if (node.kind == kForward) {
    RETURN_IF_ERROR(add(rows("a", false), matrix("b", false), rows("output", false)));
    return layout;
  }
  if (node.outputs.find("grad_a") != node.outputs.end()) {
    RETURN_IF_ERROR(
        add(rows("grad_output", false), matrix("b", true), rows("grad_a", false)));
  }
  if (node.outputs.find("grad_b") != node.outputs.end()) {
    RETURN_IF_ERROR(
        add(rows("a", true), rows("grad_output", false), matrix("grad_b", false)));
  }
  return layout;
}

}  // namespace jax_cudnn
