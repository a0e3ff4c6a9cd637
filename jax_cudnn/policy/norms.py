# SPDX-License-Identifier: Apache-2.0
"""The properties of norms that the tables' rows name."""

from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.policy.nearest import Kernel


class Norm:
    """A norm or its gradient, and a rewrite that runs it."""

    def __init__(self, part: Graph, rewrite: Rewrite, target: Target | None) -> None:
        (node,), (emitted,) = part.nodes, rewrite.graph.nodes
        self._part = part
        self._roles = {**dict(node.inputs), **dict(node.outputs)}
        self._is_gradient = node.kind.endswith("_backward")
        self.kind = node.kind.removesuffix("_backward")
        self.gpu = target.name if target is not None else ""
        self.rows, self.features = part.tensor(self._roles["x"]).dims[:2]
        # In the kernel. XLA adds in a kernel of its own.
        self.adds_residual = "residual" in dict(emitted.inputs)

    @property
    def is_training(self) -> bool:
        """Whether it is a gradient, or gives the statistics that gradients need.

        XLA computes the statistics in a kernel of their own where they are results.
        """
        return self._is_gradient or "rstd" in self._roles

    @property
    def dtypes(self) -> str:
        """The dtypes of all but the statistics, in alphabetical order."""
        found = {
            self._part.tensor(name).dtype
            for role, name in self._roles.items()
            if role not in ("mean", "rstd")
        }
        return ", ".join(sorted(found))

    @property
    def elements(self) -> int:
        """The elements of x."""
        return self.rows * self.features

    @property
    def point(self) -> Kernel | None:
        """What it is measured as; None for norms that are not of rows."""
        if self.kind not in ("layer_norm", "rms_norm"):
            return None
        words = [f"{self.kind}_backward" if self._is_gradient else self.kind]
        words += [self.dtypes.replace(", ", " and ")]
        is_with_statistics = self.is_training and not self._is_gradient
        words += ["with statistics"] if is_with_statistics else []
        words += ["with residual"] if self.adds_residual else []
        name = ", ".join(words)
        return Kernel(name=name, rows=self.rows, columns=self.features, depth=1.0)
