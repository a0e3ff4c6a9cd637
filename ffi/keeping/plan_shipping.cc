// SPDX-License-Identifier: Apache-2.0
// Writing plans to plan files and reading them back.

#include "keeping/plan_shipping.h"

#include <utility>

#include "cudnn/cudnn_library.h"
#include "graph/graph_spec.h"
#include "keeping/build_site.h"
#include "keeping/plan_cache.h"
#include "keeping/plan_file.h"
#include "keeping/plan_store.h"

namespace jax_cudnn {
namespace {

StatusOr<std::string> Write(const PlanKey& key, const Plan& plan) {
  ASSIGN_OR_RETURN(std::string payload, plan.Serialize());
  return WritePlanFile({WriteKey(key), std::move(payload)});
}

// `here` is the key of the target, without graph and request.
StatusOr<ImportedPlan> Read(const PlanFile& file, const PlanKey& here,
                            const PlanTarget& target) {
  ASSIGN_OR_RETURN(PlanKey made, ReadKey(file.key));
  RETURN_IF_ERROR(CheckSameMachine(made, here));
  ASSIGN_OR_RETURN(const GraphSpec graph, ParseGraph(made.graph));
  ImportedPlan result;
  ASSIGN_OR_RETURN(result.plan, Plan::Deserialize(graph, file.payload, target));
  result.text = std::move(made.graph);
  result.request = std::move(made.request);
  return result;
}

}  // namespace

StatusOr<std::string> ExportPlan(const std::string& text, const std::string& request,
                                 int device) {
  ASSIGN_OR_RETURN(const GraphSpec graph, ParseGraph(text));
  ASSIGN_OR_RETURN(const auto plan,
                   PlanCache::Global().GetOrBuild(text, graph, request, device));
  ASSIGN_OR_RETURN(const BuildSite site, BuildSite::Enter(device));
  return Write(site.KeyOf(text, request), *plan);
}

StatusOr<std::string> ExportPlanOffline(const std::string& text,
                                        const std::string& request,
                                        const PlanTarget& target,
                                        const std::string& gpu) {
  ASSIGN_OR_RETURN(const GraphSpec graph, ParseGraph(text));
  ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
  ASSIGN_OR_RETURN(const auto plan, Plan::Build(graph, request, target));
  PlanKey key = TargetKey(*runtime, target);
  key.graph = text;
  key.request = request;
  key.gpu = gpu;
  return Write(key, *plan);
}

StatusOr<ImportedPlan> ImportPlan(const std::string& bytes, int device, bool is_kept) {
  ASSIGN_OR_RETURN(const BuildSite site, BuildSite::Enter(device));
  ASSIGN_OR_RETURN(const PlanFile file, ReadPlanFile(bytes));
  ASSIGN_OR_RETURN(ImportedPlan read, Read(file, site.KeyOf("", ""), site.target()));
  if (PlanStore& store = PlanStore::Global(); is_kept && store.is_on()) {
    store.Save(WriteKey(site.KeyOf(read.text, read.request)), file.payload);
  }
  read.plan = PlanCache::Global().Insert(read.text, read.request, device, read.plan);
  return read;
}

StatusOr<ImportedPlan> ImportPlanOffline(const std::string& bytes,
                                         const PlanTarget& target,
                                         const std::string& gpu) {
  ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
  PlanKey here = TargetKey(*runtime, target);
  here.gpu = gpu;
  ASSIGN_OR_RETURN(const PlanFile file, ReadPlanFile(bytes));
  return Read(file, here, target);
}

}  // namespace jax_cudnn
