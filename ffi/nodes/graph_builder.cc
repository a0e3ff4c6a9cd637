// SPDX-License-Identifier: Apache-2.0
// The table of builders by node kind, and the walk over a graph's nodes.

#include "nodes/graph_builder.h"

#include <algorithm>
#include <string_view>

#include "frontend/node_writer.h"
#include "nodes/contraction_builder.h"
#include "nodes/norm_builder.h"
#include "nodes/pointwise_builder.h"
#include "nodes/qkv_parts.h"
#include "nodes/resample_builder.h"
#include "nodes/sdpa_builder.h"

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;

struct KindBuilder {
  std::string_view kind;
  int variants;
  Status (*add)(NodeWriter&);
};

constexpr KindBuilder kBuilders[] = {
    {"adaptive_layer_norm", 1, AddAdaptiveLayerNorm},
    {"adaptive_layer_norm_backward", 1, AddAdaptiveLayerNormBackward},
    {"avg_pool", 1, AddAvgPool},
    {"avg_pool_backward", 1, AddAvgPoolBackward},
    {"batch_norm", 1, AddBatchNorm},
    {"batch_norm_backward", 1, AddBatchNormBackward},
    {"block_scaled_matmul", 1, AddBlockScaledMatmul},
    {"constant", 1, AddConstant},
    {"conv_dgrad", 1, AddConvDgrad},
    {"conv_fprop", 1, AddConvFprop},
    {"conv_wgrad", 1, AddConvWgrad},
    {"group_norm", 1, AddGroupNorm},
    {"group_norm_backward", 1, AddGroupNormBackward},
    {"grouped_matmul", 1, AddGroupedMatmul},
    {"layer_norm", 1, AddLayerNorm},
    {"layer_norm_backward", 1, AddLayerNormBackward},
    {"matmul", 1, AddMatmul},
    {"max_pool", 1, AddMaxPool},
    {"pointwise", 1, AddPointwise},
    {"reduction", 1, AddReduction},
    {"rms_norm", 1, AddRmsNorm},
    {"rms_norm_backward", 1, AddRmsNormBackward},
    {"sdpa", 2, AddSdpa},
    {"sdpa_backward", 1, AddSdpaBackward},
    {"sdpa_cached", 2, AddSdpaCached},
    {"sdpa_f8", 1, AddSdpaF8},
};

const KindBuilder* FindBuilder(std::string_view kind) {
  for (const KindBuilder& builder : kBuilders) {
    if (builder.kind == kind) return &builder;
  }
  return nullptr;
}

}  // namespace

int VariantCount(const GraphSpec& graph) {
  int count = 1;
  for (const NodeSpec& node : graph.nodes) {
    const KindBuilder* builder = FindBuilder(node.kind);
    if (builder != nullptr) count = std::max(count, builder->variants);
  }
  return count;
}

StatusOr<std::unique_ptr<FrontendGraph>> BuildFrontendGraph(const GraphSpec& graph,
                                                            const GraphStyle& style) {
  for (const TensorSpec& tensor : graph.tensors) {
    if (tensor.IsEmpty()) {
      return Unimplemented("tensor '" + tensor.name + "' with dims " +
                           ListText(tensor.dims) +
                           " has no elements; such a graph must not reach cuDNN");
    }
  }
  auto result = std::make_unique<FrontendGraph>();
  // Before any node: a node copies what the graph knows of the device.
  if (style.device_properties != nullptr) {
    result->set_device_properties(style.device_properties);
  }
  result->set_sm_version(style.sm_version);
  if (style.sm_count > 0) result->set_sm_count(style.sm_count);
  result->set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  ASSIGN_OR_RETURN(const GraphSpec divided, WithQkvParts(graph));
  NodeWriter writer(divided, *result, style);
  for (const NodeSpec& node : divided.nodes) {
    const KindBuilder* builder = FindBuilder(node.kind);
    if (builder == nullptr) {
      return Unimplemented("node kind '" + node.kind + "' has no cuDNN operation");
    }
    writer.Enter(node);
    RETURN_IF_ERROR(builder->add(writer));
  }
  return result;
}

}  // namespace jax_cudnn
