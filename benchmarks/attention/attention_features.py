# SPDX-License-Identifier: Apache-2.0
"""Times attention's features beside jax.nn, PyTorch and tokamax, on one GPU.

    python -m benchmarks.attention_features --out docs/internals/measured

writes attention_features.json and .md there. Needs an NVIDIA GPU. PyTorch is used where
it is installed, with its flash and cuDNN attention and compiled `flex_attention`, and
so is tokamax, with its Mosaic kernels.
Operands are random bf16; see timing.py for how times are taken. `--only REGEX` chooses
workloads by their names; the rows of others that the file in the folder has are kept.
`--no-flex` leaves out what takes long to compile.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_cudnn
from benchmarks.attention.attention_cells import WORKLOADS, Workload
from benchmarks.attention.ways import (
    Program,
    Way,
    contenders,
    programs,
    torch_kernels,
)
from benchmarks.harness import tokamax_side, torch_side
from benchmarks.harness.contest import BOTH, FORWARD, program
from benchmarks.harness.page import FINE_RANGE, Data, Page, Row, table_of
from benchmarks.harness.program import run_benchmark
from benchmarks.harness.timing import Contender, compare
from benchmarks.harness.torch_side import torch
from jax_cudnn import f8, plans
from jax_cudnn.flax import make_attention_fn

OURS, TUNED, _IN_BF16 = "jax_cudnn", "jax_cudnn tuned", "jax_cudnn bf16"
Attention = Callable[..., Any]


def operands(work: Workload) -> tuple[list[jax.Array], jax.Array]:
    """Return random operands, and the cotangent of the output."""
    shapes = [
        (work.b, work.s, work.h, work.d),
        (work.b, work.s, work.k, work.d),
        (work.b, work.s, work.k, work.e or work.d),
        (work.b, work.s, work.h, work.e or work.d),
    ]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    *arrays, cotangent = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
    if work.has_bias:
        shape = (1, work.h, work.s, work.s)
        arrays.append(jax.random.normal(jax.random.key(1), shape, jnp.bfloat16))
    if work.has_sinks:
        arrays.append(jax.random.normal(jax.random.key(1), (work.h,)))
    return arrays, cotangent


def functions(work: Workload) -> dict[str, Attention]:
    """Return the functions of JAX by name, without what is tuned."""
    is_gpu = jax.default_backend() == "gpu"
    options = work.ours(work.s)
    cudnn = {**options, "implementation": "cudnn"}
    ours = functools.partial(_with_sinks if work.has_sinks else jax_cudnn.sdpa, **cudnn)
    found: dict[str, Attention] = {OURS: ours}
    if work.is_flaxs:
        attention = make_attention_fn(implementation="cudnn")
        found[OURS] = functools.partial(attention, **options)
        found["Flax"] = functools.partial(nnx.dot_product_attention, **options)
    if work.is_f8:
        found = {OURS: _in_f8(cudnn), _IN_BF16: ours}
    if work.theirs is not None and is_gpu:
        found["jax.nn cudnn"] = functools.partial(
            jax.nn.dot_product_attention, **work.theirs, implementation="cudnn"
        )
    if work.theirs is not None and work.has_xla:
        found["jax.nn xla"] = functools.partial(
            jax.nn.dot_product_attention, **work.theirs, implementation="xla"
        )
    if tokamax_side.tokamax is not None and work.tokamax is not None:
        found["tokamax"] = tokamax_side.attention(**work.tokamax)
    return found


def jax_programs(
    work: Workload, arrays: list[jax.Array], cotangent: jax.Array, what: str
) -> dict[str, Program]:
    """Return the compiled programs of JAX by name."""
    in_f8 = [x.astype(jnp.float8_e4m3fn) for x in arrays] if work.is_f8 else arrays
    ways = {
        name: Way(function, in_f8 if name == OURS else arrays)
        for name, function in functions(work).items()
    }
    ours = [OURS, TUNED, _IN_BF16]
    found = programs(ways, what, [cotangent], ours=ours)
    if work.is_tuned and jax.default_backend() == "gpu":
        # Chosen beside tokamax's kernels, where these are installed.
        tuned = functools.partial(jax_cudnn.sdpa, **work.ours(work.s))
        run = program(tuned, what)
        plans.autotune(run, arrays, [cotangent], whole_program=False)
        found |= programs({TUNED: Way(tuned, arrays)}, what, [cotangent], ours=ours)
    return found


def _in_f8(options: dict[str, Any]) -> Attention:
    """Return attention over operands that stand for themselves, and so does it."""
    names = ("query_scale", "key_scale", "value_scale", "output_scale")
    scales = dict.fromkeys(names, jnp.float32(1))
    return functools.partial(f8.sdpa, **options, **scales)


def _with_sinks(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
    return jax_cudnn.sdpa(q, k, v, sinks=sinks, **options)


def _flex_with_sinks(flex: Any, q: Any, k: Any, v: Any, sinks: Any, **mask: Any) -> Any:
    """Scale PyTorch's attention by the weights' sum, as its users add sinks to it."""
    output, lse = flex.flex_attention(q, k, v, return_lse=True, **mask)
    share = torch.sigmoid(lse - sinks[:, None])
    return (output * share[..., None]).to(output.dtype)


def torch_contenders(
    work: Workload,
    arrays: list[jax.Array],
    cotangent: jax.Array,
    what: str,
    *,
    with_flex: bool,
) -> dict[str, Contender]:
    """Return what PyTorch has for a workload and can run."""
    if torch is None:
        return {}
    has_gradients = what == BOTH
    tensors = [torch_side.from_jax(x).transpose(1, 2) for x in arrays[:3]]
    tensors += [torch_side.from_jax(x) for x in arrays[3:]]
    for tensor in tensors:
        tensor.requires_grad_(has_gradients)
    q, k, v, *others = tensors
    bias, sinks = (others, []) if work.has_bias else ([], others)
    grad = torch_side.from_jax(cotangent).transpose(1, 2)
    grouped = {"enable_gqa": True} if work.h != work.k else {}
    attends: dict[str, Callable[[], Any]] = {}
    if work.torch is not None:
        names = ["torch cudnn", "torch flash", *(["torch efficient"] if bias else [])]
        kernels = torch_kernels(names, **work.torch, **grouped)
        attends |= {x: functools.partial(y, q, k, v, *bias) for x, y in kernels.items()}
    varlen = torch_side.installed("torch.nn.attention.varlen")
    if work.varlen is not None and varlen is not None:
        attends["torch varlen"] = functools.partial(
            _varlen, varlen.varlen_attn, work, q, k, v
        )
    if work.flex is not None and with_flex:
        attends["torch flex"] = _flex(work, q, k, v, bias, sinks, grouped)

    def run(attend: Callable[[], Any]) -> Any:
        with _deterministic() if work.is_deterministic else contextlib.nullcontext():
            output = attend()
            if not has_gradients:
                return output
            return torch.autograd.grad(output, tensors, grad)

    return torch_side.usable(
        {
            name: torch_side.contender(functools.partial(run, attend))
            for name, attend in attends.items()
        }
    )


def _flex(
    work: Workload, q: Any, k: Any, v: Any, bias: Any, sinks: Any, grouped: Any
) -> Callable[[], Any]:
    """Return PyTorch's compiled `flex_attention`."""
    from torch.nn.attention import flex_attention as flex

    assert work.flex is not None
    torch_side.forget_compiled()
    attention = (
        functools.partial(_flex_with_sinks, flex) if sinks else flex.flex_attention
    )
    options = {**work.flex(flex, work.s), **grouped}
    if bias:
        options["score_mod"] = lambda score, b, h, row, column: (
            score + bias[0][0, h, row, column]
        )
    compiled = torch.compile(attention, dynamic=False)
    return functools.partial(compiled, q, k, v, *sinks, **options)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Ask PyTorch for the same bits each time, and not to fill new memory for it."""
    importlib.import_module("torch.utils.deterministic")
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _varlen(function: Any, work: Workload, *tensors: Any) -> Any:
    """Call PyTorch's attention over packed sequences on (1, h, s, d); return such."""
    assert work.varlen is not None
    bounds = work.varlen(work.s)
    ends = torch.as_tensor(bounds, dtype=torch.int32).to(tensors[0].device)
    most = int(np.diff(bounds).max())
    # From PyTorch 2.11 on, causality is a window.
    is_window = "window_size" in inspect.signature(function).parameters
    causal: dict[str, Any] = (
        {"window_size": (-1, 0)} if is_window else {"is_causal": True}
    )
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    output = function(q, k, v, ends, ends, most, most, **causal)
    return output.transpose(0, 1)[None]


