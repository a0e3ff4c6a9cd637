// SPDX-License-Identifier: Apache-2.0
// The Python extension: what the C++ side offers, as a table at the end of the file.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/guard.h"
#include "base/log.h"
#include "base/status.h"
#include "cudnn/cuda_device.h"
#include "cudnn/cudnn_library.h"
#include "cudnn/cudnn_log.h"
#include "graph/graph_spec.h"
#include "handler/graph_handler.h"
#include "handler/program_target.h"
#include "keeping/plan_cache.h"
#include "keeping/plan_file.h"
#include "keeping/plan_shipping.h"
#include "keeping/plan_store.h"
#include "plans/plan.h"
#include "plans/plan_request.h"
#include "plans/plan_timer.h"

namespace nb = nanobind;

namespace jax_cudnn {
namespace {

// --- errors -------------------------------------------------------------------------

// Splits "summary\n  - reason\n  - reason" for the exception that takes them apart.
std::pair<std::string, nb::list> SplitReasons(const std::string& message) {
  constexpr std::string_view kMark = "\n  - ";
  nb::list reasons;
  size_t end = message.find(kMark);
  const std::string summary = message.substr(0, end);
  while (end != std::string::npos) {
    const size_t start = end + kMark.size();
    end = message.find(kMark, start);
    reasons.append(message.substr(start, end == std::string::npos ? end : end - start));
  }
  return {summary, reasons};
}

nb::object ToException(const Status& status) {
  const auto plain = [&](const char* module, const char* name) {
    return nb::module_::import_(module).attr(name)(status.message());
  };
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
      return plain("jax_cudnn.errors", "GraphError");
    case StatusCode::kUnimplemented: {
      auto [summary, reasons] = SplitReasons(status.message());
      return nb::module_::import_("jax_cudnn.errors")
          .attr("UnsupportedError")(summary, reasons);
    }
    case StatusCode::kResourceExhausted:
      return plain("builtins", "MemoryError");
    case StatusCode::kFailedPrecondition:
      return plain("jax_cudnn.errors", "LibraryError");
    case StatusCode::kOk:
    case StatusCode::kInternal:
      break;
  }
  return plain("builtins", "RuntimeError");
}

[[noreturn]] void Raise(const Status& status) {
  const nb::object exception = ToException(status);
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
  throw nb::python_error();
}

// Calls `function` without the GIL and returns its value, or raises its status.
template <typename Function>
auto Call(const char* what, Function&& function) {
  auto result = [&] {
    const nb::gil_scoped_release release;
    const DeferredLog deferred;
    return Guard(what, std::forward<Function>(function));
  }();
  if (!result.ok()) Raise(result.status());
  return std::move(*result);
}

// --- conversions --------------------------------------------------------------------

std::string Text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes ToBytes(const std::string& text) {
  return nb::bytes(text.data(), text.size());
}

nb::dict ToDict(const Candidate& candidate) {
  nb::dict knobs;
  for (const auto& [name, value] : candidate.knobs) knobs[name.c_str()] = value;
  nb::dict result;
  result["name"] = candidate.name;
  result["engine"] = candidate.engine;
  result["knobs"] = knobs;
  result["variant"] = candidate.variant;
  result["choice"] = candidate.choice;
  result["behavior_notes"] = candidate.behavior_notes;
  result["numeric_notes"] = candidate.numeric_notes;
  result["is_built"] = candidate.is_built;
  result["workspace_bytes"] = candidate.workspace_bytes;
  result["build_ms"] = candidate.build_ms;
  result["failure"] = candidate.failure;
  result["refusal"] = candidate.refusal;
  return result;
}

nb::dict ToDict(const std::vector<OpenLibrary>& libraries) {
  nb::dict paths;
  for (const OpenLibrary& library : libraries) {
    paths[library.soname.c_str()] = library.path;
  }
  return paths;
}

// --- the functions ------------------------------------------------------------------

std::string ParseGraphText(const nb::bytes& graph) {
  const std::string text = Text(graph);
  return Call("parsing a graph", [&]() -> StatusOr<std::string> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    return WriteGraph(spec);
  });
}

std::string ParseChoiceText(const nb::bytes& choice) {
  const std::string text = Text(choice);
  return Call("parsing a choice", [&]() -> StatusOr<std::string> {
    ASSIGN_OR_RETURN(const PlanRequest request, ParsePlanRequest(text));
    return text.empty() ? text : WritePlanRequest(request);
  });
}

