# SPDX-License-Identifier: Apache-2.0
"""Lays out the arrays of a run over a mesh of devices."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from language.names import is_matrix, name_of
from language.settings import Settings

from gpt.settings import VOCABULARY

Parallel = Literal["data", "fsdp", "tensor"]


# The axes of each parameter that are split over "model". First layers are split by
# their columns and last layers by their rows, so that a block needs one sum over the
# GPUs for attention and one for the perceptron. All other parameters are whole on each
# GPU.
TENSOR_PARALLEL = {
    "tokens.embedding": P("model", None),  # vocabulary, width
    "qkv.kernel": P(None, "model", None, None),  # width, heads, 3, head size
    "qkv.bias": P("model", None, None),  # heads, 3, head size
    "out.kernel": P("model", None, None),  # heads, head size, width
    "up.kernel": P(None, "model"),  # width, 4 width
    "up.bias": P("model"),  # 4 width
    "down.kernel": P("model", None),  # 4 width, width
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The devices as a mesh of "data" and "model", and what is split over them."""

    mesh: jax.sharding.Mesh
    parallel: Parallel

    @property
    def rows(self) -> P:
        """Return how the rows of a batch are split."""
        return P("data")

    def of_state(self, state: Any) -> Any:
        """Return where each array of parameters or of the optimizer is kept."""
        data = self.mesh.shape["data"] if self.parallel == "fsdp" else 1
        return self._shardings(state, data)

    def of_use(self, params: nnx.State) -> nnx.State:
        """Return where each parameter is when it is used: whole along "data"."""
        return self._shardings(params, 1)

    def _shardings(self, tree: Any, data: int) -> Any:
        def sharding(path: tuple[Any, ...], x: jax.Array) -> NamedSharding:
            return NamedSharding(self.mesh, spec_of(path, x.shape, data))

        return jax.tree_util.tree_map_with_path(sharding, tree)


def spec_of(path: tuple[Any, ...], shape: tuple[int, ...], data: int) -> P:
    """Return how a parameter, or the optimizer's moment of it, is split.

    With `data` above 1 (FSDP), the longest axis of each matrix that can be split that
    often is split over "data".
    """
    name = name_of(path)
    rules = (rule for ending, rule in TENSOR_PARALLEL.items() if name.endswith(ending))
    axes = list(next(rules, P(*[None] * len(shape))))
    free = [i for i, x in enumerate(axes) if x is None and shape[i] % data == 0]
    if data > 1 and free and is_matrix(path):
        axes[max(free, key=lambda i: shape[i])] = "data"
    return P(*axes)


def choose_layout(parallel: Parallel, shape: str | None, settings: Settings) -> Layout:
    """Return the mesh that was asked for, such as 4x2, or one of all devices."""
    devices = jax.devices()
    if shape is not None:
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
        if found is None:
            raise ValueError(f"--mesh {shape}: write it as 4x2")
        data, model = map(int, found.groups())
    else:
        is_tensor = parallel == "tensor"
        model = math.gcd(len(devices), settings.heads) if is_tensor else 1
        data = len(devices) // model
    mesh = f"the mesh {data}x{model}"
    if data * model > len(devices):
        raise ValueError(f"{mesh} needs more than the {len(devices)} devices here")
    if settings.batch % data:
        raise ValueError(f"{mesh}: {data} does not divide --batch {settings.batch}")
    if settings.heads % model or VOCABULARY % model:
        raise ValueError(
            f"{mesh}: {model} does not divide both --heads {settings.heads} and the "
            f"{VOCABULARY} tokens"
        )
    if parallel == "data" and model > 1:
        raise ValueError(
            f'{mesh}: --parallel data leaves "model" without work. Pass --parallel '
            f"tensor or fsdp, or --mesh {data * model}x1"
        )
    return Layout(
        mesh=jax.make_mesh(
            (data, model),
            ("data", "model"),
            axis_types=(AxisType.Auto, AxisType.Auto),
            devices=devices[: data * model],
        ),
        parallel=parallel,
    )
