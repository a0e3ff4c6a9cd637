// SPDX-License-Identifier: Apache-2.0
// Reading a product in a graph, asking cuBLASLt for algorithms, launching one.

#include "plans/blas_product.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "cudnn/cudnn_library.h"

namespace jax_cudnn {
namespace {

constexpr int kMostCandidates = 8;
constexpr size_t kMostWorkspaceBytes = size_t{32}
                                       << 20;  // as NVIDIA advises for Hopper
// XLA aligns more, and a plan takes any operand.
constexpr uint32_t kAlignment = 16;
// Aligned so and no more, for what is asked before there are operands.
constexpr uintptr_t kSomewhere = (uintptr_t{1} << 40) + kAlignment;

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

// What tells an algorithm from others, by the names that its knobs have here, sorted.
struct KnobRow {
  std::string_view name;
  CublasLtAlgorithmAttribute attribute;
  size_t bytes;
};
constexpr KnobRow kKnobs[] = {
    {"ALGORITHM", CublasLtAlgorithmAttribute::kAlgorithm, 4},
    {"CLUSTER", CublasLtAlgorithmAttribute::kCluster, 2},
    {"CUSTOM", CublasLtAlgorithmAttribute::kCustom, 4},
    {"INNER", CublasLtAlgorithmAttribute::kInner, 2},
    {"REDUCTION", CublasLtAlgorithmAttribute::kReduction, 4},
    {"SPLIT_K", CublasLtAlgorithmAttribute::kSplitK, 4},
    {"STAGES", CublasLtAlgorithmAttribute::kStages, 4},
    {"SWIZZLE", CublasLtAlgorithmAttribute::kSwizzle, 4},
    {"TILE", CublasLtAlgorithmAttribute::kTile, 4},
};

StatusOr<Knobs> KnobsOf(const CublasLtFunctions& cublaslt,
                        const CublasLtAlgorithm& algorithm) {
  Knobs knobs;
  for (const KnobRow& row : kKnobs) {
    int32_t value = 0;  // the bytes that are not written stay 0
    size_t written = 0;
    RETURN_IF_ERROR(CheckCublasLt(
        cublaslt,
        cublaslt.algorithm_get(&algorithm, static_cast<int>(row.attribute), &value,
                               row.bytes, &written),
        "cublasLtMatmulAlgoConfigGetAttribute"));
    knobs.emplace_back(std::string(row.name), value);
  }
  return knobs;
}

// Whether all of some knobs are among an algorithm's.
bool HasAll(const Knobs& knobs, const Knobs& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const auto& knob) {
    return std::find(knobs.begin(), knobs.end(), knob) != knobs.end();
  });
}

bool IsF8(int32_t type) { return type == kCudaF8E4m3 || type == kCudaF8E5m2; }

const std::string* Role(const std::map<std::string, std::string, std::less<>>& names,
                        std::string_view role) {
  const auto found = names.find(role);
  return found == names.end() ? nullptr : &found->second;
}

}  // namespace

// --- reading a graph ----------------------------------------------------------------

class BlasProduct::Reader {
 public:
  explicit Reader(const GraphSpec& graph) : graph_(graph) {}

