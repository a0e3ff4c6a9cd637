// SPDX-License-Identifier: Apache-2.0
// One way of writing a graph, with cuDNN's list of candidates for it.

#ifndef JAX_CUDNN_ATTEMPT_H_
#define JAX_CUDNN_ATTEMPT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "candidates/candidate.h"
#include "candidates/plan_request.h"
#include "candidates/plan_target.h"
#include "frontend/frontend_graph.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

class Attempt {
 public:
  // Writes the graph, which must outlive this, and asks cuDNN for its candidates.
  static StatusOr<Attempt> Make(const GraphSpec& spec, const PlanRequest& request,
                                const PlanTarget& target, int variant);

  // The indices of the candidates that the request leaves, in cuDNN's order: of those
  // that are listed, a pin by its index leaves one.
  const std::vector<int64_t>& indices() const { return indices_; }

  // A candidate by its index, and why it is not allowed, by the request or for a fault,
  // as far as that can be known before it is built.
  StatusOr<Candidate> Describe(int64_t index) const;

  // Builds one candidate; a failure or a refusal is noted in it. Status is not OK where
  // the failure is not about this candidate.
  Status Build(int64_t index, Candidate& candidate);

  // The plan that was built last is that of the graph, until another one is.
  std::shared_ptr<FrontendGraph> graph() const { return graph_; }

 private:
  explicit Attempt(const GraphSpec& spec) : spec_(&spec) {}

  Status QueryCandidates(const PlanTarget& target);

  // A candidate as cuDNN lists it.
  StatusOr<Candidate> Listed(int64_t index) const;

  // The text that asks for a candidate again, or nothing where there is none.
  std::string PinText(const Candidate& candidate, int64_t index) const;

  Status ListIndices();

  const GraphSpec* spec_;
  std::shared_ptr<FrontendGraph> graph_;
  PlanRequest request_;
  int variant_ = 0;
  std::vector<int64_t> indices_;
  // How many of the same engine are listed before each.
  std::vector<int64_t> nth_of_engine_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_ATTEMPT_H_
