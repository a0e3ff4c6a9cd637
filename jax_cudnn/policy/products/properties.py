# SPDX-License-Identifier: Apache-2.0
"""The properties of convolutions and products that the tables' rows name."""

import math

from jax_cudnn.graph import Graph, Node, Tensor, is_anchor
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.products.conv import (
    TRIPLES,
    arrays_in,
    conv_attributes,
    is_short_sum,
)
from jax_cudnn.graph.rules import EIGHT_BIT
from jax_cudnn.graph.walks import made_by, read_by
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.legalize.products import (
    causal_conv1d,
    conv_depthwise,
    conv_groups,
    conv_pairs,
    matmul,
)
from jax_cudnn.legalize.products.conv_channels import can_have_rows, more_channels

NARROW = frozenset({"bf16", "f16"})
_FLOATS = NARROW | {"f32"}


def contraction_in(graph: Graph) -> Node:
    """Return the contraction of a graph that has one."""
    (node,) = filter(is_anchor, graph.nodes)
    return node


def is_short_sum_in(graph: Graph) -> bool:
    """Whether a graph's contraction is a sum of a few shifted products to XLA."""
    node = contraction_in(graph)
    if node.kind not in TRIPLES:
        return False
    x, w, _ = arrays_in(graph, node)
    return is_short_sum(x.dims, w.dims)


class Convolution:
    """A convolution, or a gradient of one, before it is rewritten."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._node = graph, contraction_in(graph)
        self.kind = self._node.kind
        # Set where tables are at hand: whether the first rewrite has more channels.
        self.is_first_with_more = False
        self._x, self._w, self._output = arrays_in(graph, self._node)

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has filters of its own."""
        return conv_depthwise.is_depthwise(self._graph, self._node)

    @property
    def groups(self) -> int:
        """The groups of channels."""
        return self._x.dims[1] // self._w.dims[1]

    @property
    def channels(self) -> int:
        """The input channels of a group."""
        return self._w.dims[1]

    @property
    def has_equal_channels(self) -> bool:
        """Whether a group has as many channels in as out."""
        return self._w.dims[0] == self.groups * self.channels

    @property
    def has_power_of_2_channels(self) -> bool:
        """Whether the input channels of a group are a power of two."""
        return self.channels.bit_count() == 1

    @property
    def merged_channels(self) -> int:
        """The input channels of a group, if as many are merged as go together."""
        editor = GraphEditor.of(self._graph)
        return conv_groups.merged_at_once(editor) * self.channels

    @property
    def axes(self) -> int:
        """The spatial axes."""
        return len(self._w.dims) - 2

    @property
    def window(self) -> int:
        """The places of a window."""
        return math.prod(self._w.dims[2:])

    @property
    def window_elements(self) -> int:
        """The elements of a window over a group's channels."""
        return self.window * self.channels

    @property
    def depth(self) -> int:
        """The multiplications for an element of the result, if there were one group."""
        return self.groups * self.window_elements

    @property
    def longest_step(self) -> int:
        """The longest step between windows."""
        return max(conv_attributes(self._node).window_strides)

    @property
    def dtype(self) -> str:
        """The dtype of the filters, or of their gradient."""
        return self._w.dtype

    @property
    def operand_dtype(self) -> str:
        """The dtype of the first operand."""
        return self._graph.tensor(self._node.inputs[0][1]).dtype

    @property
    def is_of_16_bits(self) -> bool:
        """Whether both operands are."""
        return {
            self._graph.tensor(name).dtype for _, name in self._node.inputs
        } <= NARROW

    @property
    def more(self) -> str:
        """The name of the rewrite of x with more channels, "" if there is none."""
        return more_channels(self._graph, self._node) or ""

    @property
    def has_pairs(self) -> bool:
        """Whether neighbouring places can be taken in pairs."""
        return conv_pairs.pairs(self._graph, self._node)

    @property
    def work(self) -> int:
        """The multiplications."""
        return math.prod(self._output.dims) * self.window_elements

    @property
    def may_have_rows(self) -> bool:
        """Whether rows of a window can be channels."""
        return can_have_rows(self._graph, self._node)


