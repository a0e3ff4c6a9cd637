# SPDX-License-Identifier: Apache-2.0
"""Writing graphs node by node: names, dims and dtypes of what lies between.

A tensor made here is virtual, in the accumulator's dtype, until it is given a name and
a dtype of its own as a result.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax_cudnn.graph.pointwise import (
    COMPARISONS,
    ConstantAttributes,
    PointwiseAttributes,
    ReductionAttributes,
    is_max_or_min,
)
from jax_cudnn.graph.rules import EIGHT_BIT, broadcast
from jax_cudnn.graph.spec import Attributes, DTypeName, Graph, Node, Tensor
from jax_cudnn.graph.walks import leading_to, made_by, read_by, readers


class GraphWriter:
    """A graph being written; tensors are spoken of by their names."""

    def __init__(self, accumulator: DTypeName, prefix: str = "") -> None:
        """Start empty; virtual tensors are in the accumulator's dtype.

        The prefix keeps new names apart from those of operands and results.
        """
        self.accumulator: DTypeName = accumulator
        self._prefix = prefix
        self._tensors: dict[str, Tensor] = {}
        self._nodes: list[Node] = []
        self._inputs: list[str] = []
        self._constants: dict[tuple[float, tuple[int, ...]], str] = {}
        self._casts: dict[tuple[str, DTypeName], str] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of that name."""
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._tensors

    def input(self, tensor: Tensor) -> str:
        """Add an operand."""
        self._tensors[tensor.name] = tensor
        self._inputs.append(tensor.name)
        return tensor.name

    def node(
        self,
        kind: str,
        inputs: Mapping[str, str],
        attributes: Attributes,
        *,
        output: str = "output",
        dims: tuple[int, ...],
        order: tuple[int, ...],
        dtype: DTypeName | None = None,
    ) -> str:
        """Add a node with one result, in its role `output`, and return its name."""
        label = getattr(attributes, "mode", kind)
        name = f"{self._prefix}{label}_{len(self._nodes)}"
        self._tensors[name] = Tensor(
            name=name, dtype=dtype or self.accumulator, dims=dims, order=order
        )
        self._nodes.append(Node.make(kind, inputs, {output: name}, attributes))
        return name

    def copy(self, node: Node, tensor: Tensor, names: Mapping[str, str]) -> str:
        """Add a node of another graph with its one result, and return its name.

        ``names`` says what the tensors that it reads are called here.
        """
        ((role, _),) = node.outputs
        return self.node(
            node.kind,
            {each: names[name] for each, name in node.inputs},
            node.attributes,
            output=role,
            dims=tensor.dims,
            order=tensor.order,
            dtype=tensor.dtype,
        )

    def pointwise(
        self, mode: str, *names: str, alpha: float = 0.0, dtype: DTypeName | None = None
    ) -> str:
        """Add a pointwise node over tensors whose dims are broadcast."""
        tensors = [self._tensors[name] for name in names]
        dims = broadcast(*(tensor.dims for tensor in tensors))
        order = next((t.order for t in tensors if t.dims == dims), tensors[0].order)
        return self.node(
            "pointwise",
            dict(zip("abc", names, strict=False)),
            PointwiseAttributes(mode=mode, alpha=alpha),
            dims=dims,
            order=order,
            dtype="bool" if mode in COMPARISONS else dtype,
        )

    def constant(
        self,
        value: float,
        rank: int | None = None,
        *,
        order: tuple[int, ...] | None = None,
    ) -> str:
        """Add a constant of that rank (by default that of the first tensor), once.

        Its ``order`` is that of the axes; if it is given, it says the rank as well.
        """
        if order is None:
            rank = rank or len(next(iter(self._tensors.values())).dims)
            order = tuple(range(rank))
        if value == 0 and math.copysign(1, value) < 0:
            # Graphs do not distinguish -0.0 from 0.0.
            return self.pointwise("neg", self.constant(0.0, order=order))
        if (value, order) not in self._constants:
            self._constants[value, order] = self.node(
                "constant",
                {},
                ConstantAttributes(value=value),
                dims=(1,) * len(order),
                order=order,
                dtype="f64" if self.accumulator == "f64" else "f32",
            )
        return self._constants[value, order]

    def is_constant(self, name: str) -> bool:
        """Whether a tensor is made by a constant node."""
        makers = (node for node in self._nodes if node.kind == "constant")
        return any(name == each for node in makers for _, each in node.outputs)

    def cast(self, name: str, dtype: DTypeName) -> str:
        """Return the tensor rounded to a dtype."""
        if self._tensors[name].dtype == dtype:
            return name
        if (name, dtype) not in self._casts:
            rounded = self.pointwise("identity", name, dtype=dtype)
            self._casts[name, dtype] = rounded
        return self._casts[name, dtype]

    def reduce_to(
        self,
        name: str,
        dims: tuple[int, ...],
        mode: str = "add",
        dtype: DTypeName | None = None,
    ) -> str:
        """Return the sum, or another mode, over the axes where `dims` has 1."""
        tensor = self._tensors[name]
        if tensor.dims == dims:
            return name
        return self.node(
            "reduction",
            {"input": name},
            ReductionAttributes(mode=mode),
            dims=dims,
            order=tensor.order,
            dtype=dtype,
        )

    def result(self, name: str, final: Tensor) -> str:
        """Give a tensor the name, dtype and order of a result, and return its name.

        A tensor that others read, or an operand, is copied into it by a node.
        """
        is_alone = name in made_by(self._nodes) and not readers(self._nodes, name)
        if not is_alone:
            name = self.pointwise("identity", name, dtype=final.dtype)
        self._tensors.pop(name)
        self._tensors[final.name] = final
        # Nothing reads it.
        self._nodes = [node.renamed({name: final.name}) for node in self._nodes]
        return final.name

    def finish(self, outputs: Sequence[str]) -> Graph:
        """Return the graph of what the outputs need; all operands stay."""
        nodes = leading_to(self._nodes, outputs)
        needed = read_by(nodes).union(outputs)
        return Graph(
            tensors=tuple(
                tensor
                for name, tensor in self._tensors.items()
                if name in needed or name in self._inputs
            ),
            nodes=tuple(nodes),
            inputs=tuple(self._inputs),
            outputs=tuple(outputs),
        )