void CheckProgramTarget(int64_t sm_version, int64_t cudnn_version, int here_sm_version,
                        int here_cudnn_version) {
  const Status status = [&]() -> Status {
    ASSIGN_OR_RETURN(const ProgramTarget target,
                     ReadProgramTarget(sm_version, cudnn_version));
    return CheckRunsOn(target, {here_sm_version, here_cudnn_version});
  }();
  if (!status.ok()) Raise(status);
}

nb::dict LoadLibraries() {
  const auto* runtime = Call("loading cuDNN", [] { return LoadCudnnRuntime(); });
  std::vector<OpenLibrary> libraries = runtime->companions;
  libraries.push_back(runtime->cudart);
  libraries.push_back(runtime->cudnn.library);
  return ToDict(libraries);
}

nb::dict CudnnVersion() {
  const auto* cudnn = Call("loading cuDNN", [] { return LoadCudnn(); });
  nb::dict result;
  result["version"] = cudnn->version;
  result["cuda_major"] = cudnn->cuda_major;
  result["path"] = cudnn->library.path;
  return result;
}

nb::dict PlanGraph(const nb::bytes& graph, const nb::bytes& choice, int device) {
  const std::string text = Text(graph);
  const std::string choice_text = Text(choice);
  const auto plan = Call("planning", [&]() -> StatusOr<std::shared_ptr<const Plan>> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    return PlanCache::Global().GetOrBuild(text, spec, choice_text, device);
  });
  nb::dict result = ToDict(plan->candidate());
  result["failures"] = plan->failures();
  return result;
}

nb::list PlanOffline(const nb::bytes& graph, const nb::bytes& choice,
                     const nb::bytes& device_properties, int sm_version, int sm_count,
                     bool build) {
  const std::string text = Text(graph);
  const std::string choice_text = Text(choice);
  PlanTarget target;
  target.device_properties = Text(device_properties);
  target.sm_version = sm_version;
  target.sm_count = sm_count;
  const auto candidates = Call("planning", [&]() -> StatusOr<std::vector<Candidate>> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    RETURN_IF_ERROR(LoadCudnnRuntime().status());
    return ListCandidates(spec, choice_text, target, build);
  });
  nb::list result;
  for (const Candidate& candidate : candidates) result.append(ToDict(candidate));
  return result;
}

nb::list ListCandidatesOn(const nb::bytes& graph, const nb::bytes& choice, int device) {
  const std::string text = Text(graph);
  const std::string choice_text = Text(choice);
  const auto candidates = Call("planning", [&]() -> StatusOr<std::vector<Candidate>> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    return ListDeviceCandidates(spec, choice_text, device);
  });
  nb::list result;
  for (const Candidate& candidate : candidates) result.append(ToDict(candidate));
  return result;
}

using Pointers = std::vector<uintptr_t>;

std::vector<void*> ToPointers(const Pointers& values) {
  std::vector<void*> pointers;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has addresses as integers
  for (uintptr_t value : values) pointers.push_back(reinterpret_cast<void*>(value));
  return pointers;
}

std::vector<double> TimeGraph(const nb::bytes& graph, const nb::bytes& choice,
                              int device,
                              const std::vector<std::pair<Pointers, Pointers>>& sets,
                              uintptr_t workspace, int launches, int samples) {
  const std::string text = Text(graph);
  const std::string choice_text = Text(choice);
  TimingRequest request;
  for (const auto& [operands, results] : sets) {
    request.sets.push_back({ToPointers(operands), ToPointers(results)});
  }
  request.workspace = ToPointers({workspace})[0];
  request.launches = launches;
  request.samples = samples;
  return Call("timing a plan", [&]() -> StatusOr<std::vector<double>> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    for (const LaunchBuffers& set : request.sets) {
      if (set.operands.size() != spec.inputs.size() ||
          set.results.size() != spec.outputs.size()) {
        return InvalidArgument("timing: a set has " +
                               std::to_string(set.operands.size()) + " operands and " +
                               std::to_string(set.results.size()) + " results");
      }
    }
    ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
    ASSIGN_OR_RETURN(const auto plan,
                     PlanCache::Global().GetOrBuild(text, spec, choice_text, device));
    return TimePlan(*plan, *runtime, device, request);
  });
}

nb::dict GetDeviceInfo(int device) {
  const DeviceInfo info = Call("asking for a device", [&]() -> StatusOr<DeviceInfo> {
    ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
    return QueryDevice(*runtime, device);
  });
  nb::dict result;
  result["name"] = info.name;
  result["sm_version"] = info.sm_version;
  result["sm_count"] = info.sm_count;
  return result;
}