class Depthwise:
    """A depthwise convolution as a rewrite of it passes it to cuDNN."""

    def __init__(
        self, rewrite: Rewrite, *, has_own_engine: bool, is_first: bool
    ) -> None:
        self._rewrite, self._node = rewrite, contraction_in(rewrite.graph)
        self.way, self.kind = rewrite.names[0], self._node.kind
        # Of all of its rewrites.
        self.has_own_engine, self.is_first = has_own_engine, is_first
        self._x, self._w, _ = arrays_in(rewrite.graph, self._node)

    @property
    def has_engine(self) -> bool:
        """Whether cuDNN has an engine for such convolutions alone."""
        return conv_depthwise.has_engine(self._rewrite)

    @property
    def is_alone(self) -> bool:
        """Whether the kernel computes nothing else."""
        return len(self._rewrite.graph.nodes) == 1

    @property
    def channels(self) -> int:
        """The channels of all groups."""
        return self._x.dims[1]

    @property
    def is_narrow(self) -> bool:
        """Whether x and the filters are of 16 bits."""
        return {self._x.dtype, self._w.dtype} <= NARROW

    @property
    def is_along_one(self) -> bool:
        """Whether there is one spatial axis."""
        return conv_depthwise.is_along_one(self._x, self._w)

    @property
    def is_short_sum(self) -> bool:
        """Whether XLA computes it as a sum of shifted products."""
        problem = self._rewrite.problem
        return problem is not None and is_short_sum_in(problem)

    @property
    def has_windows_of_1(self) -> bool:
        """Whether a window is one place."""
        return {*self._w.dims[2:]} == {1}

    @property
    def is_dilated(self) -> bool:
        """Whether filters have holes."""
        return {*conv_attributes(self._node).rhs_dilation} != {1}

    @property
    def longest_step(self) -> int:
        """The longest step between windows."""
        return max(conv_attributes(self._node).window_strides)


class CausalConvolution:
    """A causal convolution or its gradient, and a rewrite that runs it."""

    def __init__(self, part: Graph, rewrite: Rewrite) -> None:
        (node,) = part.nodes
        x = roles_in(part, node)["x"]
        self.kind, self.dtype = node.kind, x.dtype
        self.is_by_function = causal_conv1d.FUNCTION in rewrite.names
        self.elements = math.prod(x.dims)


class Matmul:
    """A product of matrices with what surrounds it."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._node = graph, contraction_in(graph)
        self._dtypes = {graph.tensor(name).dtype for _, name in self._node.inputs}
        ((_, result),) = self._node.outputs
        self._result: Tensor = graph.tensor(result)

    @property
    def is_of_floats(self) -> bool:
        """Whether the operands are of 16 bits or f32, once 8-bit ones are converted."""
        return self._dtypes <= _FLOATS

    @property
    def is_of_16_bits(self) -> bool:
        """Whether the operands are, once 8-bit ones are converted."""
        return self._dtypes <= NARROW

    @property
    def has_8_bit_weights(self) -> bool:
        """Whether one operand alone has 8 bits, with a sign or as a float."""
        dtypes = {tensor.dtype for tensor in self._graph.input_tensors}
        return "u8" not in dtypes and matmul.narrow_side(self._graph) is not None

    @property
    def operations(self) -> int:
        """The operations around the product, without roundings."""
        modes = [getattr(each.attributes, "mode", "") for each in self._graph.nodes]
        return sum(mode not in ("", "identity") for mode in modes)

    @property
    def columns(self) -> int:
        """The columns of the result."""
        return self._result.dims[2]

    @property
    def work(self) -> int:
        """The multiplications."""
        depth = self._graph.tensor(dict(self._node.inputs)["a"]).dims[2]
        return math.prod(self._result.dims) * depth

    @property
    def is_gated(self) -> bool:
        """Whether the product is multiplied by an activation of an array.

        Gradients are not gated products: theirs have no operand in common.
        """
        operands, after = read_by([self._node]), made_by([self._node])
        activated: set[str] = set()
        is_gated = False
        for each in self._graph.nodes:
            mode = getattr(each.attributes, "mode", "")
            if mode.endswith("_grad"):
                return False
            read, made = read_by([each]), made_by([each])
            if not read.isdisjoint(after):
                after |= made
                is_gated |= mode == "mul" and not activated.isdisjoint(read)
            elif each is not self._node and mode != "identity":
                activated |= made - operands
        return is_gated


class CopiedForF8:
    """A product of f8 operands, one of which is copied for it, or both.

    ``uses`` is how often each element of the copies is multiplied, at least.
    """

    def __init__(self, graph: Graph) -> None:
        roles = roles_in(graph, contraction_in(graph))
        batch, rows, columns = roles["output"].dims
        batch //= roles["b"].dims[0]
        uses = {"a": columns, "b": batch * rows}
        self.uses = min(uses[role] for role in matmul.copied_for_f8(graph))


class GroupedProduct:
    """A product of groups of rows, each with a matrix of its own, or its gradient."""

    def __init__(self, part: Graph, rewrite: Rewrite | None = None) -> None:
        (node,) = part.nodes
        roles = roles_in(part, node)
        self.way = rewrite.names[-1] if rewrite is not None else ""
        self.is_of_16_bits = roles["a"].dtype in NARROW
        self.is_of_8_bits = roles["a"].dtype in EIGHT_BIT
        self._rows = roles["a"].dims[1]
        self.groups, self._depth, self._columns = roles["b"].dims

    @property
    def work(self) -> int:
        """The multiplications."""
        return self._rows * self._depth * self._columns

    @property
    def rows_of_a_group(self) -> float:
        """The rows of a group, in the mean."""
        return self._rows / self.groups
