// SPDX-License-Identifier: Apache-2.0
// Reading a product in a graph, node by node.

#include "blas/blas_problem.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jax_cudnn {
namespace {

std::optional<int32_t> CudaType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return kCudaF32;
    case DType::kF16:
      return kCudaF16;
    case DType::kBf16:
      return kCudaBf16;
    case DType::kF8E4m3fn:
      return kCudaF8E4m3;
    case DType::kF8E5m2:
      return kCudaF8E5m2;
    default:
      return std::nullopt;
  }
}

bool IsF8(int32_t type) { return type == kCudaF8E4m3 || type == kCudaF8E5m2; }

const std::string* Role(const std::map<std::string, std::string, std::less<>>& names,
                        std::string_view role) {
  const auto found = names.find(role);
  return found == names.end() ? nullptr : &found->second;
}

class Reader {
 public:
  explicit Reader(const GraphSpec& graph) : graph_(graph) {}

  // The problem; nothing where cuBLASLt has no kernel for the graph.
  std::optional<BlasProblem> Read() {
    if (graph_.nodes.empty() || graph_.nodes.front().kind != "matmul") return {};
    if (!ReadMatmul(graph_.nodes.front())) return {};
    for (size_t i = 1; i < graph_.nodes.size(); ++i) {
      if (graph_.nodes[i].kind != "pointwise") return {};
      if (!ReadPointwise(graph_.nodes[i])) return {};
    }
    if (!Finish()) return {};
    return std::move(problem_);
  }

 private:
  using Memory = BlasProblem::Memory;
  using Matrix = BlasProblem::Matrix;
  // How far the chain of operations has come.
  enum class Stage { kProduct, kBias, kResidual, kActivation };

  bool ReadMatmul(const NodeSpec& node) {
    const TensorSpec& left = graph_.Tensor(node.inputs.find("a")->second);
    const TensorSpec& right = graph_.Tensor(node.inputs.find("b")->second);
    current_ = node.outputs.find("output")->second;
    const TensorSpec& product = graph_.Tensor(current_);
    if (product.dims.size() != 3 || product.IsEmpty()) return false;
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (product.dims[0] > kMost) return false;
    dims_ = product.dims;
    problem_.batch = static_cast<int32_t>(dims_[0]);
    const auto a = Operand(right);
    const auto b = Operand(left);
    if (!a || !b || IsF8(a->type) != IsF8(b->type)) return false;
    is_f8_ = IsF8(a->type);
    if (!is_f8_ && a->type != b->type) return false;
    if (a->type == kCudaF32) problem_.compute = kCublasComputeTf32;
    problem_.a = *a;
    problem_.b = *b;
    // Hopper's kernels of f8 read along the sum.
    return !is_f8_ || (a->is_transposed && !b->is_transposed);
  }

  bool ReadPointwise(const NodeSpec& node) {
    const std::string& mode = node.Attribute<std::string>("mode");
    const std::string* first = Role(node.inputs, "a");
    const std::string* second = Role(node.inputs, "b");
    const std::string& output = node.outputs.find("output")->second;
    if (Role(node.inputs, "c") != nullptr) return false;
    if (mode == "identity") return ReadIdentity(*first, output);
    if (second == nullptr) {
      if (*first != current_ || stage_ == Stage::kActivation) return false;
      if (mode == "relu" && node.Attribute<double>("alpha") != 0) return false;
      if (mode != "relu" && mode != "gelu_tanh") return false;
      if (stage_ == Stage::kResidual || is_seen_) return false;
      problem_.epilogue |= mode == "relu" ? kEpilogueRelu : kEpilogueGelu;
      argument_ = current_;
      return Advance(output, Stage::kActivation);
    }
    if (mode == "gelu_tanh_grad") {
      if (*first != current_ || stage_ != Stage::kProduct || is_scaled()) return false;
      // cuBLASLt is not told its shape.
      if (graph_.Tensor(*second).dims != dims_) return false;
      problem_.aux = Array(graph_.Tensor(*second));
      if (!problem_.aux || problem_.aux->memory.is_result) return false;
      problem_.epilogue = kEpilogueGeluGradient | kEpilogueAux;
      return Advance(output, Stage::kActivation);
    }
    const bool is_first = *first == current_;
    if (is_first == (*second == current_)) return false;  // neither, or both
    const TensorSpec& other = graph_.Tensor(is_first ? *second : *first);
    if (mode == "mul") return ReadScale(other, output);
    return mode == "add" && ReadTerm(other, output);
  }

