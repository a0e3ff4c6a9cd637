# SPDX-License-Identifier: Apache-2.0
"""The workloads of several_gpus.py, their shardings, and the same in plain JAX.

All numbers are bf16. One mesh axis, ``AXIS``, has all devices.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_cudnn
from benchmarks.layers.expert_cells import plain_layer
from jax_cudnn import moe

Function = Callable[..., jax.Array]
Spec = tuple[str | None, ...]

AXIS = "gpus"
_ALL: Spec = ()  # every device has the whole array


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One workload: how its operands and the cotangent of its result are sharded."""

    name: str
    split: str
    ours: Function
    plain: Function
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[Spec, ...]
    cotangent: Spec
    # Operands after the first are weights and biases.
    has_weights: bool = True

    def __str__(self) -> str:
        return f"{self.name}, {self.split} split"

    def operands(self, mesh: jax.sharding.Mesh) -> list[jax.Array]:
        """Return the cotangent of the result, and the operands: normal, in bf16."""
        given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in self.shapes]
        shapes = [jax.eval_shape(self.plain, *given).shape, *self.shapes]
        placed: list[jax.Array] = []
        for i, spec in enumerate((self.cotangent, *self.specs)):
            # Weights are small, so that sums have a deviation of about 1.
            is_weight = self.has_weights and i > 1
            deviation = math.prod(shapes[i][:-1]) ** -0.5 if is_weight else 1.0
            x = jax.random.normal(jax.random.key(i), shapes[i])
            x = (x * deviation).astype(jnp.bfloat16)
            placed.append(jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))))
        return placed


def _mlp(product: Function, layer: Function) -> Function:
    def run(x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> jax.Array:
        return product(layer(x, up, up_bias), down) + down_bias

    return run


def cells(*, small: bool) -> Iterator[Cell]:
    """Yield the cells; every split axis is a multiple of 8."""
    has_gpu = jax.default_backend() == "gpu"
    b, s, h, d = (8, 24, 16, 4) if small else (8, 4096, 16, 128)
    for split, spec in (("batch", (AXIS,)), ("heads", (None, None, AXIS))):
        yield Cell(
            name=f"sdpa ({b},{s},{h}h,{d}) causal",
            split=split,
            ours=lambda q, k, v: jax_cudnn.sdpa(q, k, v, is_causal=True),
            plain=lambda q, k, v: jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation="cudnn" if has_gpu else "xla"
            ),
            shapes=((b, s, h, d),) * 3,
            specs=(spec,) * 3,
            cotangent=spec,
            has_weights=False,
        )

    m, r, n = (40, 16, 48) if small else (16384, 4096, 16384)
    rows, columns, last = (AXIS,), (None, AXIS), (AXIS,)

    def ours_layer(x: Any, w: Any, bias: Any) -> jax.Array:
        return jax_cudnn.matmul(x, w, bias=bias, activation="gelu")

    def plain_layer(x: Any, w: Any, bias: Any) -> jax.Array:
        return jax.nn.gelu(x @ w + bias)  # the tanh form, as "gelu" above

    for split, specs, cotangent in (
        ("rows", (rows, _ALL, _ALL), rows),
        ("columns", (_ALL, columns, last), columns),
        ("contraction", (columns, rows, _ALL), _ALL),
    ):
        yield Cell(
            name=f"matmul ({m},{r},{n})+bias+gelu",
            split=split,
            ours=ours_layer,
            plain=plain_layer,
            shapes=((m, r), (r, n), (n,)),
            specs=specs,
            cotangent=cotangent,
        )
    for split, specs, cotangent in (
        ("tensors", (_ALL, columns, last, rows, _ALL), _ALL),
        ("tokens", (rows, *(_ALL,) * 4), rows),
    ):
        yield Cell(
            name=f"mlp {m} tokens, {r}->{n}->{r}, gelu",
            split=split,
            ours=_mlp(jax_cudnn.matmul, ours_layer),
            plain=_mlp(jnp.matmul, plain_layer),
            shapes=((m, r), (r, n), (n,), (n, r), (r,)),
            specs=specs,
            cotangent=cotangent,
        )

    i, y, x, c, o = (16, 6, 5, 7, 24) if small else (128, 56, 56, 256, 256)
    how: Any = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    channels = (None, None, None, AXIS)
    for split, specs, cotangent in (
        ("images", (rows, _ALL, _ALL), rows),
        ("output channels", (_ALL, channels, last), channels),
    ):
        yield Cell(
            name=f"conv 3x3 ({i},{y},{x},{c}->{o})+bias+silu",
            split=split,
            ours=lambda x, w, bias: jax_cudnn.conv(
                x, w, window_strides=(1, 1), bias=bias, activation="silu", **how
            ),
            plain=lambda x, w, bias: jax.nn.silu(
                jax.lax.conv_general_dilated(x, w, window_strides=(1, 1), **how) + bias
            ),
            shapes=((i, y, x, c), (3, 3, c, o), (o,)),
            specs=specs,
            cotangent=cotangent,
        )
    yield from _experts(small=small)


def _experts(*, small: bool) -> Iterator[Cell]:
    """Yield a layer whose devices share the experts, and one that has all on each."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    tokens, width, hidden = (64, 16, 24) if small else (16384, 2048, 1024)
    experts, top_k, rows = 8 if small else 64, 4, (AXIS,)
    weights = (experts, width, hidden)

    def ours(**axes: str) -> Function:
        return lambda *x: moe.layer(*x, top_k=top_k, mesh=mesh, **axes)[0]

    # A device's own tokens by all experts, whose weights are gathered if need be.
    plain = jax.shard_map(
        plain_layer(top_k),
        mesh=mesh,
        in_specs=(PartitionSpec(AXIS), *[PartitionSpec()] * 4),
        out_specs=PartitionSpec(AXIS),
    )
    for split, axes, specs in (
        ("experts", {"expert_axis": AXIS}, (rows, _ALL, rows, rows, rows)),
        ("tokens of experts", {"batch_axis": AXIS}, (rows, _ALL, _ALL, _ALL, _ALL)),
    ):
        yield Cell(
            name=f"moe {tokens} tokens, {top_k} of {experts}, {width}->{hidden}",
            split=split,
            ours=ours(**axes),
            plain=plain,
            shapes=(
                *((tokens, width), (width, experts), weights, weights),
                (experts, hidden, width),
            ),
            specs=specs,
            cotangent=rows,
        )
