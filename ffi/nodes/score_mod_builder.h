// SPDX-License-Identifier: Apache-2.0
// The steps of a score_mod in the frontend's words, for its two hooks into attention.

#ifndef JAX_CUDNN_SCORE_MOD_BUILDER_H_
#define JAX_CUDNN_SCORE_MOD_BUILDER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "frontend/node_writer.h"
#include "graph/score_mod.h"

namespace jax_cudnn {

// What the frontend calls with the scores, or with their cotangent, once it has them.
using ScoreHook =
    std::function<TensorPtr(std::shared_ptr<cudnn_frontend::graph::Graph>, TensorPtr)>;

// The steps of a node and the tensors that they read; the gradient steps read what the
// steps made. It lives as long as the frontend keeps one of the hooks.
class ScoreMod {
 public:
  // Null where the node that was entered last has no steps.
  static std::shared_ptr<ScoreMod> Of(NodeWriter& writer);

  // Forgets what steps made.
  void Clear();

  // Applies the steps, or the gradient steps, to a value given by its name.
  TensorPtr Apply(cudnn_frontend::graph::Graph& graph, const std::string& name,
                  const TensorPtr& given, const Steps& steps);

  const Steps& forward() const { return forward_; }
  const Steps& backward() const { return backward_; }

 private:
  TensorPtr Value(cudnn_frontend::graph::Graph& graph, const std::string& word);
  TensorPtr Position(cudnn_frontend::graph::Graph& graph, int64_t axis) const;
  TensorPtr Apply(cudnn_frontend::graph::Graph& graph, const std::string& text);

  Steps forward_;
  Steps backward_;
  std::map<std::string, TensorPtr> values_;
  std::vector<TensorPtr> results_;
};

ScoreHook Forward(std::shared_ptr<ScoreMod> steps);
ScoreHook Backward(std::shared_ptr<ScoreMod> steps);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_SCORE_MOD_BUILDER_H_