  bool is_scaled() const { return problem_.scale_a || problem_.scale_b; }

  bool Advance(const std::string& output, Stage stage) {
    // What is written before the end is written once: as gelu's argument.
    is_seen_ = is_seen_ || IsResult(current_);
    current_ = output;
    stage_ = stage;
    return true;
  }

  // The value under another name, rounded: part of the chain, or gelu's argument.
  bool ReadIdentity(const std::string& input, const std::string& output) {
    if (input == current_) {
      if (stage_ == Stage::kActivation || !IsResult(output)) {
        return !IsResult(current_) && Advance(output, stage_);
      }
    }
    const bool is_argument = input == argument_ || input == current_;
    if (!is_argument || !IsResult(output) || !saved_.empty()) return false;
    saved_ = output;
    saved_of_ = input;
    return true;
  }

  bool ReadScale(const TensorSpec& factor, const std::string& output) {
    const bool is_scalar = std::all_of(factor.dims.begin(), factor.dims.end(),
                                       [](int64_t size) { return size == 1; });
    if (!is_f8_ || stage_ != Stage::kProduct || IsResult(current_)) return false;
    if (!is_scalar || factor.dtype != DType::kF32 || problem_.scale_b) return false;
    const auto memory = Place(factor.name);
    if (!memory || memory->is_result) return false;
    // Which operand a factor belongs to makes no difference.
    (problem_.scale_a ? problem_.scale_b : problem_.scale_a) = memory;
    return Advance(output, Stage::kProduct);
  }

  bool ReadTerm(const TensorSpec& term, const std::string& output) {
    const auto memory = Place(term.name);
    if (!memory || memory->is_result || term.dims.size() != 3) return false;
    const bool is_row = term.dims[1] == 1 && term.dims[2] == dims_[2];
    const bool is_of_each = term.dims[0] == dims_[0];
    if (is_row && (dims_[1] > 1 || stage_ == Stage::kProduct)) {
      if (stage_ != Stage::kProduct || !(is_of_each || term.dims[0] == 1)) return false;
      problem_.bias = memory;
      problem_.bias_batch_stride = term.dims[0] == 1 ? 0 : term.Strides()[0];
      if (term.dims[2] > 1 && term.Strides()[2] != 1) return false;
      bias_type_ = CudaType(term.dtype);
      problem_.epilogue |= kEpilogueBias;
      return Advance(output, Stage::kBias);
    }
    if (term.dims[1] != dims_[1] || term.dims[2] != dims_[2]) return false;
    if (stage_ > Stage::kBias || !(is_of_each || term.dims[0] == 1)) return false;
    problem_.c = Array(term);
    return problem_.c.has_value() && Advance(output, Stage::kResidual);
  }

  // Whether all that was read is one epilogue, with the results in their places.
  bool Finish() {
    const TensorSpec& result = graph_.Tensor(current_);
    const auto d = Array(result);
    if (!d || !d->memory.is_result) return false;
    problem_.d = *d;
    if (IsF8(d->type) || !IsOneEpilogue(result.dtype)) return false;
    // cuBLASLt takes a bias of bf16 there.
    if (is_f8_ && problem_.bias && d->type == kCudaF32) return false;
    if (!is_f8_ && problem_.a.type != d->type) return false;
    size_t results = 1;
    if (saved_.empty() && !argument_.empty() && IsResult(argument_)) {
      saved_ = saved_of_ = argument_;
    }
    if (!saved_.empty()) {
      const bool is_gelu = (problem_.epilogue & kEpilogueGelu) != 0;
      if (!is_gelu || saved_of_ != argument_) return false;
      problem_.aux = Array(graph_.Tensor(saved_));
      if (!problem_.aux) return false;
      problem_.epilogue |= kEpilogueAux;
      results = 2;
    }
    if (graph_.outputs.size() != results) return false;
    if (problem_.epilogue > kEpilogueNone)
      problem_.epilogue &= ~uint32_t{kEpilogueNone};
    if (problem_.bias && bias_type_ != d->type) return false;
    if (problem_.c && problem_.c->type != d->type) return false;
    if (problem_.aux) {
      const bool is_aligned =
          problem_.aux->leading % 8 == 0 &&
          (problem_.batch == 1 || problem_.aux->batch_stride % 8 == 0);
      if (problem_.aux->type != d->type || !is_aligned) return false;
    }
    return is_f8_ || problem_.c || problem_.epilogue != kEpilogueNone;
  }