class GradientWriter(GraphWriter):
    """A gradient graph being written beside the forward graph that it belongs to.

    Forward values are used by their forward names. An operand or a result of the
    forward graph is an operand here. A value that follows from operands without a
    contraction, or from a single other one, as all within an activation do from its
    argument, is computed again from that. Any other is a residual, which the forward
    graph is to save. So is what one contraction hands to the next one: it is written
    anyway.
    """

    def __init__(self, graph: Graph, accumulator: DTypeName) -> None:
        """Start the gradient of a graph."""
        super().__init__(accumulator)
        self.graph = graph
        self.residuals: list[str] = []
        # Where each operand comes from: a forward tensor's name, seen with its axes in
        # some order, or a result's name for its cotangent.
        self.sources: dict[str, str] = {}
        self.cotangents: set[str] = set()
        self._forward_names = {tensor.name for tensor in graph.tensors}
        self._makers = {name: node for node in graph.nodes for _, name in node.outputs}
        self._views: dict[tuple[str, tuple[int, ...]], str] = {}
        # The one tensor that each follows from; None for a constant.
        self._roots: dict[str, str | None] = {name: name for name in graph.inputs}
        self._after_contraction: set[str] = set()
        # A max or min is found again by comparison with what it was taken of.
        readers = [x for x in graph.nodes if _is_contraction(x) or is_max_or_min(x)]
        self._handed_on = read_by(readers)
        for node in graph.nodes:
            self._place(node)
        # That of a 16-bit result; a wider one deserves wider cotangents.
        dtype = graph.output_tensors[0].dtype
        self.cotangent_dtype: DTypeName = (
            dtype if dtype in ("bf16", "f16") else accumulator
        )

    def forward(self, name: str) -> Tensor:
        """Return a tensor of the forward graph."""
        return self.graph.tensor(name)

    def is_result(self, name: str) -> bool:
        """Whether the forward graph gives this tensor to its caller."""
        return name in self.graph.outputs

    def use(self, name: str) -> str:
        """Return a forward value as a tensor of this graph."""
        return self.view(name, tuple(range(len(self.forward(name).dims))))

    def view(self, name: str, axes: tuple[int, ...]) -> str:
        """Return a forward value with its logical axes permuted, nothing moved."""
        # Without recursion: a chain of operations may be long.
        pending = [name]
        while pending:
            current = pending[-1]
            missing: list[str] = []
            if (current, axes) not in self._views:
                if self._is_operand(current):
                    self._views[current, axes] = self._operand(current, axes)
                else:
                    inputs = (each for _, each in self._makers[current].inputs)
                    missing = [x for x in inputs if (x, axes) not in self._views]
                    if not missing:
                        self._views[current, axes] = self._again(current, axes)
            if missing:
                pending += reversed(missing)
            else:
                pending.pop()
        return self._views[name, axes]

    def rounded(self, name: str) -> str:
        """Return a cotangent in the dtype of a 16-bit result.

        All that reads it reads the one tensor: the sum for a bias too.
        """
        return self.cast(name, self.cotangent_dtype)

    def factors(self, cotangent: str, operand: str) -> tuple[str, str]:
        """Return a cotangent and an operand in the dtype of the gradient's product.

        That is the operand's, but for operands of 8 bits and sums in f64. A cotangent
        has not been scaled to 8 bits, and it has all digits of f64 sums: it stays as it
        is, and the operand is widened, which is exact.
        """
        dtype = self[operand].dtype
        if self.accumulator == "f64":
            dtype = "f64"
        elif dtype in EIGHT_BIT:
            dtype = "bf16" if self.cotangent_dtype == "bf16" else "f32"
        return self.cast(cotangent, dtype), self.cast(operand, dtype)

    def cotangent(self, name: str) -> str:
        """Return the cotangent of a forward result, as an operand."""
        grad = self.gradient_name(name)
        self.sources[grad] = name
        self.cotangents.add(grad)
        return self.input(replace(self.forward(name), name=grad))

    def gradient_name(self, name: str) -> str:
        """Return a name for the gradient of a forward tensor, or for its cotangent.

        A gradient graph has names of that kind already, when it is differentiated.
        """
        grad = f"grad_{name}"
        while grad in self or grad in self._forward_names:
            grad = f"grad_{grad}"
        return grad

    def _place(self, node: Node) -> None:
        """Note what the results of a node follow from, once that of its inputs is."""
        inputs = [name for _, name in node.inputs]
        is_contraction = _is_contraction(node)
        roots = {self._roots[name] for name in inputs} - {None}
        for _, name in node.outputs:
            if is_contraction or self._after_contraction.intersection(inputs):
                self._after_contraction.add(name)
            is_handed_on = name in self._handed_on & self._after_contraction
            is_own = is_contraction or len(roots) > 1 or is_handed_on
            self._roots[name] = name if is_own else next(iter(roots), None)

    def _is_operand(self, name: str) -> bool:
        """Whether a forward value is read; otherwise it is computed again."""
        # A truth value is cheaper to find again than to keep.
        is_made = name in self._makers and (
            name not in self._after_contraction or self.forward(name).dtype == "bool"
        )
        return self.is_result(name) or (self._roots[name] == name and not is_made)

    def _operand(self, name: str, axes: tuple[int, ...]) -> str:
        tensor = self.forward(name)
        is_residual = name in self._makers and not self.is_result(name)
        if is_residual:
            tensor = residual_tensor(self.graph, name)
            # A graph that saves already, as one under a second derivative, goes on.
            is_saved = self.is_result(tensor.name) or name in self.residuals
            if not is_saved:
                self.residuals.append(name)
        # Names that a writer gave the forward graph may be taken by nodes here.
        is_made = name in self._makers and tensor.name[-1].isdigit()
        is_new = is_made and not tensor.name.startswith("saved_")
        label = f"saved_{name}" if is_new else tensor.name
        is_plain = axes == tuple(range(len(axes)))
        view = label if is_plain else f"{label}_view_{''.join(map(str, axes))}"
        self.sources[view] = tensor.name
        return self.input(
            replace(
                tensor,
                name=view,
                dims=tuple(tensor.dims[axis] for axis in axes),
                order=tuple(axes.index(axis) for axis in tensor.order),
            )
        )

    def _again(self, name: str, axes: tuple[int, ...]) -> str:
        maker, tensor = self._makers[name], self.forward(name)
        if maker.kind == "constant":
            assert isinstance(maker.attributes, ConstantAttributes)
            return self.constant(maker.attributes.value, len(tensor.dims))
        return self.node(
            maker.kind,
            {role: self._views[each, axes] for role, each in maker.inputs},
            maker.attributes,
            dims=tuple(tensor.dims[axis] for axis in axes),
            order=tuple(axes.index(axis) for axis in tensor.order),
            dtype=tensor.dtype,
        )


