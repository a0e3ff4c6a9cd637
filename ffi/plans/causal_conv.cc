// SPDX-License-Identifier: Apache-2.0
// Reading a causal convolution in a graph, and launching it.

#include "plans/causal_conv.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cudnn/cuda_device.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {
namespace {

constexpr std::string_view kForward = "causal_conv1d";
constexpr std::string_view kBackward = "causal_conv1d_backward";

// cudnn_subquadratic_ops.h, cudnnCausalConv1dForward: kernelSize.
constexpr int64_t kTaps[] = {2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256};

std::optional<CudnnDataType> DataType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CudnnDataType::kF32;
    case DType::kF64:
      return CudnnDataType::kF64;
    case DType::kF16:
      return CudnnDataType::kF16;
    case DType::kBf16:
      return CudnnDataType::kBf16;
    default:
      return std::nullopt;
  }
}

int64_t Elements(const TensorSpec& tensor) {
  int64_t count = 1;
  for (const int64_t size : tensor.dims) count *= size;
  return count;
}

// Whether a tensor has a dtype, and stores its axes in an order.
bool Lies(const TensorSpec* tensor, DType dtype, const std::vector<int64_t>& order) {
  return tensor != nullptr && tensor->dtype == dtype && tensor->order == order;
}

// The tensors of a graph's only node, by role.
class Tensors {
 public:
  explicit Tensors(const GraphSpec& graph) : graph_(graph) {}

  // Null where there is none.
  const TensorSpec* Find(std::string_view role) const {
    const NodeSpec& node = graph_.nodes.front();
    for (const auto* names : {&node.inputs, &node.outputs}) {
      if (const auto found = names->find(role); found != names->end()) {
        return &graph_.Tensor(found->second);
      }
    }
    return nullptr;
  }

  // The place of an operand or a result.
  StatusOr<size_t> Place(std::string_view role) const {
    const TensorSpec* tensor = Find(role);
    if (tensor == nullptr) return Missing(role);
    for (const auto* names : {&graph_.inputs, &graph_.outputs}) {
      const auto found = std::find(names->begin(), names->end(), tensor->name);
      if (found != names->end()) return static_cast<size_t>(found - names->begin());
    }
    return Missing(role);
  }

  // UNIMPLEMENTED unless all tensors that cuDNN's function has are there, in the dtypes
  // and the order of axes that it reads and writes.
  Status CheckStored(bool is_channels_last, DType sums) const {
    const std::vector<int64_t> row = {0, 1};
    const std::vector<int64_t> order = is_channels_last ? std::vector<int64_t>{0, 1, 2}
                                                        : std::vector<int64_t>{0, 2, 1};
    const std::vector<int64_t> weights =
        is_channels_last ? row : std::vector<int64_t>{1, 0};
    const DType dtype = Find("x")->dtype;
    bool is_so = Lies(Find("x"), dtype, order) && Lies(Find("w"), dtype, weights) &&
                 Lies(Find("bias"), dtype, row);
    if (Find("grad_output") == nullptr) {
      is_so = is_so && Lies(Find("output"), dtype, order);
    } else {
      is_so = is_so && Lies(Find("grad_output"), dtype, order) &&
              Lies(Find("grad_x"), dtype, order) &&
              Lies(Find("grad_w"), sums, weights) && Lies(Find("grad_bias"), sums, row);
    }
    if (is_so) return {};
    return Unimplemented(
        "cuDNN's causal convolution has a bias, arrays of one dtype and one layout, "
        "and gives all gradients, those of weights and bias in the dtype of sums");
  }

  static Status Missing(std::string_view role) {
    return Unimplemented("cuDNN's causal convolution always has " + std::string(role));
  }

 private:
  const GraphSpec& graph_;
};

}  // namespace

bool CausalConv::Covers(const GraphSpec& graph) {
  if (graph.nodes.size() != 1) return false;
  const std::string& kind = graph.nodes.front().kind;
  return kind == kForward || kind == kBackward;
}

