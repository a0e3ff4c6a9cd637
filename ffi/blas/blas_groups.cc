// SPDX-License-Identifier: Apache-2.0
// Describing products in groups to cuBLASLt, and launching them.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "blas/blas_algorithms.h"
#include "blas/blas_engines.h"
#include "cudnn/cublaslt.h"
#include "cudnn/cudnn_library.h"
#include "cudnn/group_pointers.h"
#include "groups/group_layout.h"

namespace jax_cudnn {
namespace {

using Part = GroupLayout::Part;
using Product = GroupLayout::Product;

// As cuBLAS counts versions. Before, it has no kernels for Hopper, and those for sm_100
// are wrong for the gradient of the matrices where a group has no rows (13.2).
constexpr int kOldestCublas = 130400;
// Before, it has none of f8 for Hopper.
constexpr int kOldestCublasForF8 = 130500;

// Stands for the memory of sizes where there is none yet: cuBLASLt reads none.
constexpr uintptr_t kSomewhere = (uintptr_t{1} << 40) + 256;

constexpr size_t kAlignment = 256;

size_t RoundedUp(size_t size) {
  return (size + kAlignment - 1) / kAlignment * kAlignment;
}

std::optional<int32_t> TypeOf(DType dtype, bool is_result) {
  switch (dtype) {
    case DType::kBf16:
      return kCudaBf16;
    case DType::kF16:
      return kCudaF16;
    case DType::kF32:
      return is_result ? std::optional<int32_t>(kCudaF32) : std::nullopt;
    case DType::kF8E4m3fn:
      return is_result ? std::nullopt : std::optional<int32_t>(kCudaF8E4m3);
    case DType::kF8E5m2:
      return is_result ? std::nullopt : std::optional<int32_t>(kCudaF8E5m2);
    default:
      return std::nullopt;
  }
}

bool IsF8(const Part& part) {
  return part.tensor.dtype == DType::kF8E4m3fn || part.tensor.dtype == DType::kF8E5m2;
}

// How a matrix lies: the axis whose elements are next to each other, and the other one.
int InnerAxis(const Part& part) { return static_cast<int>(part.tensor.order[2]); }
int OuterAxis(const Part& part) { return 3 - InnerAxis(part); }

int64_t Size(const Part& part, int axis) {
  return part.tensor.dims[static_cast<size_t>(axis)];
}

// Which of our two operands cuBLASLt multiplies first. It sees d (rows x columns)
// column by column, as `first` times `second`. Where our result is stored row by row,
// that is its transpose, and our second operand comes first.
struct OperandOrder {
  size_t first;
  size_t second;
  bool transpose_first;
  bool transpose_second;
};

OperandOrder OrderOf(const Product& product) {
  const auto& [a, b, output] = product;
  // Of a the axes are rows and contraction, of b contraction and columns.
  if (InnerAxis(output) == 2) return {1, 0, InnerAxis(b) != 2, InnerAxis(a) != 2};
  return {0, 1, InnerAxis(a) != 1, InnerAxis(b) != 1};
}

// The two sizes that all groups share: a product has three, and one is that of groups.
std::array<int32_t, 2> SharedSizes(const Product& product) {
  std::array<int32_t, 2> sizes{};
  size_t count = 0;
  const auto add = [&](const Part& part, int axis) {
    if (part.rows_axis != axis && count < sizes.size()) {
      sizes[count++] = static_cast<int32_t>(Size(part, axis));
    }
  };
  add(product[0], 1);
  add(product[0], 2);
  add(product[1], 2);
  return sizes;
}

// Where arrays of sizes are: of the groups, and of the two that all share.
struct SizeArrays {
  const void* groups;
  std::array<const void*, 2> shared;
};

class GroupedMatmulDescriptions : public BlasDescriptions {
 public:
  using BlasDescriptions::BlasDescriptions;

