// SPDX-License-Identifier: Apache-2.0
// Plans as bytes: writing them down, and taking them up again.
//
// The plan's record, then the frontend's bytes, or cuBLASLt's algorithm.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/guard.h"
#include "blas/blas_engines.h"
#include "candidates/launchable_graph.h"
#include "frontend/device_properties.h"
#include "frontend/frontend_status.h"
#include "groups/group_products.h"
#include "plans/causal_conv.h"
#include "plans/plan.h"
#include "plans/plan_record.h"
#include "plans/rehearsal.h"

namespace jax_cudnn {

namespace fe = cudnn_frontend;

StatusOr<std::string> Plan::Serialize() const {
  return Guard("writing a plan", [&]() -> StatusOr<std::string> {
    ASSIGN_OR_RETURN(const std::string data, launchable_->Serialize());
    return WritePlanRecord(candidate_, failures_) + data;
  });
}

StatusOr<std::shared_ptr<const Plan>> Plan::Deserialize(const GraphSpec& graph,
                                                        const std::string& bytes,
                                                        const PlanTarget& target) {
  using Result = StatusOr<std::shared_ptr<const Plan>>;
  return Guard("reading a plan", [&]() -> Result {
    std::string_view rest = bytes;
    ASSIGN_OR_RETURN(PlanRecord record, TakePlanRecord(rest));
    Candidate& candidate = record.candidate;
    // They are made in no time: matmuls that are not compiled, and a function's call.
    if (GroupProducts::Covers(graph) || CausalConv::Covers(graph)) {
      return Build(graph, candidate.request, target);
    }
    if (candidate.engine == kCublasLtEngine) {
      if (target.handle == nullptr) {
        return Unimplemented("a plan of cuBLASLt's is read where the GPU is");
      }
      const BlasEngine& engine = kBlasGroups.covers(graph) ? kBlasGroups : kBlasProduct;
      ASSIGN_OR_RETURN(auto launchable, engine.read(graph, rest, candidate));
      std::shared_ptr<const Plan> plan(new Plan(
          std::move(launchable), std::move(candidate), std::move(record.failures)));
      RETURN_IF_ERROR(Rehearse(*plan, target));
      return plan;
    }
    const std::vector<uint8_t> data(rest.begin(), rest.end());
    const auto frontend_graph = std::make_shared<FrontendGraph>();
    fe::error_t error;
    if (target.handle == nullptr) {
      ASSIGN_OR_RETURN(auto properties, ReadDeviceProperties(target.device_properties));
      frontend_graph->set_device_properties(std::move(properties));
      error = frontend_graph->deserialize(data, /*enforce_precompiled=*/true);
    } else {
      // No warm-up: it would launch on made-up pointers in a capture of its own.
      error = frontend_graph->deserialize(target.handle, data,
                                          /*enforce_precompiled=*/true,
                                          /*run_warmup=*/false);
    }
    if (error.is_bad()) return Internal(Message(error));
    int64_t workspace_bytes = 0;
    if (const auto asked = frontend_graph->get_workspace_size(workspace_bytes);
        asked.is_bad()) {
      return Internal(Message(asked));
    }
    // Some convolutions need less than they were written with (cuDNN 9.19, H200).
    if (workspace_bytes > candidate.workspace_bytes) {
      return Internal("the plan needs " + std::to_string(workspace_bytes) +
                      " bytes of workspace, and " +
                      std::to_string(candidate.workspace_bytes) +
                      " when it was written");
    }
    ASSIGN_OR_RETURN(auto launchable, LaunchableGraph::Make(graph, frontend_graph));
    std::shared_ptr<const Plan> plan(new Plan(
        std::move(launchable), std::move(candidate), std::move(record.failures)));
    RETURN_IF_ERROR(Rehearse(*plan, target));
    return plan;
  });
}

}  // namespace jax_cudnn
