# SPDX-License-Identifier: Apache-2.0
"""The workloads of the fusion benchmarks, and each contender's way to compute them.

Axis letters as in jax_cudnn.conv and jax_cudnn.matmul. All numbers are bf16 unless said
otherwise. Padding is symmetric and explicit, as PyTorch has it.
"""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness import contest
from benchmarks.harness.operands import Operand
from benchmarks.harness.torch_side import torch

Group = Literal["conv", "matmul", "resnet50", "convnext", "mlp"]
Name = Literal["relu", "silu", "gelu"]
Function = Callable[..., Any]

# The largest relative errors of results and gradients: there are two or three roundings
# to bf16 on the way (contest.py).
_BOUNDS = (1e-2, 1e-1)


@dataclass(frozen=True, kw_only=True)
class Cell(abc.ABC):
    """One workload; ``goal`` names the promise that its forward time is held to."""

    group: Group
    activation: Name | None = None
    has_bias: bool = True
    has_residual: bool = False
    goal: str | None = None

    @property
    @abc.abstractmethod
    def shape_text(self) -> str:
        """The operation without its epilogue, in words."""

    @property
    @abc.abstractmethod
    def output(self) -> tuple[int, ...]:
        """The shape of the result."""

    @property
    @abc.abstractmethod
    def flops(self) -> int:
        """Multiplications and additions of the forward pass."""

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """The operands that the contenders take, in order."""

    @abc.abstractmethod
    def ours(self, *operands: jax.Array) -> jax.Array:
        """Compute it by jax_cudnn."""

    @property
    @abc.abstractmethod
    def xla_forms(self) -> dict[str, Function]:
        """What a user of JAX may write; the fastest is the one to beat."""

    @abc.abstractmethod
    def torch_function(self, *operands: Any) -> Any:
        """Compute it by PyTorch, in the layout of ``torch_way``."""

    @property
    def torch_way(self) -> contest.Way:
        """PyTorch's function, and the layout that it runs fastest."""
        return contest.Way(function=self.torch_function)

    @abc.abstractmethod
    def tiny(self) -> "Cell":
        """Return a small cell of the same kind, for a CPU."""

    @property
    def has_gradients(self) -> bool:
        """Whether the gradient of all operands is a workload as well."""
        return True

    @property
    def name(self) -> str:
        """The workload in a table."""
        tail = [self.shape_text]
        tail += ["bias"] if self.has_bias else []
        tail += ["residual"] if self.has_residual else []
        tail += [self.activation] if self.activation else []
        return "+".join(tail)

    @property
    def key(self) -> str:
        """The workload by a name of its own."""
        return f"{self.group}: {self.name}"

    def __str__(self) -> str:
        return self.key

    def contest(self) -> contest.Cell:
        """Return what contenders compute; XLA's forms after the first have names."""
        forms = iter(self.xla_forms.items())
        _, first = next(forms)
        return contest.Cell(
            operation=self.group,
            size=self.name,
            operands=self.operands,
            rivals={
                contest.XLA: contest.Way(function=first),
                **{name: contest.Way(function=form) for name, form in forms},
            },
            ours=lambda: lambda *operands: self.ours(*operands),
            torch=self.torch_way,
            has_gradients=self.has_gradients,
            has_products=True,
            bounds=_BOUNDS,
        )

    def _terms(self, bias: Operand) -> tuple[Operand, ...]:
        terms = [bias] if self.has_bias else []
        return (*terms, *([Operand(self.output)] if self.has_residual else []))

    def _named(self, terms: Sequence[Any]) -> dict[str, Any]:
        """Return bias and residual by name, None where there is none."""
        bias = terms[0] if self.has_bias else None
        return {"bias": bias, "residual": terms[-1] if self.has_residual else None}

    def _torch_tail(self, z: Any, residual: Any) -> Any:
        if residual is not None:
            z = z + residual
        functional = torch.nn.functional
        if self.activation == "gelu":
            return functional.gelu(z, approximate="tanh")
        return z if self.activation is None else getattr(functional, self.activation)(z)

    def _xla_tail(self, z: Any, terms: Sequence[Any]) -> Any:
        for term in terms:
            z = z + term
        return z if self.activation is None else getattr(jax.nn, self.activation)(z)


