# SPDX-License-Identifier: Apache-2.0
"""Times products with cuBLASLt's epilogues beside cuDNN's plans and XLA's code.

    python -m benchmarks.cublaslt --out docs/internals/measured

times products of the sizes of GPT-2, ViT-B, BERT-large and Llama with what models put
around them, and f8 products in each layout, on one GPU, and writes cublaslt.json and
cublaslt.md there. "auto" is what runs untuned, "cudnn" the first of cuDNN's own plans,
"xla" a user's code without jax_cudnn, and "product" XLA's product alone. "fastest" is
the fastest of all algorithms that cuBLASLt lists, as the tuner finds it.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness.call_times import timed
from benchmarks.harness.operands import count_of, drawn_sets
from benchmarks.harness.page import Data, Page, table
from benchmarks.harness.program import run_benchmark
from jax_cudnn.config import Options
from jax_cudnn.graph import Graph
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import run_graph, traced_graphs
from jax_cudnn.native import CUBLASLT_ENGINE
from jax_cudnn.plans import PlanOptions, autotune
from jax_cudnn.tuning.stopwatch import compile_over_sets
from jax_cudnn.tuning.together import together

_NAMES = ("auto", "fastest", "cudnn", "xla", "product")
_BYTES_PER_US = 3.0e6  # of an H100's memory; a copy of two large arrays takes so long
_OTHERS = PlanOptions(denied_engines=(CUBLASLT_ENGINE,))
_CUBLASLT = PlanOptions(engines=(CUBLASLT_ENGINE,))

_F8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A function of arrays with a product in it, and the product alone.

    ``written`` is the function as a user writes it, ``ours`` by jax_cudnn with some
    options. ``has_epilogue`` is whether all of cuBLASLt's algorithms are timed.
    """

    title: str
    has_epilogue: bool
    operands: tuple[jax.ShapeDtypeStruct, ...]
    written: Callable[..., Any]
    ours: Callable[..., Callable[..., Any]]
    product: Callable[..., Any]

    @property
    def programs(self) -> dict[str, Callable[..., Any]]:
        """The functions that are timed, by their names."""
        every = self.ours(implementation="cudnn", plan=_CUBLASLT)
        return {
            "auto": self.ours(),
            **({"fastest": every} if self.has_epilogue else {}),
            "cudnn": self.ours(implementation="cudnn", plan=_OTHERS),
            "xla": self.written,
            "product": self.product,
        }

    @property
    def bytes(self) -> int:
        """The bytes of operands and results, each once."""
        results = jax.tree.leaves(jax.eval_shape(self.written, *self.operands))
        arrays = (*self.operands, *results)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def _up(x: Any, w: Any, b: Any) -> Any:
    z = x @ w + b
    return jax.nn.gelu(z), z


def _inference(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x @ w + b)


def _down(x: Any, w: Any, b: Any, r: Any) -> Any:
    return x @ w + b + r


def _gradient(grad: Any, w: Any, z: Any) -> Any:
    """Return the cotangent of a gelu's argument, and of the bias before it."""
    (found,) = jax.vjp(jax.nn.gelu, z)[1](grad @ w.T)
    return found, found.sum(0)


def _fused(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    if function is not _gradient:
        return jax_cudnn.fuse(function, **options)
    call = Options(**options)

    def gradient(grad: Any, w: Any, z: Any) -> Any:
        # Of a fused MLP's gradient, the kernel that ends before the first product.
        part = _gradient_part(grad.shape[0], *w.shape)
        given = {x[None].shape: x[None] for x in (grad, w, z)}
        return run_graph(
            part, [given[x.stored_shape] for x in part.input_tensors], call
        )

    return gradient


@functools.lru_cache(maxsize=8)
def _gradient_part(m: int, f: int, d: int) -> Graph:
    @jax_cudnn.fuse
    def mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
        return jax.nn.gelu(x @ w + b) @ v

    def gradients(grad: Any, *operands: Any) -> Any:
        return jax.vjp(mlp, *operands)[1](grad)

    shapes = (m, d), (m, d), (d, f), (f,), (f, d)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    (found,) = (
        part
        for graph, *_ in traced_graphs(gradients, *types)
        for part in partition(graph)
        if "gelu_tanh_grad" in {getattr(x.attributes, "mode", "") for x in part.nodes}
    )
    return found


def _in_16_bits(*, small: bool) -> Iterator[_Case]:
    sizes = {
        "GPT-2": (16384, 768, 3072),
        "ViT-B": (12608, 768, 3072),
        "BERT-large": (8192, 1024, 4096),
        "Llama": (8192, 4096, 11008),
    }
    if small:
        sizes = {"small": (64, 32, 128)}
    for model, (m, d, f) in sizes.items():
        kinds: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
            "bias, gelu": (_inference, ((m, d), (d, f), (f,))),
            "bias, gelu, its argument saved": (_up, ((m, d), (d, f), (f,))),
            "gelu's gradient, the bias's": (_gradient, ((m, d), (f, d), (m, f))),
            "bias, residual": (_down, ((m, f), (f, d), (d,), (m, d))),
        }
        for kind, (function, shapes) in kinds.items():
            turned = function is _gradient
            yield _Case(
                title=f"{model} {[*shapes[0]]} x {[*shapes[1]]}: {kind}",
                has_epilogue=not small,
                operands=tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes),
                written=function,
                ours=functools.partial(_fused, function),
                product=lambda x, w, *_, turned=turned: x @ (w.T if turned else w),
            )


