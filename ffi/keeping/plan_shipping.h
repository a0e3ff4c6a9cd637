// SPDX-License-Identifier: Apache-2.0
// Plans that travel: out of one process as a plan file, into another one on request.

#ifndef JAX_CUDNN_PLAN_SHIPPING_H_
#define JAX_CUDNN_PLAN_SHIPPING_H_

#include <memory>
#include <string>

#include "base/status.h"
#include "plans/plan.h"

namespace jax_cudnn {

// The plan file of a graph on a device of this machine, built if need be.
StatusOr<std::string> ExportPlan(const std::string& text, const std::string& request,
                                 int device);

// The same for a described device, which need not be there; `gpu` is its name.
StatusOr<std::string> ExportPlanOffline(const std::string& text,
                                        const std::string& request,
                                        const PlanTarget& target,
                                        const std::string& gpu);

// A plan that was read, with what it is for.
struct ImportedPlan {
  std::string text;
  std::string request;
  std::shared_ptr<const Plan> plan;
};

// Reads a plan file and puts its plan into the cache for a device of this machine,
// unless there is one already. FAILED_PRECONDITION, naming what differs, for a plan
// that was made for or with something else; INVALID_ARGUMENT for a file that is not
// whole. The file holds code that will run: it must come from someone trusted. If
// `is_kept`, the plan goes into the store as well, as one that is built does.
StatusOr<ImportedPlan> ImportPlan(const std::string& bytes, int device, bool is_kept);

// Reads a plan file for a described device. The plan goes nowhere.
StatusOr<ImportedPlan> ImportPlanOffline(const std::string& bytes,
                                         const PlanTarget& target,
                                         const std::string& gpu);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLAN_SHIPPING_H_