  // The problem; nothing where cuBLASLt has no kernel for the graph.
  std::optional<Problem> Read() {
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
  Problem problem_;
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

// --- what cuBLASLt is told ----------------------------------------------------------

struct BlasProduct::Pointers {
  const void* a;
  const void* b;
  const void* c;
  void* d;
  const void* bias;
  const void* aux;
  const void* scale_a;
  const void* scale_b;
};

class BlasProduct::Bound {
 public:
  explicit Bound(const CublasLtFunctions& cublaslt) : cublaslt_(cublaslt) {}
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;
  ~Bound() {
    for (CublasLtLayout layout : {a, b, c, d}) {
      if (layout != nullptr) static_cast<void>(cublaslt_.layout_destroy(layout));
    }
    if (product != nullptr) static_cast<void>(cublaslt_.description_destroy(product));
  }

  // Without operands yet: cuBLASLt looks at no more than how pointers are aligned.
  Status MakeUnbound(const Problem& problem) {
    auto* at = reinterpret_cast<void*>(kSomewhere);  // NOLINT: never dereferenced
    return Make(problem, {at, at, at, at, at, at, at, at});
  }

  Status Make(const Problem& problem, const Pointers& pointers) {
    RETURN_IF_ERROR(MakeLayout(problem.a, problem.batch, a));
    RETURN_IF_ERROR(MakeLayout(problem.b, problem.batch, b));
    RETURN_IF_ERROR(MakeLayout(problem.c.value_or(problem.d), problem.batch, c));
    RETURN_IF_ERROR(MakeLayout(problem.d, problem.batch, d));
    RETURN_IF_ERROR(CheckCublasLt(
        cublaslt_, cublaslt_.description_create(&product, problem.compute, kCudaF32),
        "cublasLtMatmulDescCreate"));
    using Attribute = CublasLtMatmulAttribute;
    const auto transposes = [](const Matrix& matrix) {
      return int32_t{matrix.is_transposed ? kCublasTranspose : 0};
    };
    RETURN_IF_ERROR(Set(Attribute::kTransposeA, transposes(problem.a)));
    RETURN_IF_ERROR(Set(Attribute::kTransposeB, transposes(problem.b)));
    RETURN_IF_ERROR(Set(Attribute::kEpilogue, problem.epilogue));
    if (problem.bias) {
      RETURN_IF_ERROR(Set(Attribute::kBiasPointer, pointers.bias));
      if (problem.batch > 1) {
        RETURN_IF_ERROR(Set(Attribute::kBiasBatchStride, problem.bias_batch_stride));
      }
    }
    if (problem.aux) {
      RETURN_IF_ERROR(Set(Attribute::kAuxPointer, pointers.aux));
      RETURN_IF_ERROR(Set(Attribute::kAuxLeading, problem.aux->leading));
      if (problem.batch > 1) {
        RETURN_IF_ERROR(Set(Attribute::kAuxBatchStride, problem.aux->batch_stride));
      }
    }
    if (problem.scale_a) RETURN_IF_ERROR(Set(Attribute::kScaleA, pointers.scale_a));
    if (problem.scale_b) RETURN_IF_ERROR(Set(Attribute::kScaleB, pointers.scale_b));
    return {};
  }

  CublasLtDescription product = nullptr;
  CublasLtLayout a = nullptr;
  CublasLtLayout b = nullptr;
  CublasLtLayout c = nullptr;
  CublasLtLayout d = nullptr;

 private:
  Status MakeLayout(const Matrix& matrix, int32_t batch, CublasLtLayout& layout) {
    RETURN_IF_ERROR(CheckCublasLt(
        cublaslt_,
        cublaslt_.layout_create(&layout, matrix.type,
                                static_cast<uint64_t>(matrix.rows),
                                static_cast<uint64_t>(matrix.columns), matrix.leading),
        "cublasLtMatrixLayoutCreate"));
    if (batch == 1) return {};
    using Attribute = CublasLtLayoutAttribute;
    const auto set = [&](Attribute attribute, const auto& value) {
      return CheckCublasLt(cublaslt_,
                           cublaslt_.layout_set(layout, static_cast<int>(attribute),
                                                &value, sizeof(value)),
                           "cublasLtMatrixLayoutSetAttribute");
    };
    RETURN_IF_ERROR(set(Attribute::kBatchCount, batch));
    return set(Attribute::kBatchStride, matrix.batch_stride);
  }

  template <typename Value>
  Status Set(CublasLtMatmulAttribute attribute, const Value& value) {
    return CheckCublasLt(cublaslt_,
                         cublaslt_.description_set(product, static_cast<int>(attribute),
                                                   &value, sizeof(value)),
                         "cublasLtMatmulDescSetAttribute");
  }

  const CublasLtFunctions& cublaslt_;
};

namespace {

class Preference {
 public:
  explicit Preference(const CublasLtFunctions& cublaslt) : cublaslt_(cublaslt) {}
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  ~Preference() {
    if (handle_ != nullptr) static_cast<void>(cublaslt_.preference_destroy(handle_));
  }

  Status Make() {
    RETURN_IF_ERROR(CheckCublasLt(cublaslt_, cublaslt_.preference_create(&handle_),
                                  "cublasLtMatmulPreferenceCreate"));
    using Attribute = CublasLtPreferenceAttribute;
    RETURN_IF_ERROR(Set(Attribute::kWorkspaceBytes, kMostWorkspaceBytes));
    RETURN_IF_ERROR(Set(Attribute::kReductionSchemes, kCublasLtSumsInF32));
    for (const Attribute each : {Attribute::kAlignmentA, Attribute::kAlignmentB,
                                 Attribute::kAlignmentC, Attribute::kAlignmentD}) {
      RETURN_IF_ERROR(Set(each, kAlignment));
    }
    return {};
  }

  CublasLtPreference get() const { return handle_; }

 private:
  template <typename Value>
  Status Set(CublasLtPreferenceAttribute attribute, const Value& value) {
    return CheckCublasLt(cublaslt_,
                         cublaslt_.preference_set(handle_, static_cast<int>(attribute),
                                                  &value, sizeof(value)),
                         "cublasLtMatmulPreferenceSetAttribute");
  }

  const CublasLtFunctions& cublaslt_;
  CublasLtPreference handle_ = nullptr;
};

}  // namespace

// --- the product --------------------------------------------------------------------

bool BlasProduct::Covers(const GraphSpec& graph) {
  return Reader(graph).Read().has_value();
}

StatusOr<std::vector<BlasProduct::Listed>> BlasProduct::Find(const Problem& problem) {
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadCublasLt(runtime));
  ASSIGN_OR_RETURN(CublasLtHandle handle, CublasLtHandleHere(runtime));
  Bound bound(*cublaslt);
  RETURN_IF_ERROR(bound.MakeUnbound(problem));
  Preference preference(*cublaslt);
  RETURN_IF_ERROR(preference.Make());
  std::array<CublasLtFound, kMostCandidates> found{};
  int count = 0;
  RETURN_IF_ERROR(CheckCublasLt(
      *cublaslt,
      cublaslt->find(handle, bound.product, bound.a, bound.b, bound.c, bound.d,
                     preference.get(), kMostCandidates, found.data(), &count),
      "cublasLtMatmulAlgoGetHeuristic"));
  std::vector<Listed> usable;
  for (int i = 0; i < count; ++i) {
    const CublasLtFound& each = found[static_cast<size_t>(i)];
    if (each.state != 0) continue;
    ASSIGN_OR_RETURN(Knobs knobs, KnobsOf(*cublaslt, each.algorithm));
    const bool is_known = std::any_of(usable.begin(), usable.end(),
                                      [&](const auto& x) { return x.knobs == knobs; });
    if (!is_known) usable.push_back({each, std::move(knobs)});
  }
  return usable;
}

StatusOr<std::vector<Candidate>> BlasProduct::List(const GraphSpec& graph,
                                                   const PlanRequest& request,
                                                   const PlanTarget& target) {
  std::vector<Candidate> candidates;
  if (target.handle == nullptr) {
    return Unimplemented("its plans are made where the GPU is");
  }
  const auto problem = Reader(graph).Read();
  const auto found = Find(*problem);
  if (!found.ok()) return found.status();
  for (size_t i = 0; i < found->size(); ++i) {
    const Listed& each = (*found)[i];
    const auto& pin = request.pin;
    const auto place = static_cast<int64_t>(i);
    const bool is_asked_for =
        !pin || (pin->knobs ? HasAll(each.knobs, *pin->knobs) : pin->nth == place);
    if (!is_asked_for) continue;
    Candidate candidate;
    candidate.engine = kCublasLtEngine;
    candidate.name = "cublasLt_" + std::to_string(i);
    candidate.knobs = each.knobs;
    PlanRequest own;
    own.deterministic = request.deterministic;
    own.pin = PlanPin{kCublasLtEngine, each.knobs, 0, 0};
    candidate.request = WritePlanRequest(own);
    candidate.behavior_notes = {"CUBLASLT_DEPENDENCY"};
    candidate.numeric_notes = {"TENSOR_CORE"};
    std::vector<std::string> notes = candidate.behavior_notes;
    notes.insert(notes.end(), candidate.numeric_notes.begin(),
                 candidate.numeric_notes.end());
    candidate.refusal = RefusalOf(request, candidate.engine, notes);
    if (candidate.refusal.empty()) {
      candidate.refusal =
          WorkspaceRefusal(request, static_cast<int64_t>(each.found.workspace_bytes));
    }
    candidates.push_back(std::move(candidate));
    if (pin) break;
  }
  if (candidates.empty()) {
    return Unimplemented("none of its " + std::to_string(found->size()) +
                         " algorithms is the one that is asked for");
  }
  return candidates;
}

StatusOr<std::unique_ptr<BlasProduct>> BlasProduct::Make(const GraphSpec& graph,
                                                         Candidate& candidate) {
  const auto start = std::chrono::steady_clock::now();
  auto problem = Reader(graph).Read();
  ASSIGN_OR_RETURN(const std::vector<Listed> found, Find(*problem));
  const auto place = std::find_if(found.begin(), found.end(), [&](const auto& each) {
    return each.knobs == candidate.knobs;
  });
  if (place == found.end()) {
    return Unimplemented("cuBLASLt lists " + std::to_string(found.size()) +
                         " algorithms, and this one is no longer among them");
  }
  const CublasLtFound& chosen = place->found;
  candidate.workspace_bytes = static_cast<int64_t>(chosen.workspace_bytes);
  candidate.build_ms = std::chrono::duration<double, std::milli>(
                           std::chrono::steady_clock::now() - start)
                           .count();
  candidate.is_built = true;
  return std::unique_ptr<BlasProduct>(
      new BlasProduct(std::move(*problem), chosen.algorithm, chosen.workspace_bytes));
}

StatusOr<std::unique_ptr<BlasProduct>> BlasProduct::Read(const GraphSpec& graph,
                                                         std::string_view bytes,
                                                         const Candidate& candidate) {
  CublasLtAlgorithm algorithm{};
  auto problem = Reader(graph).Read();
  if (!problem || bytes.size() != sizeof(algorithm)) {
    return InvalidArgument("a plan of cuBLASLt has " + std::to_string(bytes.size()) +
                           " bytes, or a graph that it does not compute");
  }
  std::memcpy(&algorithm, bytes.data(), sizeof(algorithm));
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadCublasLt(runtime));
  ASSIGN_OR_RETURN(CublasLtHandle handle, CublasLtHandleHere(runtime));
  Bound bound(*cublaslt);
  RETURN_IF_ERROR(bound.MakeUnbound(*problem));
  CublasLtFound checked{};
  RETURN_IF_ERROR(CheckCublasLt(*cublaslt,
                                cublaslt->check(handle, bound.product, bound.a, bound.b,
                                                bound.c, bound.d, &algorithm, &checked),
                                "cublasLtMatmulAlgoCheck"));
  const auto bytes_then = static_cast<size_t>(candidate.workspace_bytes);
  if (checked.workspace_bytes > bytes_then) {
    return Unimplemented("the plan needs " + std::to_string(checked.workspace_bytes) +
                         " bytes of workspace, and " + std::to_string(bytes_then) +
                         " when it was written");
  }
  return std::unique_ptr<BlasProduct>(
      new BlasProduct(std::move(*problem), algorithm, bytes_then));
}

