// SPDX-License-Identifier: Apache-2.0
// Shape rules of the convolution nodes.

#include "graph/conv_rules.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "graph/role_checker.h"

namespace jax_cudnn {
namespace {

// A size times a dilation needs twice the bits of either, and the text is untrusted.
__extension__ using Wide = __int128;

// The roles of x, w and output in one kind.
struct Triple {
  std::string_view x;
  std::string_view w;
  std::string_view output;
};

Status CheckAttributes(const NodeSpec& node) {
  const size_t rank = node.Attribute<Dims>("window_strides").size();
  for (const char* name :
       {"padding_low", "padding_high", "lhs_dilation", "rhs_dilation"}) {
    if (node.Attribute<Dims>(name).size() != rank) {
      return InvalidArgument("conv: " + std::string(name) + " has not " +
                             std::to_string(rank) + " entries");
    }
  }
  for (const char* name : {"window_strides", "lhs_dilation", "rhs_dilation"}) {
    const Dims& values = node.Attribute<Dims>(name);
    if (std::any_of(values.begin(), values.end(),
                    [](int64_t value) { return value < 1; })) {
      return InvalidArgument("conv: " + std::string(name) + " " + ListText(values) +
                             " has an entry below 1");
    }
  }
  return {};
}

// The size of an axis with zeros put between its elements.
Wide Dilated(int64_t size, int64_t dilation) {
  return size == 0 ? 0 : static_cast<Wide>(size - 1) * dilation + 1;
}

// The size of a spatial axis of the output.
StatusOr<int64_t> OutputSize(const NodeSpec& node, size_t axis, int64_t x, int64_t w) {
  const Wide padded = Dilated(x, node.Attribute<Dims>("lhs_dilation")[axis]) +
                      node.Attribute<Dims>("padding_low")[axis] +
                      node.Attribute<Dims>("padding_high")[axis];
  const Wide room = padded - Dilated(w, node.Attribute<Dims>("rhs_dilation")[axis]);
  if (room < 0) return 0;
  const Wide size = room / node.Attribute<Dims>("window_strides")[axis] + 1;
  if (size > std::numeric_limits<int64_t>::max()) {
    return InvalidArgument(node.kind + ": the size of spatial axis " +
                           std::to_string(axis) + " overflows 64 bits");
  }
  return static_cast<int64_t>(size);
}

Status CheckChannels(const RoleChecker& checker, const Dims& x, const Dims& w) {
  if ((w[1] == 0) != (x[1] == 0) || (w[1] != 0 && x[1] % w[1] != 0)) {
    return checker.Fail(std::to_string(x[1]) + " channels do not divide by " +
                        std::to_string(w[1]) + " of a group");
  }
  const int64_t groups = w[1] == 0 ? 1 : x[1] / w[1];
  if (w[0] % groups != 0) {
    return checker.Fail(std::to_string(w[0]) + " out channels do not divide by " +
                        std::to_string(groups) + " groups");
  }
  return {};
}

Status Check(const NodeSpec& node, const Roles& roles, const Triple& triple) {
  RETURN_IF_ERROR(CheckAttributes(node));
  const RoleChecker checker(node, roles);
  const size_t axes = node.Attribute<Dims>("window_strides").size();
  if (axes < 1 || axes > 3) {
    return checker.Fail(std::to_string(axes) + " spatial axes are not 1 to 3");
  }
  for (std::string_view role : {triple.x, triple.w, triple.output}) {
    RETURN_IF_ERROR(checker.ExpectRank(role, axes + 2));
    RETURN_IF_ERROR(checker.ExpectNoBool(role));
  }
  const Dims& x = checker[triple.x].dims;
  const Dims& w = checker[triple.w].dims;
  RETURN_IF_ERROR(CheckChannels(checker, x, w));
  Dims dims = {x[0], w[0]};
  for (size_t i = 0; i < axes; ++i) {
    ASSIGN_OR_RETURN(const int64_t size, OutputSize(node, i, x[i + 2], w[i + 2]));
    dims.push_back(size);
  }
  return checker.ExpectDims(triple.output, dims);
}

}  // namespace

Status CheckConvFprop(const NodeSpec& node, const Roles& roles) {
  return Check(node, roles, {"x", "w", "output"});
}

Status CheckConvDgrad(const NodeSpec& node, const Roles& roles) {
  return Check(node, roles, {"grad_x", "w", "grad_output"});
}

Status CheckConvWgrad(const NodeSpec& node, const Roles& roles) {
  return Check(node, roles, {"x", "grad_w", "grad_output"});
}

}  // namespace jax_cudnn
