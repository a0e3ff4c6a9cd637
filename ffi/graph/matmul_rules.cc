// SPDX-License-Identifier: Apache-2.0
// Shape rule of the matmul node.

#include "graph/matmul_rules.h"

#include <cstdint>
#include <string>

#include "graph/role_checker.h"

namespace jax_cudnn {

Status CheckMatmul(const NodeSpec& node, const Roles& roles) {
  const RoleChecker checker(node, roles);
  for (const char* role : {"a", "b", "output"}) {
    RETURN_IF_ERROR(checker.ExpectRank(role, 3));
    RETURN_IF_ERROR(checker.ExpectNoBool(role));
  }
  const Dims& a = checker["a"].dims;
  const Dims& b = checker["b"].dims;
  if (a[2] != b[1]) {
    return checker.Fail("a has " + std::to_string(a[2]) + " columns but b " +
                        std::to_string(b[1]) + " rows");
  }
  if (a[0] != b[0] && a[0] != 1 && b[0] != 1) {
    return checker.Fail("a has batch " + std::to_string(a[0]) + " but b " +
                        std::to_string(b[0]));
  }
  const int64_t batch = a[0] == 1 ? b[0] : a[0];
  return checker.ExpectDims("output", {batch, a[1], b[2]});
}

}  // namespace jax_cudnn
