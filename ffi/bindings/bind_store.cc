// SPDX-License-Identifier: Apache-2.0
// The process's plan cache, the plan store behind it, and plan files.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <utility>

#include "base/status.h"
#include "bindings/bindings.h"
#include "bindings/calls.h"
#include "bindings/conversions.h"
#include "candidates/plan_target.h"
#include "keeping/plan_cache.h"
#include "keeping/plan_shipping.h"
#include "keeping/plan_store.h"

namespace nb = nanobind;

namespace jax_cudnn {
namespace {

nb::dict CacheStats() {
  const PlanCacheStats stats = PlanCache::Global().stats();
  nb::dict result;
  result["entries"] = stats.entries;
  result["builds"] = stats.builds;
  result["hits"] = stats.hits;
  result["disk_hits"] = stats.store.hits;
  result["disk_misses"] = stats.store.misses;
  result["disk_writes"] = stats.store.writes;
  result["disk_failures"] = stats.store.failures;
  result["disk_last_failure"] = ToBytes(stats.store.last_failure);
  return result;
}

void SetPlanStore(const nb::bytes& directory, int64_t limit_bytes) {
  PlanStoreSettings settings{Text(directory), limit_bytes};
  const nb::gil_scoped_release release;
  PlanStore::Global().Configure(std::move(settings));
}

// `source` is called once, by the thread that plans first, which may be one of XLA's.
void SetPlanStoreSource(const nb::callable& source) {
  // Leaked: it may be called until the process ends.
  static auto& kept = *new nb::callable;
  kept = source;
  const nb::gil_scoped_release release;
  PlanStore::Global().SetSource([]() -> StatusOr<PlanStoreSettings> {
    if (Py_IsInitialized() == 0) return Internal("Python is gone");
    const nb::gil_scoped_acquire acquire;
    try {
      const auto answer = nb::cast<std::pair<nb::bytes, int64_t>>(kept());
      return PlanStoreSettings{Text(answer.first), answer.second};
    } catch (const nb::python_error& error) {
      return Internal(nb::str(error.value()).c_str());
    }
  });
}

std::pair<int64_t, int64_t> PlanStoreFiles() {
  const nb::gil_scoped_release release;
  const PlanStoreUsage usage = PlanStore::Global().Usage();
  return {usage.files, usage.bytes};
}

nb::dict ToDict(const ImportedPlan& imported) {
  nb::dict answer;
  answer["graph"] = imported.text;
  answer["request"] = imported.request;
  answer["plan"] = ToDict(*imported.plan);
  return answer;
}

nb::bytes ExportPlanFile(const nb::bytes& graph, const nb::bytes& request, int device) {
  const std::string text = Text(graph);
  const std::string request_text = Text(request);
  return ToBytes(
      Call("exporting a plan", [&] { return ExportPlan(text, request_text, device); }));
}

nb::bytes ExportPlanFileOffline(const nb::bytes& graph, const nb::bytes& request,
                                const nb::bytes& device_properties,
                                const std::string& gpu, int sm_version, int sm_count) {
  const std::string text = Text(graph);
  const std::string request_text = Text(request);
  const PlanTarget target = DescribedTarget(device_properties, sm_version, sm_count);
  return ToBytes(Call("exporting a plan", [&] {
    return ExportPlanOffline(text, request_text, target, gpu);
  }));
}

nb::dict ImportPlanFile(const nb::bytes& data, int device, bool keep) {
  const std::string bytes = Text(data);
  return ToDict(
      Call("importing a plan", [&] { return ImportPlan(bytes, device, keep); }));
}

nb::dict ImportPlanFileOffline(const nb::bytes& data,
                               const nb::bytes& device_properties,
                               const std::string& gpu, int sm_version, int sm_count) {
  const std::string bytes = Text(data);
  const PlanTarget target = DescribedTarget(device_properties, sm_version, sm_count);
  return ToDict(
      Call("importing a plan", [&] { return ImportPlanOffline(bytes, target, gpu); }));
}

}  // namespace

void BindStore(nb::module_& m) {
  m.def("cache_stats", CacheStats);
  m.def("clear_cache", [] { PlanCache::Global().Clear(); });

  m.def("set_plan_store", SetPlanStore, nb::arg("directory"), nb::arg("limit_bytes"));
  m.def("set_plan_store_source", SetPlanStoreSource, nb::arg("source"));
  m.def("plan_store_files", PlanStoreFiles);
  m.def("clear_plan_store", [] {
    const nb::gil_scoped_release release;
    PlanStore::Global().Clear();
  });

  m.def("export_plan", ExportPlanFile, nb::arg("graph"), nb::arg("request"),
        nb::arg("device"));
  m.def("export_plan_offline", ExportPlanFileOffline, nb::arg("graph"),
        nb::arg("request"), nb::arg("device_properties"), nb::arg("gpu"),
        nb::arg("sm_version"), nb::arg("sm_count"));
  m.def("import_plan", ImportPlanFile, nb::arg("data"), nb::arg("device"),
        nb::arg("keep"));
  m.def("import_plan_offline", ImportPlanFileOffline, nb::arg("data"),
        nb::arg("device_properties"), nb::arg("gpu"), nb::arg("sm_version"),
        nb::arg("sm_count"));
}

}  // namespace jax_cudnn