  Status Make(const Product& product, int64_t groups, const SizeArrays& arrays) {
    const OperandOrder operand_order = OrderOf(product);
    const std::array<int32_t, 2> shared = SharedSizes(product);
    const auto array = [&](const Part& part, int axis) {
      if (part.rows_axis == axis) return arrays.groups;
      return arrays.shared[Size(part, axis) == shared[0] ? 0 : 1];
    };
    const auto make = [&](const Part& part, bool is_result, CublasLtLayout& layout) {
      const void* inner = array(part, InnerAxis(part));
      return CheckCublasLt(
          cublaslt,
          cublaslt.group_layout_create(&layout, *TypeOf(part.tensor.dtype, is_result),
                                       static_cast<int>(groups), inner,
                                       array(part, OuterAxis(part)), inner),
          "cublasLtGroupedMatrixLayoutCreate");
    };
    RETURN_IF_ERROR(make(product[operand_order.first], false, a));
    RETURN_IF_ERROR(make(product[operand_order.second], false, b));
    RETURN_IF_ERROR(make(product[2], true, c));
    RETURN_IF_ERROR(make(product[2], true, d));
    RETURN_IF_ERROR(MakeProduct(kCublasComputeF32));
    const auto transpose = [](bool is_transposed) {
      return int32_t{is_transposed ? kCublasTranspose : 0};
    };
    using Attribute = CublasLtMatmulAttribute;
    RETURN_IF_ERROR(
        Set(Attribute::kTransposeA, transpose(operand_order.transpose_first)));
    return Set(Attribute::kTransposeB, transpose(operand_order.transpose_second));
  }
};

// Why cuBLASLt has no kernel for a product, whichever its sizes; empty where it may.
std::string RefusalOf(const Product& product) {
  for (size_t i = 0; i < product.size(); ++i) {
    const Part& part = product[i];
    if (!TypeOf(part.tensor.dtype, i == 2)) {
      return "its products in groups are of bf16, f16 and f8, with results of bf16, "
             "f16 and f32";
    }
    const int64_t bits = Size(part, InnerAxis(part)) * DTypeBits(part.tensor.dtype);
    const int64_t bytes = bits / 8;
    if (bytes % kBlasAlignment != 0) {
      return "a row of " + std::to_string(bytes) +
             " bytes is no multiple of 16, as its products in groups have it";
    }
  }
  const auto& [a, b, output] = product;
  if (!IsF8(a) || !IsF8(b)) {
    return a.tensor.dtype == b.tensor.dtype
               ? ""
               : "its products in groups have operands of one dtype, or both of f8";
  }
  if (a.tensor.dtype == DType::kF8E5m2 && b.tensor.dtype == DType::kF8E5m2) {
    return "its products of f8 have at most one operand of f8_e5m2";
  }
  const bool is_along_sum =
      InnerAxis(a) == 2 && InnerAxis(b) == 1 && InnerAxis(output) == 2;
  return is_along_sum ? ""
                      : "its products of f8 in groups read both operands along "
                        "the sum";
}

bool HasF8(const GroupLayout& layout) {
  return std::any_of(layout.products.begin(), layout.products.end(),
                     [](const Product& product) { return IsF8(product[0]); });
}

// The functions, where they are those of a cuBLAS with these kernels.
StatusOr<const CublasLtFunctions*> LoadFunctions(const GroupLayout& layout) {
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadCublasLt(runtime));
  const int version = runtime.cublaslt_version;
  const int oldest = HasF8(layout) ? kOldestCublasForF8 : kOldestCublas;
  if (version >= oldest && cublaslt->group_layout_create != nullptr) {
    return cublaslt;
  }
  return Unimplemented(std::string("products in groups need cuBLAS ") +
                       (HasF8(layout) ? "13.5 for f8" : "13.4") +
                       " or newer, and this is " + std::to_string(version / 10000) +
                       "." + std::to_string(version / 100 % 100) + " (" +
                       runtime.cublaslt.path + "). Upgrade nvidia-cublas.");
}

SizeArrays Nowhere() {
  const auto* at = reinterpret_cast<const void*>(kSomewhere);  // NOLINT: never read
  return {at, {at, at}};
}

BlasAverages AveragesOf(const GroupLayout& layout, const Product& product) {
  const int64_t rows = std::max<int64_t>(1, layout.rows / layout.groups);
  const auto size = [&](const Part& part, int axis) {
    return part.rows_axis == axis ? rows : Size(part, axis);
  };
  const Part& output = product[2];
  return {size(output, InnerAxis(output)), size(output, OuterAxis(output)),
          size(product[0], 2)};
}

StatusOr<std::vector<BlasAlgorithm>> Find(const CublasLtFunctions& cublaslt,
                                          const GroupLayout& layout,
                                          const Product& product) {
  GroupedMatmulDescriptions descriptions(cublaslt);
  RETURN_IF_ERROR(descriptions.Make(product, layout.groups, Nowhere()));
  return FindBlasAlgorithms(descriptions, AveragesOf(layout, product));
}

// The layout of a graph that cuBLASLt may have kernels for.
StatusOr<GroupLayout> ReadLayout(const GraphSpec& graph) {
  ASSIGN_OR_RETURN(GroupLayout layout, ReadGroupLayout(graph));
  for (const Product& product : layout.products) {
    const std::string refusal = RefusalOf(product);
    if (!refusal.empty()) return Unimplemented(refusal);
  }
  return layout;
}

int64_t WorkspaceBytes(const GroupLayout& layout, size_t engine_bytes) {
  return static_cast<int64_t>(RoundedUp(engine_bytes)) +
         GroupPointersBytes(layout.groups);
}

class GroupedProducts : public Launchable {
 public:
  GroupedProducts(GroupLayout layout, std::vector<CublasLtAlgorithm> algorithms,
                  size_t engine_bytes)
      : layout_(std::move(layout)),
        algorithms_(std::move(algorithms)),
        engine_bytes_(engine_bytes) {}