StatusOr<std::string> BlasProduct::Serialize() const {
  return std::string(reinterpret_cast<const char*>(&algorithm_), sizeof(algorithm_));
}

Status BlasProduct::Execute(CudnnHandle /*handle*/, CudaStream stream,
                            void* const* operands, void* const* results,
                            void* workspace) const {
  const auto at = [&](const Memory& memory) {
    return (memory.is_result ? results : operands)[memory.index];
  };
  const auto at_any = [&](const std::optional<Memory>& memory) {
    return memory ? at(*memory) : nullptr;
  };
  Pointers pointers{};
  pointers.a = at(problem_.a.memory);
  pointers.b = at(problem_.b.memory);
  pointers.d = at(problem_.d.memory);
  pointers.c = problem_.c ? at(problem_.c->memory) : pointers.d;
  pointers.bias = at_any(problem_.bias);
  pointers.aux = problem_.aux ? at(problem_.aux->memory) : nullptr;
  pointers.scale_a = at_any(problem_.scale_a);
  pointers.scale_b = at_any(problem_.scale_b);
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadCublasLt(runtime));
  ASSIGN_OR_RETURN(CublasLtHandle handle, CublasLtHandleHere(runtime));
  Bound bound(*cublaslt);
  RETURN_IF_ERROR(bound.Make(problem_, pointers));
  const float one = 1;
  const float beta = problem_.c ? 1 : 0;
  return CheckCublasLt(
      *cublaslt,
      cublaslt->matmul(handle, bound.product, &one, pointers.a, bound.a, pointers.b,
                       bound.b, &beta, pointers.c, bound.c, pointers.d, bound.d,
                       &algorithm_, workspace, workspace_bytes_, stream),
      "cublasLtMatmul");
}

}  // namespace jax_cudnn
