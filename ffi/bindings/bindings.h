// SPDX-License-Identifier: Apache-2.0
// The functions of the Python module, by theme: each adds those of one theme.

#ifndef JAX_CUDNN_BINDINGS_H_
#define JAX_CUDNN_BINDINGS_H_

#include <nanobind/nanobind.h>

namespace jax_cudnn {

void BindLibrary(nanobind::module_& m);
void BindLog(nanobind::module_& m);
void BindPlanner(nanobind::module_& m);
void BindRegistration(nanobind::module_& m);
void BindStore(nanobind::module_& m);
void BindTesting(nanobind::module_& m);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_BINDINGS_H_