  Status Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                 void* const* results, void* workspace) const override;
  StatusOr<std::string> Serialize() const override;

 private:
  const GroupLayout layout_;
  const std::vector<CublasLtAlgorithm> algorithms_;  // of each product
  const size_t engine_bytes_;  // of workspace; the pointers follow
};

bool Covers(const GraphSpec& graph) {
  return HasGroupSizes(graph) && graph.nodes.front().inputs.count("starts") > 0;
}

StatusOr<std::vector<Candidate>> List(const GraphSpec& graph,
                                      const PlanRequest& request,
                                      const PlanTarget& target) {
  ASSIGN_OR_RETURN(const GroupLayout layout, ReadLayout(graph));
  if (target.handle == nullptr) {
    return Unimplemented("its plans are made where the GPU is");
  }
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadFunctions(layout));
  ASSIGN_OR_RETURN(const std::vector<BlasAlgorithm> found,
                   Find(*cublaslt, layout, layout.products.front()));
  return BlasCandidates(found, request);
}

StatusOr<std::unique_ptr<const Launchable>> Make(const GraphSpec& graph,
                                                 Candidate& candidate) {
  ASSIGN_OR_RETURN(GroupLayout layout, ReadLayout(graph));
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadFunctions(layout));
  RETURN_IF_ERROR(LoadGroupKernels(*LoadedCudnnRuntime()));
  std::vector<CublasLtAlgorithm> algorithms;
  size_t engine_bytes = 0;
  for (const Product& product : layout.products) {
    ASSIGN_OR_RETURN(const std::vector<BlasAlgorithm> found,
                     Find(*cublaslt, layout, product));
    if (found.empty()) return Unimplemented("cuBLASLt has no kernel for a product");
    CublasLtHeuristicResult chosen = found.front().found;
    if (algorithms.empty()) {
      ASSIGN_OR_RETURN(chosen, ChosenBlasAlgorithm(found, candidate));
    }
    algorithms.push_back(chosen.algorithm);
    engine_bytes = std::max(engine_bytes, chosen.workspace_bytes);
  }
  candidate.workspace_bytes = WorkspaceBytes(layout, engine_bytes);
  return std::unique_ptr<const Launchable>(
      new GroupedProducts(std::move(layout), std::move(algorithms), engine_bytes));
}

