// SPDX-License-Identifier: Apache-2.0
// Reads a product that cuBLASLt computes in a graph.

#ifndef JAX_CUDNN_BLAS_PROBLEM_H_
#define JAX_CUDNN_BLAS_PROBLEM_H_

#include <cstdint>
#include <optional>

#include "candidates/pointer_source.h"
#include "cudnn/cublaslt.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

// A column-major d = epilogue(a b + c): the transposed of our product, which is stored
// row by row. So `a` is the second operand of our matmul.
struct BlasProblem {
  using Memory = PointerSource;

  // A matrix as cuBLASLt sees it, column by column, once for each example.
  struct Matrix {
    Memory memory;
    int32_t type = 0;
    bool is_transposed = false;
    int64_t rows = 0;  // as stored
    int64_t columns = 0;
    int64_t leading = 0;       // elements from a column to the next
    int64_t batch_stride = 0;  // and from an example to the next
  };

  Matrix a;
  Matrix b;
  Matrix d;
  std::optional<Matrix> c;
  int32_t batch = 1;
  int32_t compute = kCublasComputeF32;
  uint32_t epilogue = kEpilogueNone;
  std::optional<Memory> bias;
  int64_t bias_batch_stride = 0;
  std::optional<Matrix> aux;  // gelu's argument, of d's shape
  std::optional<Memory> scale_a;
  std::optional<Memory> scale_b;
};

// The problem that a graph is; nothing where cuBLASLt has no kernel for it. It has one
// for a matmul in f32 sums with, in this order, factors of f8 operands, a bias of
// columns, a residual; or with a bias and relu or gelu's tanh form, whose argument may
// be a result, too; or times the gradient of that gelu. A matmul that is alone is XLA's
// by cuBLASLt as it is, and is none, unless its operands are f8.
std::optional<BlasProblem> ReadBlasProblem(const GraphSpec& graph);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_BLAS_PROBLEM_H_