std::string GetDeviceProperties(int device) {
  return Call("asking for a device", [&]() -> StatusOr<std::string> {
    ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
    RETURN_IF_ERROR(CheckDevice(*runtime, device));
    return DescribeDevice(device);
  });
}

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

// --- plans on disk and on the way ---------------------------------------------------

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

void StorePut(const nb::bytes& key, const nb::bytes& payload) {
  const std::string key_text = Text(key);
  const std::string payload_text = Text(payload);
  const nb::gil_scoped_release release;
  PlanStore::Global().Save(key_text, payload_text);
}

nb::object StoreGet(const nb::bytes& key) {
  const std::string key_text = Text(key);
  std::optional<std::string> payload;
  {
    const nb::gil_scoped_release release;
    payload = PlanStore::Global().Load(key_text);
  }
  if (!payload.has_value()) return nb::none();
  return ToBytes(*payload);
}

PlanTarget DescribedTarget(const nb::bytes& device_properties, int sm_version,
                           int sm_count) {
  PlanTarget target;
  target.device_properties = Text(device_properties);
  target.sm_version = sm_version;
  target.sm_count = sm_count;
  return target;
}

nb::bytes ExportPlanFile(const nb::bytes& graph, const nb::bytes& choice, int device) {
  const std::string text = Text(graph);
  const std::string choice_text = Text(choice);
  return ToBytes(
      Call("exporting a plan", [&] { return ExportPlan(text, choice_text, device); }));
}

nb::bytes ExportPlanFileOffline(const nb::bytes& graph, const nb::bytes& choice,
                                const nb::bytes& device_properties,
                                const std::string& gpu, int sm_version, int sm_count) {
  const std::string text = Text(graph);
  const std::string choice_text = Text(choice);
  const PlanTarget target = DescribedTarget(device_properties, sm_version, sm_count);
  return ToBytes(Call("exporting a plan", [&] {
    return ExportPlanOffline(text, choice_text, target, gpu);
  }));
}

nb::dict ToDict(const ImportedPlan& imported) {
  nb::dict result = ToDict(imported.plan->candidate());
  result["failures"] = imported.plan->failures();
  nb::dict answer;
  answer["graph"] = imported.text;
  answer["choice"] = imported.choice;
  answer["plan"] = result;
  return answer;
}

nb::dict ImportPlanFile(const nb::bytes& data, int device) {
  const std::string bytes = Text(data);
  return ToDict(Call("importing a plan", [&] { return ImportPlan(bytes, device); }));
}

nb::dict ImportPlanFileOffline(const nb::bytes& data,
                               const nb::bytes& device_properties,
                               const std::string& gpu, int sm_version, int sm_count) {
  const std::string bytes = Text(data);
  const PlanTarget target = DescribedTarget(device_properties, sm_version, sm_count);
  return ToDict(
      Call("importing a plan", [&] { return ImportPlanOffline(bytes, target, gpu); }));
}

nb::dict BuildInfo() {
  nb::dict result;
  result["builder"] = LocalKey().builder;
  result["frontend_version"] = FrontendVersion();
  result["cudnn_header_version"] = CudnnHeaderVersion();
  result["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  return result;
}

// --- the log ------------------------------------------------------------------------

const char* SourceName(LogSource source) {
  switch (source) {
    case LogSource::kOurs:
      return "jax_cudnn";
    case LogSource::kCudnn:
      return "cudnn";
  }
  return "";
}

// A sink that calls a Python object, from any thread.
std::shared_ptr<const LogSink> MakeSink(nb::object callable) {
  return std::make_shared<const LogSink>(
      [callable = std::move(callable)](LogSource source, LogLevel level,
                                       const std::string& line) {
        const nb::gil_scoped_acquire acquire;
        try {
          // cuDNN's texts may hold any bytes.
          const nb::object text = nb::steal(PyUnicode_DecodeUTF8(
              line.data(), static_cast<Py_ssize_t>(line.size()), "replace"));
          callable(static_cast<int>(level), text, SourceName(source));
        } catch (nb::python_error& error) {
          error.discard_as_unraisable(callable);
        }
      });
}

// The sink before, if any, is dropped here, where Python's lock is held again.
void SetSink(const nb::object& callable, int level, bool cudnn) {
  const auto chosen = static_cast<LogLevel>(level);
  const auto sink = callable.is_none() ? nullptr : MakeSink(callable);
  Call("setting where the log goes", [&]() -> StatusOr<std::shared_ptr<const LogSink>> {
    RETURN_IF_ERROR(StopCudnnLog());
    if (cudnn && sink != nullptr) {
      ASSIGN_OR_RETURN(const CudnnLibrary* library, LoadCudnn());
      RETURN_IF_ERROR(StartCudnnLog(*library, chosen));
    }
    return SetLogSink(sink, chosen);
  });
}

// --- registrations ------------------------------------------------------------------

nb::capsule HandlerCapsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict ToDict(const HandlerBundle& bundle) {
  nb::dict stages;
  stages["instantiate"] = HandlerCapsule(bundle.instantiate);
  stages["initialize"] = HandlerCapsule(bundle.initialize);
  stages["execute"] = HandlerCapsule(bundle.execute);
  return stages;
}

nb::dict StateType() {
  nb::dict type;
  type["type_id"] = nb::capsule(static_cast<void*>(StateTypeId()));
  type["type_info"] = nb::capsule(static_cast<const void*>(StateTypeInfo()));
  return type;
}

}  // namespace
}  // namespace jax_cudnn

