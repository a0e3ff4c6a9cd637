// SPDX-License-Identifier: Apache-2.0
// One engine with its knobs, as cuDNN lists it for a graph, and what became of it.

#ifndef JAX_CUDNN_CANDIDATE_H_
#define JAX_CUDNN_CANDIDATE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace jax_cudnn {

// One entry of cuDNN's list of engines for a graph.
struct Candidate {
  std::string name;  // cuDNN's own, "eng2_k24=7"
  int64_t engine = 0;
  std::vector<std::pair<std::string, int64_t>> knobs;  // sorted by name
  int variant = 0;      // which way of writing the graph; see graph_builder.h
  std::string request;  // pins this candidate when given to Plan::Build, if not empty
  std::vector<std::string> behavior_notes;
  std::vector<std::string> numeric_notes;

  // Known after a build.
  bool is_built = false;
  int64_t workspace_bytes = 0;
  double build_ms = 0;
  std::string failure;  // why it did not build; empty where it did or was not tried

  // Why it is not allowed, by the request of the call or for a fault; empty where it
  // is. One that is not allowed is not built.
  std::string refusal;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CANDIDATE_H_