def _is_contraction(node: Node) -> bool:
    return node.kind not in ("pointwise", "constant", "reduction")


def residual_tensor(graph: Graph, name: str) -> Tensor:
    """Return how a virtual forward tensor is saved: in the dtype of the results.

    Not in 8 bits: those are for values that have been scaled to them; and sums over
    8-bit integers, which are yet to be scaled, in full. A tensor that
    has the dtype already is a result itself. (cuDNN 9.19 gives wrong values for a copy
    of f32 to f32 beside another result: an H200,
    tests/products/gpu/test_fusion_numerics.py.)
    """
    tensor = graph.tensor(name)
    dtype = graph.output_tensors[0].dtype
    if any(name in read_by([node]) for node in graph.nodes if is_max_or_min(node)):
        return tensor  # Rounded, it might not be the max or min any more.
    sums = made_by(node for node in graph.nodes if node.kind == "reduction")
    if graph.outputs[0] in sums:
        return tensor  # The dtype of a sum says nothing of what is added up.
    if dtype in ("f8_e4m3fn", "f8_e5m2"):
        dtype = "bf16"
    if any(t.dtype in ("i8", "u8") for t in graph.input_tensors):
        return tensor
    if tensor.dtype not in ("f32", "f64") or tensor.dtype == dtype:
        return tensor
    return replace(tensor, name=f"saved_{name}", dtype=dtype)
