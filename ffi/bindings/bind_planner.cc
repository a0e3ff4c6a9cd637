// SPDX-License-Identifier: Apache-2.0
// Asking for plans and candidates, and timing plans.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bindings/bindings.h"
#include "bindings/calls.h"
#include "bindings/conversions.h"
#include "blas/blas_engines.h"
#include "candidates/plan_target.h"
#include "cudnn/cudnn_library.h"
#include "graph/graph_spec.h"
#include "keeping/plan_cache.h"
#include "plans/plan.h"
#include "plans/plan_timer.h"

namespace nb = nanobind;

namespace jax_cudnn {
namespace {

nb::list ToList(const std::vector<Candidate>& candidates) {
  nb::list result;
  for (const Candidate& candidate : candidates) result.append(ToDict(candidate));
  return result;
}

nb::dict PlanGraph(const nb::bytes& graph, const nb::bytes& request, int device) {
  const std::string text = Text(graph);
  const std::string request_text = Text(request);
  const auto plan = Call("planning", [&]() -> StatusOr<std::shared_ptr<const Plan>> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    return PlanCache::Global().GetOrBuild(text, spec, request_text, device);
  });
  return ToDict(*plan);
}

nb::list ListCandidatesOn(const nb::bytes& graph, const nb::bytes& request,
                          int device) {
  const std::string text = Text(graph);
  const std::string request_text = Text(request);
  const auto candidates = Call("planning", [&]() -> StatusOr<std::vector<Candidate>> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    return ListDeviceCandidates(spec, request_text, device);
  });
  return ToList(candidates);
}

nb::list PlanOffline(const nb::bytes& graph, const nb::bytes& request,
                     const nb::bytes& device_properties, int sm_version, int sm_count,
                     bool build) {
  const std::string text = Text(graph);
  const std::string request_text = Text(request);
  const PlanTarget target = DescribedTarget(device_properties, sm_version, sm_count);
  const auto candidates = Call("planning", [&]() -> StatusOr<std::vector<Candidate>> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    RETURN_IF_ERROR(LoadCudnnRuntime().status());
    return ListCandidates(spec, request_text, target, build);
  });
  return ToList(candidates);
}

bool HasBlasProduct(const nb::bytes& graph) {
  const std::string text = Text(graph);
  return Call("reading a graph", [&]() -> StatusOr<bool> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    return kBlasProduct.covers(spec);
  });
}

using Pointers = std::vector<uintptr_t>;

std::vector<void*> ToPointers(const Pointers& values) {
  std::vector<void*> pointers;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has addresses as integers
  for (uintptr_t value : values) pointers.push_back(reinterpret_cast<void*>(value));
  return pointers;
}

std::vector<double> TimeGraph(const nb::bytes& graph, const nb::bytes& request,
                              int device,
                              const std::vector<std::pair<Pointers, Pointers>>& sets,
                              uintptr_t workspace, int launches, int samples) {
  const std::string text = Text(graph);
  const std::string request_text = Text(request);
  TimingSettings settings;
  for (const auto& [operands, results] : sets) {
    settings.sets.push_back({ToPointers(operands), ToPointers(results)});
  }
  settings.workspace = ToPointers({workspace})[0];
  settings.launches = launches;
  settings.samples = samples;
  return Call("timing a plan", [&]() -> StatusOr<std::vector<double>> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    for (const LaunchBuffers& set : settings.sets) {
      if (set.operands.size() != spec.inputs.size() ||
          set.results.size() != spec.outputs.size()) {
        return InvalidArgument("timing: a set has " +
                               std::to_string(set.operands.size()) + " operands and " +
                               std::to_string(set.results.size()) + " results");
      }
    }
    ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
    ASSIGN_OR_RETURN(const auto plan,
                     PlanCache::Global().GetOrBuild(text, spec, request_text, device));
    return TimePlan(*plan, *runtime, device, settings);
  });
}

}  // namespace

void BindPlanner(nb::module_& m) {
  m.def("plan", PlanGraph, nb::arg("graph"), nb::arg("request"), nb::arg("device"));
  m.def("list_candidates", ListCandidatesOn, nb::arg("graph"), nb::arg("request"),
        nb::arg("device"));
  m.def("plan_offline", PlanOffline, nb::arg("graph"), nb::arg("request"),
        nb::arg("device_properties"), nb::arg("sm_version"), nb::arg("sm_count"),
        nb::arg("build"));
  m.def("has_blas_product", HasBlasProduct, nb::arg("graph"));
  m.attr("CUBLASLT_ENGINE") = kCublasLtEngine;
  m.attr("CAUSAL_CONV_ENGINE") = kCausalConvEngine;
  m.def("time_plan", TimeGraph, nb::arg("graph"), nb::arg("request"), nb::arg("device"),
        nb::arg("sets"), nb::arg("workspace"), nb::arg("launches"), nb::arg("samples"));
}

}  // namespace jax_cudnn