  // Whether all values within are as large as the product, in f32 or the result's
  // dtype. A kernel keeps them in f32, as cuDNN's do: a rounding to the result's dtype
  // on the way is not made. One to another dtype has a meaning.
  bool IsOneEpilogue(DType dtype) const {
    return std::all_of(graph_.nodes.begin(), graph_.nodes.end(), [&](const auto& node) {
      const TensorSpec& made = graph_.Tensor(node.outputs.find("output")->second);
      return made.dims == dims_ && (made.dtype == DType::kF32 || made.dtype == dtype);
    });
  }

  bool IsResult(const std::string& name) const {
    return std::find(graph_.outputs.begin(), graph_.outputs.end(), name) !=
           graph_.outputs.end();
  }

  std::optional<Memory> Place(const std::string& name) const {
    for (const bool is_result : {false, true}) {
      const auto& names = is_result ? graph_.outputs : graph_.inputs;
      const auto found = std::find(names.begin(), names.end(), name);
      if (found == names.end()) continue;
      return Memory{is_result, static_cast<size_t>(found - names.begin())};
    }
    return std::nullopt;
  }

  // An operand of the product: of each example, or one for all of them.
  std::optional<Matrix> Operand(const TensorSpec& tensor) const {
    auto matrix = Array(tensor);
    if (matrix || tensor.dims[1] == 1) return matrix;
    // Column by column: as it lies, the matrix itself.
    const std::vector<int64_t> strides = tensor.Strides();
    if (strides[1] != 1) return std::nullopt;
    return Lies(tensor, /*is_transposed=*/true, tensor.dims[1], tensor.dims[2],
                strides[2]);
  }

  // A matrix that lies row by row: as cuBLASLt sees it, the transposed one.
  std::optional<Matrix> Array(const TensorSpec& tensor) const {
    const std::vector<int64_t> strides = tensor.Strides();
    if (strides[2] != 1 && tensor.dims[2] != 1) return std::nullopt;
    return Lies(tensor, /*is_transposed=*/false, tensor.dims[2], tensor.dims[1],
                strides[1]);
  }

  std::optional<Matrix> Lies(const TensorSpec& tensor, bool is_transposed, int64_t rows,
                             int64_t columns, int64_t step) const {
    const auto type = CudaType(tensor.dtype);
    const auto memory = Place(tensor.name);
    const bool is_of_each = tensor.dims[0] == dims_[0];
    if (!type || !memory || !(is_of_each || tensor.dims[0] == 1)) return std::nullopt;
    Matrix matrix;
    matrix.memory = *memory;
    matrix.type = *type;
    matrix.is_transposed = is_transposed;
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.leading = columns == 1 ? rows : step;
    if (matrix.leading < rows) return std::nullopt;
    matrix.batch_stride = tensor.dims[0] == 1 ? 0 : tensor.Strides()[0];
    return matrix;
  }

  const GraphSpec& graph_;
  BlasProblem problem_;
  std::vector<int64_t> dims_;  // of the product
  std::string current_;        // the tensor that the chain has come to
  std::string argument_;       // of the activation
  std::string saved_;          // the result that is the argument, rounded
  std::string saved_of_;
  std::optional<int32_t> bias_type_;
  Stage stage_ = Stage::kProduct;
  bool is_f8_ = false;
  bool is_seen_ = false;  // whether a value within the chain is a result
};

}  // namespace

std::optional<BlasProblem> ReadBlasProblem(const GraphSpec& graph) {
  return Reader(graph).Read();
}

}  // namespace jax_cudnn