@dataclass(frozen=True, kw_only=True)
class Conv(Cell):
    """A convolution of images (n, *space, c) with filters (*window, c/groups, o)."""

    n: int
    space: tuple[int, ...]
    c: int
    o: int
    window: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    groups: int = 1

    @property
    def shape_text(self) -> str:
        window = "x".join(map(str, self.window))
        if self.stride != 1:
            window += f"/{self.stride}"
        if self.groups == self.c > 1:
            window = f"depthwise {window}"
        elif self.groups > 1:
            window += f" groups {self.groups}"
        space = ",".join(map(str, self.space))
        return f"conv {window} ({self.n},{space},{self.c}->{self.o})"

    @property
    def output(self) -> tuple[int, ...]:
        sizes = (
            (size + 2 * self.padding - f) // self.stride + 1
            for size, f in zip(self.space, self.window, strict=True)
        )
        return (self.n, *sizes, self.o)

    @property
    def _filters(self) -> tuple[int, ...]:
        return (*self.window, self.c // self.groups, self.o)

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.output) * math.prod(self._filters[:-1])

    @property
    def operands(self) -> tuple[Operand, ...]:
        deviation = math.prod(self._filters[:-1]) ** -0.5
        return (
            Operand((self.n, *self.space, self.c)),
            Operand(self._filters, deviation),
            *self._terms(Operand((self.o,))),
        )

    def _options(self) -> dict[str, Any]:
        letters = "DHW"[-len(self.window) :]
        images = f"N{letters}C"
        return {
            "window_strides": (self.stride,) * len(self.window),
            "padding": [(self.padding, self.padding)] * len(self.window),
            "dimension_numbers": (images, f"{letters}IO", images),
            "feature_group_count": self.groups,
        }

    def ours(self, *operands: jax.Array) -> jax.Array:
        x, w, *terms = operands
        named = self._named(terms)
        return jax_cudnn.conv(
            x, w, **self._options(), **named, activation=self.activation
        )

    @property
    def xla_forms(self) -> dict[str, Function]:
        def form(x: Any, w: Any, *terms: Any) -> jax.Array:
            z = jax.lax.conv_general_dilated(x, w, **self._options())
            return self._xla_tail(z, terms)

        return {"lax.conv_general_dilated": form}

    def torch_function(self, *operands: Any) -> Any:
        x, w, *terms = operands
        named = self._named(terms)
        functions = torch.nn.functional
        function = functions.conv3d if len(self.window) == 3 else functions.conv2d
        z = function(
            x,
            w,
            named["bias"],
            stride=self.stride,
            padding=self.padding,
            groups=self.groups,
        )
        return self._torch_tail(z, named["residual"])

    @property
    def torch_way(self) -> contest.Way:
        axes = len(self.window)

        def first(tensors: Sequence[Any]) -> list[Any]:
            order = (0, axes + 1, *range(1, axes + 1))
            return [x.permute(order) if x.ndim > 1 else x for x in tensors]

        def last(tensors: Sequence[Any]) -> list[Any]:
            order = (0, *range(2, axes + 2), 1)
            return [x.permute(order) if x.ndim > 1 else x for x in tensors]

        def enter(tensors: Sequence[Any]) -> list[Any]:
            x, w, *terms = tensors
            memory = torch.channels_last_3d if axes == 3 else torch.channels_last
            w = w.permute(axes + 1, axes, *range(axes))
            return [*first([x]), w.contiguous(memory_format=memory), *first(terms)]

        def gradients(tensors: Sequence[Any]) -> list[Any]:
            if not tensors:
                return []
            x, w, *terms = tensors
            return [*last([x]), w.permute(*range(2, axes + 2), 1, 0), *last(terms)]

        return contest.Way(
            function=self.torch_function,
            enter=enter,
            cotangents=first,
            outputs=last,
            gradients=gradients,
        )

    def tiny(self) -> "Conv":
        is_depthwise = self.groups == self.c
        groups = min(self.groups, 2)
        return replace(
            self,
            n=2,
            space=tuple(max(f, 5) + i for i, f in enumerate(self.window)),
            c=groups if is_depthwise else min(self.c, 8),
            o=groups if is_depthwise else min(self.o, 12),
            groups=groups,
        )