def _in_f8(*, small: bool) -> Iterator[_Case]:
    sizes = [(8192, 4096, 11008), (8192, 768, 3072)]
    for m, k, n in [(64, 32, 128)] if small else sizes:
        for left, right in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")):
            for layout in ("mk,nk", "mk,kn", "km,nk", "km,kn"):
                yield _f8_case(m, k, n, left, right, layout)


def _f8_case(m: int, k: int, n: int, left: str, right: str, layout: str) -> _Case:
    is_turned = [layout.startswith("km"), layout.endswith("nk")]

    def straight(x: Any, w: Any) -> tuple[Any, Any]:
        return (x.T if is_turned[0] else x), (w.T if is_turned[1] else w)

    def written(x: Any, w: Any, s: Any, t: Any) -> Any:
        x, w = straight(x, w)
        y = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return (y * (s * t)).astype(jnp.bfloat16)

    def ours(**options: Any) -> Callable[..., Any]:
        def function(x: Any, w: Any, s: Any, t: Any) -> Any:
            x, w = straight(x, w)
            wide = {"preferred_element_type": jnp.bfloat16}
            return jax_cudnn.matmul(x, w, scale_a=s, scale_b=t, **wide, **options)

        return function

    def product(x: Any, w: Any, s: Any, t: Any) -> Any:
        # As it is where both lie along the sum: XLA's fast layout.
        x = x.reshape(m, k)
        return written(x.T if is_turned[0] else x, w.reshape(n, k).T if not is_turned[1]
                       else w, s, t)  # fmt: skip

    shapes = ((k, m) if is_turned[0] else (m, k), (n, k) if is_turned[1] else (k, n))
    one = jax.ShapeDtypeStruct((), jnp.float32)
    return _Case(
        title=f"f8 {left} {right}, {layout}, m={m} k={k} n={n}",
        has_epilogue=False,
        operands=(
            jax.ShapeDtypeStruct(shapes[0], _F8[left]),
            jax.ShapeDtypeStruct(shapes[1], _F8[right]),
            one,
            one,
        ),
        written=written,
        ours=ours,
        product=product,
    )


def cases(*, small: bool) -> list[_Case]:
    """Return the products."""
    return [*_in_16_bits(small=small), *_in_f8(small=small)]


def measure(found: Sequence[_Case]) -> Iterator[dict[str, Any]]:
    """Yield a row for each product."""
    some = 4
    for start in range(0, len(found), some):
        batch = found[start : start + some]
        algorithms = {case.title: _fastest(case) for case in batch}
        compiled = iter(
            together(
                [
                    functools.partial(_compiled, case, name)
                    for case in batch
                    for name in _NAMES
                ]
            )
        )
        for case in batch:
            programs = {name: next(compiled) for name in _NAMES}
            row = _row(case, {name: x for name, x in programs.items() if x is not None})
            yield {**row, "algorithm": algorithms[case.title]}


def _fastest(case: _Case) -> dict[str, Any]:
    """Time all algorithms, so that "fastest" runs with the best, and return that."""
    if not case.has_epilogue:
        return {}
    tuning = autotune(
        case.programs["fastest"],
        *case.operands,
        max_plans=None,
        whole_program=False,
        progress=False,
    )
    found = [call for call in tuning.choices.values() if call.cudnn_us is not None]
    return {call.op: f"{call.plan}, first {call.first_ratio}" for call in found}


def _compiled(case: _Case, name: str) -> Callable[..., Any] | None:
    types = [list(case.operands)] * count_of(case.operands)
    if name not in case.programs:
        return None
    try:
        return compile_over_sets(case.programs[name], types)
    except jax_cudnn.UnsupportedError as error:
        print(f"  {case.title}, {name}: {str(error)[:200]}", flush=True)
        return None


def _row(case: _Case, programs: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    times = timed(programs, drawn_sets(case.operands), rounds=9)
    us = {name: round(statistics.median(each), 2) for name, each in times.items()}
    rivals = [times[name] for name in ("cudnn", "xla") if name in times]
    pairs = zip(times["auto"], *rivals, strict=True)
    ratios = [ours / min(others) for ours, *others in pairs]
    memory_us = case.bytes / _BYTES_PER_US
    return {
        "case": case.title,
        "us": us,
        "ratios": {
            "best rival": round(statistics.median(ratios), 3),
            "low": round(min(ratios), 3),
            "high": round(max(ratios), 3),
            "floor": round(us["auto"] / max(us["product"], memory_us), 3),
        },
    }


def _lines(data: Data) -> list[str]:
    return [
        'Microseconds of bf16 and f8 products. "auto" is what runs untuned, "cudnn"',
        'the first of cuDNN\'s own plans, "xla" code without jax_cudnn.',
        '"fastest" is the fastest of all that cuBLASLt lists, as the tuner finds it.',
        '"product" is XLA\'s product alone; of f8 operands, that in the layout that it',
        "multiplies fastest. The last columns are the time of auto over the faster of",
        "cudnn and xla, with its range over the rounds, and over the longer of the",
        "product and of reading and writing each array once at 3.0 TB/s.",
        "",
        *table(
            f" | {' | '.join(f'>{name}' for name in _NAMES)} | >over the best | range "
            "| >over the floor",
            map(_cells, data["rows"]),
        ),
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    times, found = map(row["us"].get, _NAMES), row["ratios"]
    return [
        row["case"],
        *("-" if us is None else f"{us:.1f}" for us in times),
        f"{found['best rival']:.2f}",
        f"{found['low']:.2f}-{found['high']:.2f}",
        f"{found['floor']:.2f}",
    ]


markdown = Page(
    name="cublaslt",
    title="Products by cuBLASLt",
    comment="Products with cuBLASLt's epilogues, and f8 products.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, cases, measure, markdown)
