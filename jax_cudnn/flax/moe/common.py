# SPDX-License-Identifier: Apache-2.0
"""The parameters that layers of experts of nnx and linen have, and how they run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax.linen.dtypes import promote_dtype
from jax.nn.initializers import Initializer, lecun_normal
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.ops.common.arguments import as_operand
from jax_cudnn.ops.products.moe.layer import layer as run_layer
from jax_cudnn.ops.products.moe.routing import Auxiliary
from jax_cudnn.ops.products.moe.states import LayerState, States

# That of each expert's matrix by itself.
KERNEL_INIT = lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
MATRIX_INIT = lecun_normal()
# The attributes of a layer that are arguments of `moe.layer`.
OPTIONS = (
    *("top_k", "activation", "scores", "normalize", "scale", "groups"),
    *("capacity_factor", "expert_axis", "batch_axis", "tensor_axis", "mesh"),
    *("recipe", "precision", "implementation"),
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides the parameters of a layer."""

    in_features: int
    hidden_features: int
    num_experts: int
    shared_features: int
    use_gate: bool
    use_bias: bool

    def __post_init__(self) -> None:
        for name in ("in_features", "hidden_features", "num_experts"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"MixtureOfExperts: {name}={getattr(self, name)} must be at least "
                    "1. Pass a larger number."
                )
        if self.shared_features < 0:
            raise ValueError(
                f"MixtureOfExperts: shared_features={self.shared_features} is negative."
                " Pass 0 for a layer without shared experts."
            )

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters by their names."""
        d, f, e = self.in_features, self.hidden_features, self.num_experts
        found: dict[str, tuple[int, ...]] = {"router_w": (d, e)}
        into = ("gate", "up") if self.use_gate else ("up",)
        for name in into:
            found[f"{name}_w"] = (e, d, f)
        found["down_w"] = (e, f, d)
        if self.use_bias:
            found |= {f"{name}_bias": (e, f) for name in into}
            found["down_bias"] = (e, d)
        if g := self.shared_features:
            found |= {f"shared_{name}_w": (d, g) for name in into}
            found["shared_down_w"] = (g, d)
        return found


def initializer_of(
    name: str, kernel: Initializer, matrix: Initializer, bias: Initializer
) -> Initializer:
    """Return the one that a parameter has, of those for the three kinds there are."""
    if name.endswith("_bias"):
        return bias
    is_one = name == "router_w" or name.startswith("shared_")
    return matrix if is_one else kernel


def run(
    x: ArrayLike,
    parameters: Mapping[str, jax.Array],
    selection_bias: jax.Array | None,
    dtype: DTypeLike | None,
    states: States,
    **options: Any,
) -> tuple[jax.Array, Auxiliary, States]:
    """Return the layer's results, and the next states of its products.

    The router's parameters keep their own dtype.
    """
    names = [name for name in parameters if name != "router_w"]
    x, *arrays = promote_dtype(
        as_operand("MixtureOfExperts", "inputs", x),
        *(parameters[name] for name in names),
        dtype=dtype,
    )
    given: dict[str, Any] = {"gate_w": None, **dict(zip(names, arrays, strict=True))}
    state = LayerState(*map(states.get, LayerState._fields)) if states else None
    y, auxiliary, following = run_layer(
        x,
        parameters["router_w"],
        selection_bias=selection_bias,
        state=state,
        return_state=True,
        **given,
        **options,
    )
    return y, auxiliary, {} if following is None else following._asdict()


def products_of(parameters: Iterable[str]) -> list[str]:
    """Return the names of the parameters whose products have a state in f8."""
    return [name for name in parameters if name in LayerState._fields]
