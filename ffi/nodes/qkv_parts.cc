// SPDX-License-Identifier: Apache-2.0
// Where queries, keys and values lie within one array.

#include "nodes/qkv_parts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jax_cudnn {
namespace {

using NodeRoles = std::map<std::string, std::string, std::less<>>;

// The axes of qkv: batch, parts, heads of a part, tokens, head size.
constexpr size_t kBatch = 0;
constexpr size_t kParts = 1;
constexpr size_t kHeads = 2;
constexpr size_t kTokens = 3;
constexpr size_t kHeadSize = 4;

// How many of the parts are queries, and how many are keys and values each.
struct PartCounts {
  int64_t queries;
  int64_t keys;
};

StatusOr<PartCounts> CountParts(const NodeSpec& node, const TensorSpec& qkv,
                                const TensorSpec& output) {
  const int64_t parts = qkv.dims[kParts];
  const int64_t heads = qkv.dims[kHeads];
  const int64_t queries = output.dims[1] / std::max<int64_t>(heads, 1);
  const int64_t keys = (parts - queries) / 2;
  if (keys < 1 || queries + 2 * keys != parts || queries % keys != 0) {
    return Unimplemented(node.kind + ": " + std::to_string(parts) + " parts are not " +
                         std::to_string(queries) +
                         " for queries and as many for keys as for values");
  }
  // The heads of several parts of several heads have no common stride.
  if (heads != 1 && parts != 3) {
    return Unimplemented(node.kind + ": " + std::to_string(parts) + " parts of " +
                         std::to_string(heads) +
                         " heads; cuDNN takes 3 parts, or parts of one head");
  }
  return PartCounts{queries, keys};
}

// The tensor of `count` parts from `first` on, with heads in place of parts.
TensorSpec PartOf(const TensorSpec& whole, std::string name, int64_t first,
                  int64_t count) {
  const std::vector<int64_t> strides = whole.Strides();
  TensorSpec part;
  part.name = std::move(name);
  part.dtype = whole.dtype;
  part.dims = {whole.dims[kBatch], count * whole.dims[kHeads], whole.dims[kTokens],
               whole.dims[kHeadSize]};
  part.order = {0, 1, 2, 3};
  part.within =
      TensorPlace{whole.name,
                  first * strides[kParts],
                  {strides[kBatch], count == 1 ? strides[kHeads] : strides[kParts],
                   strides[kTokens], strides[kHeadSize]}};
  return part;
}

// Puts parts in the place of a role such as "qkv" or "grad_qkv".
void Divide(GraphSpec& graph, NodeRoles& roles, const std::string& prefix,
            const PartCounts& counts) {
  const auto found = roles.find(prefix + "qkv");
  if (found == roles.end()) return;
  const TensorSpec whole = graph.Tensor(found->second);
  roles.erase(found);
  const struct {
    const char* role;
    int64_t first;
    int64_t count;
  } parts[] = {{"query", 0, counts.queries},
               {"key", counts.queries, counts.keys},
               {"value", counts.queries + counts.keys, counts.keys}};
  for (const auto& [role, first, count] : parts) {
    std::string name = whole.name + "_" + role;
    while (graph.IndexOf(name) >= 0) name += '_';
    roles[prefix + role] = name;
    graph.tensors.push_back(PartOf(whole, std::move(name), first, count));
    std::sort(graph.tensors.begin(), graph.tensors.end(),
              [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  }
}

}  // namespace

StatusOr<GraphSpec> WithQkvParts(GraphSpec graph) {
  std::vector<NodeSpec> nodes = graph.nodes;
  for (NodeSpec& node : nodes) {
    const auto qkv = node.inputs.find("qkv");
    if (qkv == node.inputs.end()) continue;
    // The gradient reads it as well.
    const auto output = node.outputs.find("output");
    const std::string& name = output == node.outputs.end()
                                  ? node.inputs.find("output")->second
                                  : output->second;
    const int64_t tokens = graph.Tensor(qkv->second).dims[kTokens];
    if (const auto bias = node.inputs.find("bias"); bias != node.inputs.end()) {
      if (const int64_t keys = graph.Tensor(bias->second).dims[3]; keys != tokens) {
        return Unimplemented(node.kind + ": bias is for " + std::to_string(keys) +
                             " keys, but there are " + std::to_string(tokens));
      }
    }
    ASSIGN_OR_RETURN(const PartCounts counts,
                     CountParts(node, graph.Tensor(qkv->second), graph.Tensor(name)));
    Divide(graph, node.inputs, "", counts);
    Divide(graph, node.outputs, "grad_", counts);
  }
  graph.nodes = std::move(nodes);
  return graph;
}

}  // namespace jax_cudnn
