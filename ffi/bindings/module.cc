// SPDX-License-Identifier: Apache-2.0
// The Python extension: its themes.

#include <nanobind/nanobind.h>

#include "bindings/bindings.h"

NB_MODULE(_ffi, m) {
  m.doc() = "cuDNN graphs for XLA: parsing, planning and the FFI handlers.";
  jax_cudnn::BindRegistration(m);
  jax_cudnn::BindLibrary(m);
  jax_cudnn::BindLog(m);
  jax_cudnn::BindPlanner(m);
  jax_cudnn::BindStore(m);

  nanobind::module_ testing = m.def_submodule("testing", "For the tests only.");
  jax_cudnn::BindTesting(testing);
}
