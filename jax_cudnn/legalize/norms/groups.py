# SPDX-License-Identifier: Apache-2.0
"""Rewrites group norms as layer norms; letters as in node_kinds.json.

cuDNN normalises single channels (instance norm), or rows. The channels of a group at
all positions are a row of a layer norm, once they are stored next to each other. Its
scale has a number for each of them, and would have to be written out: so the kernel
gets ones, and XLA multiplies by the scale of each channel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, NormAttributes, Tensor, norm_graph
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.transforms.gradient_kernel import single_node_graph
from jax_cudnn.legalize.common.editor import by_role
from jax_cudnn.legalize.common.legalization import Arrays, Rewrite
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored
from jax_cudnn.reference.norms import with_statistics

_NOTE = "XLA stores groups as rows before the kernel, and scales the result"


def as_layer_norm(graph: Graph) -> Rewrite:
    """Return the rewrite of a group norm, or of its gradient, as a layer norm."""
    (node,) = graph.nodes
    roles = roles_in(graph, node)
    assert isinstance(node.attributes, NormAttributes)
    is_backward = node.kind.endswith("_backward")
    build = _Backward if is_backward else _Forward
    return build(graph, roles, node.attributes).rewrite()


class _Rewriting:
    """A group norm, and what its arrays are as rows."""

    def __init__(
        self, graph: Graph, roles: Mapping[str, Tensor], attributes: NormAttributes
    ) -> None:
        self._graph = graph
        self._roles = roles
        self._attributes = attributes
        (node,) = graph.nodes
        self._role_of = {name: role for role, name in node.outputs}
        # Two images of 8 x 8 with 6 channels in 3 groups: x is (2, 3, 2, 64), and the
        # layer norm's rows are (6, 128), one for each image and group.
        n, g, c, y = roles["x"].dims
        self._dims = (n * g, c * y)

    def rewrite(self) -> Rewrite:
        return Rewrite(
            graph=self.rewritten(),
            before=self.before,
            after=self.after,
            notes=(_NOTE,),
        )

    def rewritten(self) -> Graph:
        raise NotImplementedError

    def before(self, operands: Sequence[jax.Array]) -> Arrays:
        raise NotImplementedError

    def after(
        self, operands: Sequence[jax.Array], results: Sequence[jax.Array]
    ) -> Arrays:
        raise NotImplementedError

    def tensor(self, role: str, dims: tuple[int, ...], dtype: str = "") -> Tensor:
        like = self._roles.get(role, self._roles["x"])
        plain = replace(like, name=role, dims=dims, order=(0, 1))
        return replace(plain, dtype=dtype) if dtype else plain  # type: ignore[arg-type]

    def rows(self, role: str) -> Tensor:
        return self.tensor(role, self._dims)

    def factors(self, role: str) -> Tensor:
        dtype = self._roles["x"].dtype
        return self.tensor(role, (1, self._dims[1]), dtype)

    def statistics(self, role: str) -> Tensor:
        return self.tensor(role, (self._dims[0], 1), "f32")

    def logical(self, operands: Sequence[jax.Array]) -> dict[str, jax.Array]:
        env = by_role(self._graph, operands)
        return {role: to_logical(self._roles[role], x) for role, x in env.items()}

    def stored(self, found: Mapping[str, jax.Array]) -> Arrays:
        return tuple(
            to_stored(tensor, found[self._role_of[tensor.name]]).astype(
                jax_dtype(tensor.dtype)
            )
            for tensor in self._graph.output_tensors
        )

    def as_rows(self, x: jax.Array) -> jax.Array:
        return jnp.reshape(x, self._dims)

    def as_groups(self, x: jax.Array) -> jax.Array:
        n, g, _, _ = self._roles["x"].dims
        full = x.shape[1] != 1
        return jnp.reshape(x, self._roles["x"].dims if full else (n, g, 1, 1))

    def one(self) -> jax.Array:
        return jnp.ones((1, self._dims[1]), jax_dtype(self._roles["x"].dtype))


class _Forward(_Rewriting):
    """The norm itself."""

    @property
    def _has_statistics(self) -> bool:
        return bool({"mean", "rstd"} & self._roles.keys())

    def rewritten(self) -> Graph:
        inputs = {"x": self.rows("x")}
        inputs |= {role: self.factors(role) for role in ("scale", "bias")}
        return norm_graph(
            "layer_norm",
            inputs,
            attributes=self._attributes,
            output=self.rows("output"),
            with_statistics=self._has_statistics,
        )

    def before(self, operands: Sequence[jax.Array]) -> Arrays:
        x = self.as_rows(self.logical(operands)["x"])
        return x, self.one(), jnp.zeros_like(self.one())

    def after(
        self, operands: Sequence[jax.Array], results: Sequence[jax.Array]
    ) -> Arrays:
        given = self.logical(operands)
        names = ("output", "mean", "rstd")
        found = {
            role: self.as_groups(x) for role, x in zip(names, results, strict=False)
        }
        output = found["output"].astype(jnp.float32)
        if "scale" in given:
            output = output * given["scale"].astype(jnp.float32)
        if "bias" in given:
            output = output + given["bias"].astype(jnp.float32)
        return self.stored({**found, "output": output})


class _Backward(_Rewriting):
    """The gradient of the norm."""

    @property
    def _grad_dtype(self) -> str:
        """The dtype of the scaled cotangent: f32 if x has another than the output."""
        dtypes = {self._roles[role].dtype for role in ("x", "grad_output")}
        return dtypes.pop() if len(dtypes) == 1 else "f32"

    def rewritten(self) -> Graph:
        inputs = {
            "x": self.rows("x"),
            "scale": self.factors("scale"),
            "mean": self.statistics("mean"),
            "rstd": self.statistics("rstd"),
            "grad_output": self.tensor("grad_output", self._dims, self._grad_dtype),
        }
        outputs = {
            "grad_x": self.rows("grad_x"),
            "grad_scale": self.factors("grad_scale"),
            "grad_bias": self.factors("grad_bias"),
        }
        return single_node_graph(
            "layer_norm_backward", inputs, outputs, self._attributes
        )

    def before(self, operands: Sequence[jax.Array]) -> Arrays:
        given = self.logical(operands)
        grad = given["grad_output"].astype(jnp.float32)
        if "scale" in given:
            grad = grad * given["scale"].astype(jnp.float32)
        statistics = (
            jnp.reshape(given[role], (self._dims[0], 1)) for role in ("mean", "rstd")
        )
        grad = self.as_rows(grad.astype(jax_dtype(self._grad_dtype)))
        return self.as_rows(given["x"]), self.one(), *statistics, grad

    def after(
        self, operands: Sequence[jax.Array], results: Sequence[jax.Array]
    ) -> Arrays:
        given = self.logical(operands)
        grad_x = self.as_groups(results[0])
        grad = given["grad_output"].astype(jnp.float32)
        normal = (given["x"].astype(jnp.float32) - given["mean"]) * given["rstd"]
        found = {
            "grad_x": with_statistics("group_norm", grad_x, given),
            "grad_scale": jnp.sum(grad * normal, (0, 3), keepdims=True),
            "grad_bias": jnp.sum(grad, (0, 3), keepdims=True),
        }
        return self.stored(found)