def run_workload(work: Workload, *, with_flex: bool) -> Iterator[Row]:
    """Time a workload, forward and with gradients; yield a row for each contender."""
    arrays, cotangent = operands(work)
    for what in (FORWARD, BOTH)[: 1 + work.has_gradient]:
        given = work, arrays, cotangent, what
        made = contenders(jax_programs(*given))
        made |= torch_contenders(*given, with_flex=with_flex)
        timings = compare(made, baseline=OURS, rounds=7, round_ms=25)
        for name, timing in timings.items():
            yield {
                "workload": work.name,
                "size": f"({work.b},{work.s},{work.h}h:{work.k},{work.d})",
                "what": what,
                "contender": name,
                **dataclasses.asdict(timing),
            }
        del made
        if torch is not None:
            torch_side.release_memory()


def _cases(*, small: bool) -> list[Workload]:
    if not small:
        return list(WORKLOADS)
    return [
        dataclasses.replace(work, b=1, s=64, d=16, e=work.e and 8) for work in WORKLOADS
    ]


def _measure(works: Sequence[Workload], no_flex: bool) -> Iterator[Row]:
    if tokamax_side.tokamax is not None:
        plans.add_tokamax()
    for work in works:
        yield from run_workload(work, with_flex=not no_flex)


def _lines(data: Data) -> list[str]:
    return [
        "Times are medians a call. The ratio is to `jax_cudnn`, round by round in the",
        "same run (median, lowest and highest): above 1, the other is slower. All",
        "contenders of a workload and direction take turns in one run. Sizes are",
        "(batch, length, query heads : key heads, head size). `torch flex` is",
        "PyTorch's `flex_attention`, compiled for these shapes. Sinks are added to it",
        "by its log-sum-exp, in the same compiled function. `jax_cudnn tuned` is what",
        "`plans.autotune` chose, tokamax's kernels among the candidates. `torch",
        "varlen` is its `varlen_attn`. In f8, `jax_cudnn` is `f8.sdpa`, beside `sdpa`",
        "on bf16. For the deterministic gradient, PyTorch is told to use",
        "deterministic algorithms. Where heads share their dropout, `jax_cudnn` is",
        "`jax_cudnn.flax.attention_fn` by cuDNN, and neither is causal.",
        "",
        *table_of(
            data["rows"],
            "workload | size | GPU | | contender | >µs | >ratio | range",
            "{workload} | {size} | {gpu} | {what} | {contender} | {median_us:.1f} | "
            "{ratio:.3f} | " + FINE_RANGE,
        ),
    ]


markdown = Page(
    name="attention_features",
    title="Attention's features",
    comment="What attention's features take on a GPU, beside other libraries.",
    command="python -m benchmarks.attention_features",
    names_gpus=True,
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(
        __doc__,
        _cases,
        _measure,
        markdown,
        options={"--no-flex": {"action": "store_true"}},
        keeps="any GPU",
        keys=["workload"],
        order=[work.name for work in WORKLOADS],
    )
