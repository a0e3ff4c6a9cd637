// SPDX-License-Identifier: Apache-2.0
// What the tests ask of single parts; nothing of the package does.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "bindings/bindings.h"
#include "bindings/calls.h"
#include "bindings/conversions.h"
#include "candidates/plan_request.h"
#include "graph/graph_spec.h"
#include "handler/program_target.h"
#include "keeping/plan_store.h"

namespace nb = nanobind;

namespace jax_cudnn {
namespace {

std::string ParseGraphText(const nb::bytes& graph) {
  const std::string text = Text(graph);
  return Call("parsing a graph", [&]() -> StatusOr<std::string> {
    ASSIGN_OR_RETURN(const GraphSpec spec, ParseGraph(text));
    return WriteGraph(spec);
  });
}

std::string ParseRequestText(const nb::bytes& request) {
  const std::string text = Text(request);
  return Call("parsing a request", [&]() -> StatusOr<std::string> {
    ASSIGN_OR_RETURN(const PlanRequest parsed, ParsePlanRequest(text));
    return text.empty() ? text : WritePlanRequest(parsed);
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

}  // namespace

void BindTesting(nb::module_& m) {
  m.def("parse_graph", ParseGraphText, nb::arg("graph"));
  m.def("parse_request", ParseRequestText, nb::arg("request"));
  m.def("check_program_target", CheckProgramTarget, nb::arg("sm_version"),
        nb::arg("cudnn_version"), nb::arg("here_sm_version"),
        nb::arg("here_cudnn_version"));
  m.def("store_put", StorePut, nb::arg("key"), nb::arg("payload"));
  m.def("store_get", StoreGet, nb::arg("key"));
}

}  // namespace jax_cudnn
