# SPDX-License-Identifier: Apache-2.0
"""Times norms beside plain JAX, PyTorch and tokamax, on one GPU.

    python -m benchmarks.norms --out docs/benchmarks

writes norms.json and norms.md there, forward and with gradients; see contest.py for how
contenders are checked and timed. `--only REGEX` chooses cells by name and size; those
that the file in the folder has beside them are kept. `--no-first-plan` leaves out
cuDNN's first plan, which may take many times as long as the others. `--small` tries the
script on a CPU.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness import contest_report, tokamax_side
from benchmarks.harness.contest import (
    BOTH,
    FORWARD,
    TUNED,
    XLA,
    Cell,
    Rearrange,
    Way,
)
from benchmarks.harness.operands import Operand
from benchmarks.harness.torch_side import torch

_EPSILON = 1e-5
# Of several shapes, in the order in which they are measured.
_ROWS = ((16384, 4096), (8192, 8192), (32768, 1024), (32768, 768))
# What a norm may take at most, tuned, as a ratio to the best rival's time.
_GOALS = {
    "layer_norm": {BOTH: 0.55},
    "batch_norm": {FORWARD: 0.5, BOTH: 0.5},
    "group_norm": {FORWARD: 0.6, BOTH: 0.6},
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A norm of an array: which, of what shape, and what is around it."""

    kind: str
    shape: tuple[int, ...]
    has_residual: bool = False
    activation: str | None = None
    groups: int = 32
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """What the norm is."""
        parts = [self.kind, *([] if self.dtype == "bfloat16" else [self.dtype])]
        tail = ["residual"] if self.has_residual else []
        tail += [self.activation] if self.activation else []
        return " + ".join([" ".join(parts), *tail])

    @property
    def size(self) -> str:
        """The shape, in words."""
        return " x ".join(map(str, self.shape))

    @property
    def is_image(self) -> bool:
        """Whether PyTorch has the channels second."""
        return self.kind in ("batch_norm", "group_norm", "instance_norm")

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias beside the scale."""
        return self.kind != "rms_norm"

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The array, scale, bias and residual, as far as there are any."""
        factor = self.shape[-1:]
        if self.kind == "adaptive_layer_norm":
            factor = (self.shape[0], self.shape[-1])
        shapes = [self.shape, factor, *[factor] * self.has_bias]
        shapes += [self.shape] * self.has_residual
        return tuple(Operand(shape, dtype=self.dtype) for shape in shapes)

    def named(self, operands: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Return the array, scale, bias and residual, None where there is none."""
        x, scale, *others = operands
        bias = others[0] if self.has_bias else None
        return x, scale, bias, others[-1] if self.has_residual else None


# The most important first.
_TALL, *_OTHERS = _ROWS
WORKLOADS = (
    Workload(kind="layer_norm", shape=_TALL),
    Workload(kind="batch_norm", shape=(64, 56, 56, 256), activation="relu"),
    Workload(kind="group_norm", shape=(16, 64, 64, 320)),
    Workload(kind="batch_norm", shape=(128, 28, 28, 512), activation="relu"),
    Workload(kind="rms_norm", shape=_TALL),
    *(Workload(kind="layer_norm", shape=shape) for shape in _OTHERS),
    Workload(kind="layer_norm", shape=_TALL, has_residual=True),
    Workload(kind="rms_norm", shape=_TALL, has_residual=True),
    *(Workload(kind="rms_norm", shape=shape) for shape in _OTHERS),
)


# --- the contenders -------------------------------------------------------------------


def _norm(work: Workload, implementation: Any) -> Callable[..., Any]:
    """Return the norm by jax_cudnn; with a residual, the sum as well."""
    function = getattr(jax_cudnn, work.kind)
    options: dict[str, Any] = {
        "epsilon": _EPSILON,
        "activation": work.activation,
        "implementation": implementation,
    }
    if work.kind == "group_norm":
        options["groups"] = work.groups

    def run(*operands: jax.Array) -> Any:
        x, scale, bias, residual = work.named(operands)
        return function(x, scale, bias, residual=residual, **options)

    return run


def _plain(work: Workload, *operands: jax.Array) -> Any:
    """Compute the norm in plain JAX as Flax does: by means of x and of its square."""
    x, scale, bias, residual = work.named(operands)
    total = x if residual is None else x + residual
    last = len(work.shape) - 1
    axes: tuple[int, ...] = (last,)
    if work.is_image:
        axes = tuple(range(work.kind != "batch_norm", last))
    wide = total.astype(jnp.float32)
    if work.kind == "group_norm":
        wide = wide.reshape(*work.shape[:-1], work.groups, -1)
        axes = (*axes, last + 1)
    square = jnp.mean(jnp.square(wide), axes, keepdims=True)
    if work.kind == "rms_norm":
        mean = jnp.zeros_like(square)
    else:
        mean = jnp.mean(wide, axes, keepdims=True)
    variance = jnp.maximum(square - jnp.square(mean), 0)
    output = (wide - mean) * jax.lax.rsqrt(variance + _EPSILON)
    output = output.reshape(work.shape)
    if work.kind == "adaptive_layer_norm":
        scale, bias = scale[:, None], bias[:, None]
    output = output * scale
    if bias is not None:
        output = output + bias
    if work.activation is not None:
        output = getattr(jax.nn, work.activation)(output)
    output = output.astype(x.dtype)
    return output if residual is None else (output, total)


def _tokamax(work: Workload, *operands: jax.Array) -> Any:
    x, scale, bias, residual = work.named(operands)
    total = x if residual is None else x + residual
    output = tokamax_side.tokamax.layer_norm(
        total,
        scale,
        bias,
        epsilon=_EPSILON,
        subtract_mean=work.kind == "layer_norm",
        implementation="triton",
    )
    return output if residual is None else (output, total)


def _torch(work: Workload) -> Way | None:
    if torch is None or work.kind == "adaptive_layer_norm":
        return None
    functional = torch.nn.functional

    def run(*operands: Any) -> Any:
        x, scale, bias, residual = work.named(operands)
        total = x if residual is None else x + residual
        sizes = work.shape[-1:]
        if work.kind == "layer_norm":
            output = functional.layer_norm(total, sizes, scale, bias, _EPSILON)
        elif work.kind == "rms_norm":
            output = functional.rms_norm(total, sizes, scale, _EPSILON)
        elif work.kind == "batch_norm":
            output = functional.batch_norm(
                total, None, None, scale, bias, training=True, eps=_EPSILON
            )
        elif work.kind == "group_norm":
            output = functional.group_norm(total, work.groups, scale, bias, _EPSILON)
        else:
            output = functional.instance_norm(
                total, weight=scale, bias=bias, eps=_EPSILON
            )
        if work.activation is not None:
            output = getattr(functional, work.activation)(output)
        return output if residual is None else (output, total)

    if not work.is_image:
        return Way(function=run)
    into: Rearrange = channels_second
    if work.kind != "batch_norm":
        # PyTorch copies what has its channels last before it norms groups.
        into = _stored_second
    return Way(
        function=run,
        enter=into,
        cotangents=into,
        outputs=channels_last,
        gradients=channels_last,
    )


def channels_second(tensors: Sequence[Any]) -> list[Any]:
    """Return images as PyTorch names their axes; they are stored as before."""
    return [x.permute(0, 3, 1, 2) if x.ndim == 4 else x for x in tensors]


def channels_last(tensors: Sequence[Any]) -> list[Any]:
    """Return images as JAX names their axes."""
    return [x.permute(0, 2, 3, 1) if x.ndim == 4 else x for x in tensors]


def _stored_second(tensors: Sequence[Any]) -> list[Any]:
    return [x.contiguous() for x in channels_second(tensors)]


def cell(work: Workload) -> Cell:
    """Return a norm as a cell."""
    rivals = {XLA: Way(function=lambda *x: _plain(work, *x))}
    if tokamax_side.tokamax is not None and work.kind in ("layer_norm", "rms_norm"):
        rivals["tokamax"] = Way(function=lambda *x: _tokamax(work, *x))
    goals = _GOALS.get(work.kind, {})
    return Cell(
        operation=work.name,
        size=work.size,
        operands=work.operands,
        rivals=rivals,
        ours=lambda: _norm(work, "auto"),
        by_xla=_norm(work, "xla"),
        # More exact than the rivals are.
        truth=_norm(work, "xla"),
        first=_norm(work, "cudnn"),
        torch=_torch(work),
        goals={what: {TUNED: most} for what, most in goals.items()},
    )


# --- the run --------------------------------------------------------------------------


markdown = contest_report.page_of(
    name="norms",
    command="python -m benchmarks.norms --out docs/benchmarks",
    title="Norms",
    comment="What norms take on a GPU, beside XLA's code, PyTorch and tokamax.",
    about=(
        "bf16 where no dtype is named, scale and bias too. A batch norm is that",
        "of training. `xla` is the formula of Flax's layers, by means of x and of",
        "its square, and `jax_cudnn by xla` what jax_cudnn computes without cuDNN.",
        "`cudnn` is cuDNN's first plan.",
    ),
)


def _small(work: Workload) -> Workload:
    shape = tuple(min(size, 8) for size in work.shape)
    if len(shape) == 2:
        # Workloads stay apart by their sizes.
        shape = (4 + _ROWS.index(work.shape), 8) if work.shape in _ROWS else shape
    if work.kind == "batch_norm":
        shape = (*shape[:-1], work.shape[-1] // 32)
    return dataclasses.replace(work, shape=shape, groups=4)


def main() -> None:
    """Run the workloads and write the report."""
    parser = contest_report.parser(__doc__)
    parser.add_argument("--no-first-plan", action="store_true")
    options = parser.parse_args()
    works = map(_small, WORKLOADS) if options.small else WORKLOADS
    with_first = not options.no_first_plan
    contest_report.run(markdown, [*map(cell, works)], options, with_first=with_first)


if __name__ == "__main__":
    main()