StatusOr<std::unique_ptr<const Launchable>> Read(const GraphSpec& graph,
                                                 std::string_view bytes,
                                                 const Candidate& candidate) {
  ASSIGN_OR_RETURN(GroupLayout layout, ReadLayout(graph));
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadFunctions(layout));
  RETURN_IF_ERROR(LoadGroupKernels(*LoadedCudnnRuntime()));
  std::vector<CublasLtAlgorithm> algorithms(layout.products.size());
  const size_t wanted = algorithms.size() * sizeof(CublasLtAlgorithm);
  const int64_t engine_bytes = candidate.workspace_bytes - WorkspaceBytes(layout, 0);
  if (bytes.size() != wanted || engine_bytes < 0) {
    return InvalidArgument(
        "a plan of cuBLASLt for groups has " + std::to_string(bytes.size()) +
        " bytes, and a workspace of " + std::to_string(candidate.workspace_bytes));
  }
  std::memcpy(algorithms.data(), bytes.data(), wanted);
  for (size_t i = 0; i < algorithms.size(); ++i) {
    GroupedMatmulDescriptions descriptions(*cublaslt);
    RETURN_IF_ERROR(descriptions.Make(layout.products[i], layout.groups, Nowhere()));
    RETURN_IF_ERROR(CheckBlasAlgorithm(descriptions, algorithms[i],
                                       static_cast<size_t>(engine_bytes)));
  }
  return std::unique_ptr<const Launchable>(new GroupedProducts(
      std::move(layout), std::move(algorithms), static_cast<size_t>(engine_bytes)));
}

StatusOr<std::string> GroupedProducts::Serialize() const {
  return std::string(reinterpret_cast<const char*>(algorithms_.data()),
                     algorithms_.size() * sizeof(CublasLtAlgorithm));
}

Status GroupedProducts::Execute(CudnnHandle /*handle*/, CudaStream stream,
                                void* const* operands, void* const* results,
                                void* workspace) const {
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadFunctions(layout_));
  ASSIGN_OR_RETURN(CublasLtHandle handle, CublasLtHandleHere(runtime));
  const int64_t groups = layout_.groups;
  char* const written = static_cast<char*>(workspace) + RoundedUp(engine_bytes_);
  char* const shared = written + groups * 3 * static_cast<int64_t>(sizeof(void*));
  const auto size_bytes = groups * static_cast<int64_t>(sizeof(int32_t));
  const auto* starts = static_cast<const int32_t*>(operands[*layout_.starts]);
  const auto* sizes = static_cast<const int32_t*>(operands[layout_.sizes]);
  const SizeArrays arrays{sizes, {shared, shared + size_bytes}};
  const float one = 1;
  const float zero = 0;
  for (size_t i = 0; i < layout_.products.size(); ++i) {
    const Product& product = layout_.products[i];
    const OperandOrder operand_order = OrderOf(product);
    GroupPointers pointers;
    pointers.starts = starts;
    pointers.groups = static_cast<int32_t>(groups);
    pointers.sizes = SharedSizes(product);
    const std::array<size_t, 3> order = {operand_order.first, operand_order.second, 2};
    for (size_t matrix = 0; matrix < order.size(); ++matrix) {
      const Part& part = product[order[matrix]];
      const PointerSource& source = part.memory;
      GroupMatrix& place = pointers.matrices[matrix];
      place.memory = (source.is_result ? results : operands)[source.index];
      (part.rows_axis < 0 ? place.group_bytes : place.row_bytes) = part.step_bytes;
    }
    RETURN_IF_ERROR(WriteGroupPointers(runtime, stream, pointers, written));
    GroupedMatmulDescriptions descriptions(*cublaslt);
    RETURN_IF_ERROR(descriptions.Make(product, groups, arrays));
    const auto at = [&](int64_t matrix) {
      return written + matrix * groups * static_cast<int64_t>(sizeof(void*));
    };
    RETURN_IF_ERROR(CheckCublasLt(
        *cublaslt,
        cublaslt->matmul(handle, descriptions.product, &one, at(0), descriptions.a,
                         at(1), descriptions.b, &zero, at(2), descriptions.c, at(2),
                         descriptions.d, &algorithms_[i], workspace, engine_bytes_,
                         stream),
        "cublasLtMatmul"));
    const Part& output = product[2];
    if (output.rows_axis < 0) continue;
    const GroupedRows rows{results[output.memory.index],
                           output.step_bytes,
                           static_cast<int32_t>(layout_.rows),
                           starts,
                           sizes,
                           static_cast<int32_t>(groups)};
    RETURN_IF_ERROR(ZeroRows(runtime, stream, rows));
  }
  return {};
}

}  // namespace

const BlasEngine kBlasGroups{Covers, List, Make, Read};

}  // namespace jax_cudnn