StatusOr<CausalConv::Problem> CausalConv::Read(const GraphSpec& graph) {
  const NodeSpec& node = graph.nodes.front();
  const Tensors tensors(graph);
  Problem problem;
  problem.is_gradient = node.kind == kBackward;
  if (tensors.Find("segment_ids") != nullptr) {
    return Unimplemented("cuDNN's causal convolution has no segments");
  }
  const TensorSpec& x = *tensors.Find("x");
  const TensorSpec& weight = *tensors.Find("w");
  const auto dtype = DataType(x.dtype);
  if (!dtype) return Unimplemented("cuDNN's causal convolution is of floats");
  problem.dtype = *dtype;
  const DType sums = x.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  problem.sums = sums == DType::kF64 ? CudnnDataType::kF64 : CudnnDataType::kF32;
  const auto& activation = node.Attribute<std::string>("activation");
  if (activation == "silu") {
    problem.activation = CausalConvActivation::kSilu;
  } else if (activation != "identity") {
    return InvalidArgument(node.kind + ": activation '" + activation +
                           "' is not one of identity, silu");
  }
  problem.is_channels_last = x.order == std::vector<int64_t>{0, 1, 2};
  RETURN_IF_ERROR(tensors.CheckStored(problem.is_channels_last, sums));

  const int64_t taps = weight.dims[0];
  if (std::find(std::begin(kTaps), std::end(kTaps), taps) == std::end(kTaps)) {
    return Unimplemented(std::to_string(taps) +
                         " taps: cuDNN's causal convolution has 2 to 8, 16, 32, 64, "
                         "128 or 256");
  }
  if (x.IsEmpty()) return Unimplemented("x has no elements");
  if (Elements(x) > std::numeric_limits<int32_t>::max()) {
    return Unimplemented("x has 2^31 elements or more, which was not tried");
  }
  problem.batch = static_cast<int>(x.dims[0]);
  problem.steps = static_cast<int>(x.dims[1]);
  problem.channels = static_cast<int>(x.dims[2]);
  problem.taps = static_cast<int>(taps);

  ASSIGN_OR_RETURN(problem.x, tensors.Place("x"));
  ASSIGN_OR_RETURN(problem.weight, tensors.Place("w"));
  ASSIGN_OR_RETURN(problem.bias, tensors.Place("bias"));
  if (!problem.is_gradient) {
    ASSIGN_OR_RETURN(problem.output, tensors.Place("output"));
    return problem;
  }
  ASSIGN_OR_RETURN(problem.dy, tensors.Place("grad_output"));
  ASSIGN_OR_RETURN(problem.output, tensors.Place("grad_x"));
  ASSIGN_OR_RETURN(problem.dweight, tensors.Place("grad_w"));
  ASSIGN_OR_RETURN(problem.dbias, tensors.Place("grad_bias"));
  const size_t bytes = sums == DType::kF64 ? 8 : 4;
  problem.dweight_bytes = static_cast<size_t>(Elements(weight)) * bytes;
  problem.dbias_bytes = static_cast<size_t>(problem.channels) * bytes;
  return problem;
}

StatusOr<Candidate> CausalConv::Describe(const GraphSpec& graph,
                                         const PlanRequest& request) {
  ASSIGN_OR_RETURN(const Problem problem, Read(graph));
  RETURN_IF_ERROR(
      LoadCausalConv(*LoadedCudnnRuntime(), problem.is_channels_last).status());
  const auto& pin = request.pin;
  if (pin &&
      (pin->engine != kCausalConvEngine || (pin->knobs && !pin->knobs->empty()) ||
       pin->nth != 0 || pin->variant != 0)) {
    return Unimplemented("the plan that is asked for is none of cuDNN's function");
  }
  Candidate candidate;
  candidate.engine = kCausalConvEngine;
  candidate.name = problem.is_gradient ? "causalConv1dBackward" : "causalConv1dForward";
  PlanRequest own;
  own.deterministic = request.deterministic;
  own.pin = PlanPin{kCausalConvEngine, Knobs(), 0, 0};
  candidate.request = WritePlanRequest(own);
  if (problem.is_gradient) candidate.numeric_notes = {"NONDETERMINISTIC"};
  candidate.refusal = RefusalOf(request, candidate.engine, candidate.numeric_notes);
  return candidate;
}

StatusOr<std::unique_ptr<CausalConv>> CausalConv::Make(const GraphSpec& graph) {
  ASSIGN_OR_RETURN(const Problem problem, Read(graph));
  ASSIGN_OR_RETURN(const CausalConvFunctions functions,
                   LoadCausalConv(*LoadedCudnnRuntime(), problem.is_channels_last));
  return std::unique_ptr<CausalConv>(new CausalConv(problem, functions));
}

Status CausalConv::Execute(CudnnHandle /*handle*/, CudaStream stream,
                           void* const* operands, void* const* results,
                           void* /*workspace*/) const {
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  const Problem& p = problem_;
  if (!p.is_gradient) {
    return CheckCausalConv(
        runtime,
        functions_.forward(stream, operands[p.x], operands[p.weight], operands[p.bias],
                           results[p.output], p.batch, p.channels, p.steps, p.taps,
                           p.dtype, p.activation),
        "cudnnCausalConv1dForward");
  }
  // cuDNN adds to what is there.
  const auto clear = [&](size_t place, size_t bytes) {
    return CheckCuda(runtime,
                     runtime.cuda.memset_async(results[place], 0, bytes, stream),
                     "cudaMemsetAsync");
  };
  RETURN_IF_ERROR(clear(p.dweight, p.dweight_bytes));
  RETURN_IF_ERROR(clear(p.dbias, p.dbias_bytes));
  return CheckCausalConv(
      runtime,
      functions_.backward(stream, operands[p.x], operands[p.weight], operands[p.bias],
                          operands[p.dy], results[p.output], results[p.dweight],
                          results[p.dbias], p.batch, p.channels, p.steps, p.taps,
                          p.dtype, p.sums, p.activation),
      "cudnnCausalConv1dBackward");
}

}  // namespace jax_cudnn