NB_MODULE(_ffi, m) {
  using namespace jax_cudnn;  // NOLINT(google-build-using-namespace): a table
  m.doc() = "cuDNN graphs for XLA: parsing, planning and the FFI handlers.";

  // Data. Needs no library.
  m.def("parse_graph", ParseGraphText, nb::arg("graph"));
  m.def("parse_choice", ParseChoiceText, nb::arg("choice"));
  m.def("check_program_target", CheckProgramTarget, nb::arg("sm_version"),
        nb::arg("cudnn_version"), nb::arg("here_sm_version"),
        nb::arg("here_cudnn_version"));
  m.def("build_info", BuildInfo);

  // The log.
  m.def("set_log_sink", SetSink, nb::arg("sink").none(), nb::arg("level"),
        nb::arg("cudnn"));

  // What jax.ffi registers. Needs no library.
  m.def("state_type", StateType);
  m.def("captured_handlers", [] { return ToDict(CapturedHandlers()); });
  m.def("scratch_handlers", [] { return ToDict(ScratchHandlers()); });

  // Libraries.
  m.def("set_library_directories", SetLibraryDirectories, nb::arg("directories"));
  m.def("load_libraries", LoadLibraries);
  m.def("cudnn_version", CudnnVersion);

  // Devices.
  m.def("device_info", GetDeviceInfo, nb::arg("device"));
  m.def("device_properties", GetDeviceProperties, nb::arg("device"));

  // Plans.
  m.def("plan", PlanGraph, nb::arg("graph"), nb::arg("choice"), nb::arg("device"));
  m.def("list_candidates", ListCandidatesOn, nb::arg("graph"), nb::arg("choice"),
        nb::arg("device"));
  m.def("plan_offline", PlanOffline, nb::arg("graph"), nb::arg("choice"),
        nb::arg("device_properties"), nb::arg("sm_version"), nb::arg("sm_count"),
        nb::arg("build"));
  m.def("time_plan", TimeGraph, nb::arg("graph"), nb::arg("choice"), nb::arg("device"),
        nb::arg("sets"), nb::arg("workspace"), nb::arg("launches"), nb::arg("samples"));
  m.def("cache_stats", CacheStats);
  m.def("clear_cache", [] { PlanCache::Global().Clear(); });

  // Plans on disk and on the way.
  m.def("set_plan_store", SetPlanStore, nb::arg("directory"), nb::arg("limit_bytes"));
  m.def("set_plan_store_source", SetPlanStoreSource, nb::arg("source"));
  m.def("plan_store_files", PlanStoreFiles);
  m.def("clear_plan_store", [] {
    const nb::gil_scoped_release release;
    PlanStore::Global().Clear();
  });
  m.def("store_put", StorePut, nb::arg("key"), nb::arg("payload"));
  m.def("store_get", StoreGet, nb::arg("key"));
  m.def("export_plan", ExportPlanFile, nb::arg("graph"), nb::arg("choice"),
        nb::arg("device"));
  m.def("export_plan_offline", ExportPlanFileOffline, nb::arg("graph"),
        nb::arg("choice"), nb::arg("device_properties"), nb::arg("gpu"),
        nb::arg("sm_version"), nb::arg("sm_count"));
  m.def("import_plan", ImportPlanFile, nb::arg("data"), nb::arg("device"));
  m.def("import_plan_offline", ImportPlanFileOffline, nb::arg("data"),
        nb::arg("device_properties"), nb::arg("gpu"), nb::arg("sm_version"),
        nb::arg("sm_count"));
}