@dataclass(frozen=True, kw_only=True)
class Matmul(Cell):
    """A product of (m, r) with weights (r, n)."""

    m: int
    r: int
    n: int

    @property
    def shape_text(self) -> str:
        return f"matmul ({self.m},{self.r},{self.n})"

    @property
    def output(self) -> tuple[int, ...]:
        return (self.m, self.n)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.r * self.n

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (
            Operand((self.m, self.r)),
            Operand((self.r, self.n), self.r**-0.5),
            *self._terms(Operand((self.n,))),
        )

    def ours(self, *operands: jax.Array) -> jax.Array:
        a, b, *terms = operands
        named = self._named(terms)
        return jax_cudnn.matmul(a, b, **named, activation=self.activation)

    @property
    def xla_forms(self) -> dict[str, Function]:
        def form(a: Any, b: Any, *terms: Any) -> jax.Array:
            return self._xla_tail(jnp.matmul(a, b), terms)

        return {"jnp.matmul": form}

    def torch_function(self, *operands: Any) -> Any:
        a, b, *terms = operands
        named = self._named(terms)
        bias = named["bias"]
        z = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
        return self._torch_tail(z, named["residual"])

    def tiny(self) -> "Matmul":
        return replace(self, m=24, r=16, n=40)


@dataclass(frozen=True, kw_only=True)
class Int8Matmul(Matmul):
    """A product with i8 weights and an f32 scale per column; no gradient."""

    has_bias: bool = False

    @property
    def shape_text(self) -> str:
        return f"matmul ({self.m},{self.r},{self.n}) bf16 x i8"

    @property
    def has_gradients(self) -> bool:
        return False

    @property
    def operands(self) -> tuple[Operand, ...]:
        # Scaled weights have a deviation of about 1 / sqrt(r): that of i8 is 73.3.
        return (
            Operand((self.m, self.r)),
            Operand((self.r, self.n), dtype="int8"),
            Operand((self.n,), self.r**-0.5 / 73.3, dtype="float32"),
        )

    def ours(self, *operands: jax.Array) -> jax.Array:
        a, b, scale = operands
        return jax_cudnn.matmul(a, b, scale_b=scale)

    @property
    def xla_forms(self) -> dict[str, Function]:
        def before(a: Any, b: Any, scale: Any) -> jax.Array:
            return jnp.matmul(a, b.astype(a.dtype) * scale.astype(a.dtype))

        def after(a: Any, b: Any, scale: Any) -> jax.Array:
            return (jnp.matmul(a, b.astype(a.dtype)) * scale).astype(a.dtype)

        return {"scaled before": before, "scaled after": after}

    def torch_function(self, *operands: Any) -> Any:
        a, b, scale = operands
        return torch.matmul(a, b.to(a.dtype)) * scale.to(a.dtype)


