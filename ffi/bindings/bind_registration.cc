// SPDX-License-Identifier: Apache-2.0
// What jax.ffi registers, and what the extension was compiled with. Needs no library.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings/bindings.h"
#include "frontend/versions.h"
#include "handler/graph_handler.h"
#include "keeping/plan_file.h"

namespace nb = nanobind;

namespace jax_cudnn {
namespace {

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

nb::dict BuildInfo() {
  nb::dict result;
  const PlanKey local = LocalKey();
  result["builder"] = local.builder;
  result["cpu"] = local.cpu;
  result["frontend_version"] = FrontendVersion();
  result["cudnn_header_version"] = CudnnHeaderVersion();
  result["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  return result;
}

}  // namespace

void BindRegistration(nb::module_& m) {
  m.def("state_type", StateType);
  m.def("captured_handlers", [] { return ToDict(CapturedHandlers()); });
  m.def("scratch_handlers", [] { return ToDict(ScratchHandlers()); });

  m.def("build_info", BuildInfo);
}

}  // namespace jax_cudnn
