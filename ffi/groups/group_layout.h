// SPDX-License-Identifier: Apache-2.0
// Which matmuls a grouped product consists of, and where their operands are.

#ifndef JAX_CUDNN_GROUP_LAYOUT_H_
#define JAX_CUDNN_GROUP_LAYOUT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/status.h"
#include "candidates/pointer_source.h"
#include "graph/graph_spec.h"

namespace jax_cudnn {

// The matmuls of each group of rows: one for a grouped product, one or two for its
// gradient.
struct GroupLayout {
  // An operand or result of a group's matmul: some rows of an array, or a matrix.
  struct Part {
    TensorSpec tensor;   // as the matmul has it, one row for all rows
    int rows_axis = -1;  // of the tensor; -1 for a matrix of the group's own
    PointerSource memory;
    int64_t step_bytes = 0;  // from a row, or a group, to the next
  };
  using Product = std::array<Part, 3>;  // a, b, output

  size_t sizes = 0;              // which operand has the rows of each group
  std::optional<size_t> starts;  // and which, if any, where each group begins
  int64_t groups = 0;
  int64_t rows = 0;
  std::vector<Product> products;
};

// Whether a graph is one grouped matmul, or its gradient, given the sizes of the
// groups. cuDNN's own operation takes where they start, and no sizes.
bool HasGroupSizes(const GraphSpec& graph);

// The layout of such a graph. UNIMPLEMENTED where an array has no elements, or is not
// stored group by group, row by row.
StatusOr<GroupLayout> ReadGroupLayout(const GraphSpec& graph);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GROUP_LAYOUT_H_