def _square(
    group: Group, size: int, c: int, o: int, f: int, stride: int = 1, **options: Any
) -> Conv:
    """A convolution over square images, 64 of them unless said otherwise."""
    padding = options.pop("padding", f // 2)
    n = options.pop("n", 64)
    return Conv(
        group=group, n=n, space=(size, size), c=c, o=o, window=(f, f), stride=stride,
        padding=padding, **options,
    )  # fmt: skip


def _conv_cells() -> list[Cell]:
    memory_bound: dict[str | None, str] = dict.fromkeys(("silu", "gelu"), MEMORY_BOUND)
    names: tuple[Name | None, ...] = (None, "relu", "silu", "gelu")
    cells: list[Cell] = [
        _square(
            "conv", 56, 64, 64, 3, has_bias=name is not None, activation=name,
            goal=memory_bound.get(name),
        )
        for name in names
    ]  # fmt: skip
    cells += [
        _square(
            "conv", 56, 256, 64, 1, n=128, activation=name, goal=memory_bound.get(name)
        )
        for name in names[1:3]
    ]
    cells += [
        _square("conv", 28, 256, 256, 3, groups=32, activation=name, goal=GROUPED_OR_3D)
        for name in names[1:3]
    ]
    volume = Conv(
        group="conv", n=4, space=(16, 64, 64), c=64, o=128, window=(3, 3, 3), padding=1,
        activation="silu", goal=GROUPED_OR_3D,
    )  # fmt: skip
    return [*cells, volume]


def _matmul_cells() -> list[Cell]:
    return [
        Matmul(group="matmul", m=8192, r=4096, n=14336, activation="relu"),
        Matmul(group="matmul", m=8192, r=4096, n=14336, activation="gelu"),
        Matmul(
            group="matmul", m=16384, r=1024, n=4096, activation="gelu", goal=MATMUL_GELU
        ),
        Int8Matmul(group="matmul", m=16384, r=1024, n=4096, goal=INT8),
    ]


def _resnet50_cells() -> list[Cell]:
    """Layers of one kind each; 3x3 on 56 px is among the cells of conv."""

    def layer(*sizes: int, **options: Any) -> Conv:
        return _square("resnet50", *sizes, **options)

    relu: dict[str, Any] = {"activation": "relu"}
    last: dict[str, Any] = {"activation": "relu", "has_residual": True}
    return [
        layer(224, 3, 64, 7, 2, **relu),
        layer(56, 256, 64, 1, **relu),
        layer(56, 64, 256, 1, **last),
        layer(56, 128, 128, 3, 2, **relu),
        layer(56, 256, 512, 1, 2),
        layer(28, 128, 128, 3, **relu),
        layer(28, 128, 512, 1, **last),
        layer(14, 256, 256, 3, **relu),
        layer(14, 256, 1024, 1, **last),
        layer(7, 512, 512, 3, **relu),
    ]


def _convnext_cells() -> list[Cell]:
    def rows(size: int) -> int:
        return 64 * size * size

    def layer(*sizes: int, **options: Any) -> Conv:
        return _square("convnext", *sizes, **options)

    return [
        layer(224, 3, 96, 4, 4, padding=0),
        layer(56, 96, 192, 2, 2, padding=0),
        layer(56, 96, 96, 7, groups=96),
        layer(14, 384, 384, 7, groups=384),
        Matmul(group="convnext", m=rows(56), r=96, n=384, activation="gelu"),
        Matmul(group="convnext", m=rows(14), r=384, n=1536, activation="gelu"),
        Matmul(group="convnext", m=rows(14), r=1536, n=384, has_residual=True),
    ]


def _mlp_cells() -> list[Cell]:
    cells: list[Cell] = []
    for d in (1024, 2048, 4096, 8192):
        cells += [
            Matmul(group="mlp", m=8192, r=d, n=4 * d, activation="gelu"),
            Matmul(group="mlp", m=8192, r=4 * d, n=d),
        ]
    return [
        *cells,
        Int8Matmul(group="mlp", m=16384, r=4096, n=14336, goal=INT8),
        Int8Matmul(group="mlp", m=64, r=4096, n=14336, goal=INT8),
    ]


MEMORY_BOUND = "conv+bias+silu/gelu, bound by memory"
GROUPED_OR_3D = "grouped conv and conv3d"
MATMUL_GELU = "matmul+bias+gelu (16384,1024,4096)"
INT8 = "weight-only int8"
# What a cell's forward time may be at most, as a ratio to XLA's.
GOALS = {MEMORY_BOUND: 0.75, GROUPED_OR_3D: 0.6, MATMUL_GELU: 0.8, INT8: 0.8}

CELLS: tuple[Cell, ...] = (
    *_conv_cells(),
    *_matmul_cells(),
    *_resnet50_cells(),
    *_convnext_cells(),
    *_mlp_cells(),
)
GROUPS: tuple[Group, ...] = ("conv", "matmul", "resnet50", "convnext", "mlp")
