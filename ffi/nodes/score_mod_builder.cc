// SPDX-License-Identifier: Apache-2.0
// Writes each step as a pointwise operation of the frontend.

#include "nodes/score_mod_builder.h"

#include <cmath>
#include <utility>

#include "graph/node_kinds.h"
#include "nodes/pointwise_builder.h"

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;

constexpr int64_t kQueryAxis = 2;
constexpr int64_t kKeyAxis = 3;

}  // namespace

std::shared_ptr<ScoreMod> ScoreMod::Of(NodeWriter& writer) {
  const NodeSpec& node = writer.node();
  const auto& steps = node.Attribute<Steps>("score_mod");
  if (steps.empty()) return nullptr;
  auto made = std::make_shared<ScoreMod>();
  made->forward_ = steps;
  made->backward_ = node.Attribute<Steps>("score_mod_grad");
  for (const auto& [role, name] : node.inputs) {
    if (role.rfind("mod_", 0) == 0) made->values_[role] = writer.Input(role);
  }
  return made;
}

void ScoreMod::Clear() {
  results_.clear();
  values_.erase("query");
  values_.erase("key");
}

TensorPtr ScoreMod::Apply(fe::graph::Graph& graph, const std::string& name,
                          const TensorPtr& given, const Steps& steps) {
  values_[name] = given;
  for (const std::string& text : steps) results_.push_back(Apply(graph, text));
  return results_.back();
}

// cuDNN wants a tensor that is broadcast to come second, and has full scores where a
// value follows from them.
TensorPtr ScoreMod::Apply(fe::graph::Graph& graph, const std::string& text) {
  const std::vector<std::string> words = ReadStep(text);
  auto attributes = PointwiseMode(words[0], /*alpha=*/0);
  attributes.set_compute_data_type(fe::DataType_t::FLOAT);
  const bool is_first_small =
      !ResultIndex(words[1]).has_value() && words[1] != "score" && words[1] != "grad";
  std::vector<TensorPtr> inputs;
  for (size_t i = 1; i < words.size(); ++i) inputs.push_back(Value(graph, words[i]));
  if (inputs.size() == 2 && is_first_small && Commutes(attributes.get_mode())) {
    std::swap(inputs[0], inputs[1]);
  }
  TensorPtr result;
  if (inputs.size() == 1) {
    result = graph.pointwise(inputs[0], std::move(attributes));
  } else if (inputs.size() == 2) {
    result = graph.pointwise(inputs[0], inputs[1], std::move(attributes));
  } else {
    result = graph.pointwise(inputs[0], inputs[1], inputs[2], std::move(attributes));
  }
  const bool is_bool = FindNodeKind("pointwise")->modes_to_bool.count(words[0]) != 0;
  result->set_data_type(is_bool ? fe::DataType_t::BOOLEAN : fe::DataType_t::FLOAT);
  return result;
}

// A number is a tensor of its own each time: the frontend gives each one an id.
TensorPtr ScoreMod::Value(fe::graph::Graph& graph, const std::string& word) {
  if (const auto index = ResultIndex(word)) return results_[*index];
  if (const auto found = values_.find(word); found != values_.end()) {
    return found->second;
  }
  if (word == "query") return values_[word] = Position(graph, kQueryAxis);
  if (word == "key") return values_[word] = Position(graph, kKeyAxis);
  // A checked node's other words are numbers: NaN is never written.
  const double number = StepNumber(word).value_or(std::nan(""));
  return std::make_shared<fe::graph::Tensor_attributes>(static_cast<float>(number));
}

TensorPtr ScoreMod::Position(fe::graph::Graph& graph, int64_t axis) const {
  auto attributes = fe::graph::Pointwise_attributes()
                        .set_name("position")
                        .set_mode(fe::PointwiseMode_t::GEN_INDEX)
                        .set_axis(axis)
                        .set_compute_data_type(fe::DataType_t::INT32);
  const TensorPtr result =
      graph.pointwise(values_.find("score")->second, std::move(attributes));
  result->set_data_type(fe::DataType_t::FLOAT);
  return result;
}

ScoreHook Forward(std::shared_ptr<ScoreMod> steps) {
  return [steps = std::move(steps)](const std::shared_ptr<fe::graph::Graph>& graph,
                                    const TensorPtr& scores) {
    steps->Clear();  // The frontend may write a graph more than once.
    return steps->Apply(*graph, "score", scores, steps->forward());
  };
}

ScoreHook Backward(std::shared_ptr<ScoreMod> steps) {
  return [steps = std::move(steps)](const std::shared_ptr<fe::graph::Graph>& graph,
                                    const TensorPtr& cotangent) {
    return steps->Apply(*graph, "grad", cotangent, steps->backward());
  };
}

}  // namespace jax_cudnn
