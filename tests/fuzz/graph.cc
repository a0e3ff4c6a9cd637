// SPDX-License-Identifier: Apache-2.0
// Reads any bytes as a graph, and asks of one that is taken what planning asks.

#include "fuzzing.h"
#include "graph/graph_spec.h"
#include "graph/node_kinds.h"

namespace jax_cudnn {
namespace {

void Use(const TensorSpec& tensor) {
  const size_t rank = tensor.dims.size();
  Require(tensor.StoredShape().size() == rank, "a stored shape has the rank");
  Require(tensor.Strides().size() == rank, "there is a stride for each axis");
  static_cast<void>(tensor.IsEmpty());
}

}  // namespace
}  // namespace jax_cudnn

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_cudnn;  // NOLINT(google-build-using-namespace)
  const std::string_view text = Text(data, size);
  const auto graph = ParseGraph(text);
  if (!graph.ok()) {
    RequireRefusal(graph.status());
    return 0;
  }
  Require(WriteGraph(*graph) == text, "a graph that is taken is canonical");
  for (const TensorSpec& tensor : graph->tensors) Use(tensor);
  for (const NodeSpec& node : graph->nodes) {
    Require(FindNodeKind(node.kind) != nullptr, "the kind of a node is known");
    for (const auto* roles : {&node.inputs, &node.outputs}) {
      for (const auto& [role, name] : *roles) Use(graph->Tensor(name));
    }
  }
  return 0;
}
