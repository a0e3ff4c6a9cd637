// SPDX-License-Identifier: Apache-2.0
// Candidates and plans as dicts of Python.

#include "bindings/conversions.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace jax_cudnn {

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
  result["request"] = candidate.request;
  result["behavior_notes"] = candidate.behavior_notes;
  result["numeric_notes"] = candidate.numeric_notes;
  result["is_built"] = candidate.is_built;
  result["workspace_bytes"] = candidate.workspace_bytes;
  result["build_ms"] = candidate.build_ms;
  result["failure"] = candidate.failure;
  result["refusal"] = candidate.refusal;
  return result;
}

nb::dict ToDict(const Plan& plan) {
  nb::dict result = ToDict(plan.candidate());
  result["failures"] = plan.failures();
  return result;
}

PlanTarget DescribedTarget(const nb::bytes& device_properties, int sm_version,
                           int sm_count) {
  PlanTarget target;
  target.device_properties = Text(device_properties);
  target.sm_version = sm_version;
  target.sm_count = sm_count;
  return target;
}

}  // namespace jax_cudnn
