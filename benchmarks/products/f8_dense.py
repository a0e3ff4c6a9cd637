# SPDX-License-Identifier: Apache-2.0
"""Times layers in f8, forward and with all gradients, beside bf16 and bare products.

    python -m benchmarks.f8_dense --out docs/internals/measured

times the four layers of a transformer's block (hidden size 4096, MLP 16384, 15,872
tokens: the sizes of TransformerEngine's table) on one GPU, and writes f8_dense.json and
f8_dense.md there. "bf16" is plain JAX, "f8 products" are the three products alone, of
operands in f8 that lie along the sum, and "bf16 products" those of plain JAX.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness.call_times import timed
from benchmarks.harness.operands import Operand, count_of, drawn_sets
from benchmarks.harness.page import Data, Page, line, table
from benchmarks.harness.program import run_benchmark
from jax_cudnn import f8
from jax_cudnn.tuning.stopwatch import compile_over_sets
from jax_cudnn.tuning.together import together

_NAMES = ("bf16", "bf16 products", "f8 products", "current", "delayed")
_E4, _E5 = jnp.float8_e4m3fn, jnp.float8_e5m2
_RECIPE = f8.Delayed()
_STATE = f8.dense_state(_RECIPE)


@dataclass(frozen=True)
class _Layer:
    """A layer of some rows, from k features to n."""

    name: str
    rows: int
    k: int
    n: int

    @property
    def programs(self) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
        """The functions that are timed, and the types of their operands."""
        m, k, n = self.rows, self.k, self.n
        struct = jax.ShapeDtypeStruct
        wide = [struct(s, jnp.bfloat16) for s in ((m, k), (k, n), (m, n))]
        copies = [
            struct(shape, dtype)
            for shape, dtype in (
                ((m, k), _E4),
                ((n, k), _E4),
                ((m, n), _E5),
                ((k, n), _E4),
                ((k, m), _E4),
                ((n, m), _E5),
            )
        ]
        scales = [struct((), jnp.float32)] * 3
        state = [struct(x.shape, x.dtype) for x in jax.tree.leaves(_STATE)]
        return {
            "bf16": (_with_gradients(jnp.matmul), wide),
            "bf16 products": (_bf16_products, wide),
            "f8 products": (_f8_products, [*copies, *scales]),
            "current": (_with_gradients(f8.dense), wide),
            "delayed": (_delayed, [*wide, *state]),
        }


def _with_gradients(layer: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, w: Any, grad: Any) -> Any:
        y, back = jax.vjp(layer, x, w)
        return y, *back(grad)

    return run


def _delayed(x: Any, w: Any, grad: Any, *state: Any) -> Any:
    def layer(x: Any, w: Any, state: Any) -> Any:
        return f8.dense(x, w, recipe=_RECIPE, state=state)

    y, back = jax.vjp(layer, x, w, f8.DenseState(*state))
    return y, *back(grad)


def _bf16_products(x: Any, w: Any, grad: Any) -> Any:
    return x @ w, grad @ w.T, x.T @ grad


def _f8_products(
    x: Any, w_t: Any, grad: Any, w: Any, x_t: Any, grad_t: Any, s: Any, t: Any, u: Any
) -> Any:
    product = functools.partial(jax_cudnn.matmul, preferred_element_type=jnp.bfloat16)
    return (
        product(x, w_t.T, scale_a=s, scale_b=t),
        product(grad, w.T, scale_a=u, scale_b=t),
        product(x_t, grad_t.T, scale_a=s, scale_b=u),
    )


def cases(*, small: bool) -> list[_Layer]:
    """Return the layers."""
    m, d, h = (64, 32, 128) if small else (15872, 4096, 16384)
    return [
        _Layer("query, key, value", m, d, 3 * d),
        _Layer("projection", m, d, d),
        _Layer("MLP up", m, d, h),
        _Layer("MLP down", m, h, d),
    ]


def measure(found: Sequence[_Layer]) -> Iterator[dict[str, Any]]:
    """Yield a row for each layer."""
    for layer in found:
        programs = layer.programs
        jobs = [
            functools.partial(_compiled, function, types)
            for function, types in programs.values()
        ]
        compiled = dict(zip(programs, together(jobs), strict=True))
        # All in turn, each on operands of its own.
        sets = {
            name: drawn_sets([*map(_operand, types)])
            for name, (_, types) in programs.items()
        }
        runs = {
            name: functools.partial(_run, compiled[name], sets[name]) for name in _NAMES
        }
        times = timed(runs, [None], rounds=9)
        us = {
            name: round(statistics.median(each) / len(sets[name]), 1)
            for name, each in times.items()
        }
        yield {
            "layer": f"{layer.name}, {layer.rows} x {layer.k} x {layer.n}",
            "us": us,
            "ratios": {
                name: round(us[name] / us["bf16"], 3) for name in ("current", "delayed")
            },
        }


def _run(program: Callable[..., Any], sets: Any, _: object) -> Any:
    return program(sets)


def _compiled(function: Callable[..., Any], types: list[Any]) -> Callable[..., Any]:
    return compile_over_sets(function, [types] * count_of(types))


def _operand(of: jax.ShapeDtypeStruct) -> Operand:
    """Return a random matrix, a scale of 1, or a state without a history."""
    is_random, is_scale = len(of.shape) == 2, not of.shape
    return Operand(of.shape, float(is_random), float(is_scale), of.dtype.name)


def _lines(data: Data) -> list[str]:
    lines = [
        "Microseconds of layers of a transformer's block, forward and with the",
        'gradients by input and weights. "bf16" is plain JAX. The products alone are',
        "of operands that are ready: those in f8 lie as the kernels read them.",
        '"current" and "delayed" are `f8.dense` with these recipes: everything that',
        "quantises bf16 is in their times. The last columns divide them by bf16.",
        "",
        *table(
            f" | {' | '.join(f'>{name}' for name in _NAMES)} | >current | >delayed",
            (_cells(row["layer"], row["us"]) for row in data["rows"]),
        ),
    ]
    total = {name: sum(row["us"][name] for row in data["rows"]) for name in _NAMES}
    if data["rows"]:
        lines.append(line(_cells("all", total)))
        share = total["delayed"] / total["f8 products"]
        lines += [
            "",
            f"With delayed scaling, the layers take {share:.2f} of the time of their "
            f"f8 products alone, and are {total['bf16'] / total['delayed']:.2f} times "
            "as fast as in bf16.",
        ]
    return lines


def _cells(name: str, us: dict[str, float]) -> list[str]:
    ratios = (f"{us[each] / us['bf16']:.2f}" for each in ("current", "delayed"))
    return [name, *(f"{us[each]:.0f}" for each in _NAMES), *ratios]


markdown = Page(
    name="f8_dense",
    title="Layers in f8",
    comment="Layers in f8 beside bf16.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, cases, measure, markdown)
