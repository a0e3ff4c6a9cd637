# SPDX-License-Identifier: Apache-2.0
"""Times attention's features beside jax.nn, PyTorch and tokamax, on one GPU.

    python -m benchmarks.attention_features --out docs/internals/measured

writes attention_features.json and .md there. Needs an NVIDIA GPU. PyTorch is used where
it is installed, with its flash and cuDNN attention and compiled `flex_attention`, and
so is tokamax, with its Mosaic kernels.
Operands are random bf16; see timing.py for how times are taken. `--only NAME ...`
chooses workloads by their names, in which `*` stands for any text; the rows of others
that the file in the folder has are kept. `--no-flex` leaves out what takes long to
compile.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_cudnn
from benchmarks.attention.attention_cells import WORKLOADS, Workload
from benchmarks.harness import tokamax_side, torch_side
from benchmarks.harness.page import gpu_of, page, spread, table
from benchmarks.harness.program import named, parser
from benchmarks.harness.records import Table
from benchmarks.harness.timing import Contender, Timing, compare
from benchmarks.harness.torch_side import torch
from jax_cudnn import f8, native, plans
from jax_cudnn.flax import make_attention_fn

_OURS, _TUNED, _IN_BF16 = "jax_cudnn", "jax_cudnn tuned", "jax_cudnn bf16"
Attention = Callable[..., Any]


def _with_gradients(attention: Attention, cotangent: jax.Array) -> Attention:
    def run(*arrays: jax.Array) -> Any:
        output, pullback = jax.vjp(attention, *arrays)
        return output, pullback(cotangent)

    return run


def _operands(work: Workload) -> tuple[list[jax.Array], jax.Array]:
    sizes = (
        (work.s, work.h, work.d),
        (work.s, work.k, work.d),
        (work.s, work.k, work.e or work.d),
        (work.s, work.h, work.e or work.d),
    )
    keys = jax.random.split(jax.random.key(0), len(sizes))
    arrays = [
        jax.random.normal(key, (work.b, *size), jnp.bfloat16)
        for key, size in zip(keys, sizes, strict=True)
    ]
    operands, cotangent = arrays[:3], arrays[3]
    if work.has_bias:
        shape = (1, work.h, work.s, work.s)
        operands.append(jax.random.normal(jax.random.key(1), shape, jnp.bfloat16))
    if work.has_sinks:
        operands.append(jax.random.normal(jax.random.key(1), (work.h,)))
    return operands, cotangent


def _jax_contenders(
    work: Workload, arrays: list[jax.Array], cotangent: jax.Array, *, gradients: bool
) -> dict[str, Contender]:
    options = work.ours(work.s)
    cudnn = {**options, "implementation": "cudnn"}
    ways: dict[str, Attention] = {
        _OURS: functools.partial(
            _call, _with_sinks if work.has_sinks else jax_cudnn.sdpa, cudnn
        )
    }
    if work.is_flaxs:
        ways = {
            _OURS: functools.partial(
                make_attention_fn(implementation="cudnn"), **options
            ),
            "Flax": functools.partial(nnx.dot_product_attention, **options),
        }
    if work.is_f8:
        ways = {_OURS: _in_f8(cudnn), _IN_BF16: ways[_OURS]}
    if work.theirs is not None and jax.default_backend() == "gpu":
        theirs = {**work.theirs, "implementation": "cudnn"}
        ways["jax.nn cudnn"] = functools.partial(
            _call, jax.nn.dot_product_attention, theirs
        )
    if tokamax_side.tokamax is not None and work.tokamax is not None:
        ways["tokamax"] = tokamax_side.attention(**work.tokamax)
    if work.is_tuned and jax.default_backend() == "gpu":
        # Chosen beside tokamax's kernels, where these are installed.
        ways[_TUNED] = functools.partial(_call, jax_cudnn.sdpa, options)
    found: dict[str, Contender] = {}
    in_f8 = [x.astype(jnp.float8_e4m3fn) for x in arrays] if work.is_f8 else arrays
    for name, attention in ways.items():
        given = in_f8 if name == _OURS else arrays
        function = _with_gradients(attention, cotangent) if gradients else attention
        if name == "tokamax":
            compiled = tokamax_side.compiled(name, function, given)
            if compiled is None:
                continue
        else:
            if name == _TUNED:
                plans.autotune(function, *given, whole_program=False)
            compiled = jax.jit(function).lower(*given).compile()
        found[name] = Contender(
            call=functools.partial(compiled, *given), wait=jax.block_until_ready
        )
    return found


def _in_f8(options: dict[str, Any]) -> Attention:
    """Return attention over operands that stand for themselves, and so does it."""
    names = ("query_scale", "key_scale", "value_scale", "output_scale")
    scales = dict.fromkeys(names, jnp.float32(1))
    return functools.partial(_call, f8.sdpa, {**options, **scales})


def _call(function: Attention, options: dict[str, Any], *arrays: jax.Array) -> Any:
    return function(*arrays, **options)


def _with_sinks(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
    return jax_cudnn.sdpa(q, k, v, sinks=sinks, **options)


def _flex_with_sinks(flex: Any, q: Any, k: Any, v: Any, sinks: Any, **mask: Any) -> Any:
    """Scale PyTorch's attention by the weights' sum, as its users add sinks to it."""
    output, lse = flex.flex_attention(q, k, v, return_lse=True, **mask)
    share = torch.sigmoid(lse - sinks[:, None])
    return (output * share[..., None]).to(output.dtype)


def _torch_contenders(
    work: Workload,
    arrays: list[jax.Array],
    cotangent: jax.Array,
    *,
    gradients: bool,
    with_flex: bool,
) -> dict[str, Contender]:
    if torch is None:
        return {}
    from torch.nn import attention as torch_attention

    tensors = [torch_side.from_jax(x).transpose(1, 2) for x in arrays[:3]]
    tensors += [torch_side.from_jax(x) for x in arrays[3:]]
    for tensor in tensors:
        tensor.requires_grad_(gradients)
    q, k, v, *others = tensors
    bias, sinks = (others, []) if work.has_bias else ([], others)
    grad = torch_side.from_jax(cotangent).transpose(1, 2)
    grouped = {"enable_gqa": True} if work.h != work.k else {}

    def run(attend: Callable[[], Any]) -> Any:
        with _deterministic() if work.is_deterministic else contextlib.nullcontext():
            output = attend()
            return torch.autograd.grad(output, tensors, grad) if gradients else output

    def with_backend(backend: Any) -> Any:
        with torch_attention.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, *bias, **(work.torch or {}), **grouped
            )

    found: dict[str, Contender] = {}
    if work.torch is not None:
        backends = torch_attention.SDPBackend
        for name, backend in (
            ("torch cudnn", backends.CUDNN_ATTENTION),
            ("torch flash", backends.FLASH_ATTENTION),
            *((("torch efficient", backends.EFFICIENT_ATTENTION),) if bias else ()),
        ):
            attend = functools.partial(with_backend, backend)
            found[name] = torch_side.contender(functools.partial(run, attend))
    varlen = torch_side.installed("torch.nn.attention.varlen")
    if work.varlen is not None and varlen is not None:
        attend = functools.partial(_varlen, varlen.varlen_attn, work, q, k, v)
        found["torch varlen"] = torch_side.contender(functools.partial(run, attend))
    if work.flex is not None and with_flex:
        from torch.nn.attention import flex_attention as flex

        torch_side.forget_compiled()
        attention = (
            functools.partial(_flex_with_sinks, flex) if sinks else flex.flex_attention
        )
        compiled = torch.compile(attention, dynamic=False)
        options = {**work.flex(flex, work.s), **grouped}
        if bias:
            options["score_mod"] = lambda score, b, h, row, column: (
                score + bias[0][0, h, row, column]
            )
        attend = functools.partial(compiled, q, k, v, *sinks, **options)
        found["torch flex"] = torch_side.contender(functools.partial(run, attend))
    return torch_side.usable(found)


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


def run_workload(work: Workload, *, with_flex: bool) -> list[dict[str, Any]]:
    """Time a workload, forward and forward with gradients."""
    rows: list[dict[str, Any]] = []
    arrays, cotangent = _operands(work)
    for gradients in (False, True)[: 1 + work.has_gradient]:
        contenders = {
            **_jax_contenders(work, arrays, cotangent, gradients=gradients),
            **_torch_contenders(
                work, arrays, cotangent, gradients=gradients, with_flex=with_flex
            ),
        }
        builds = native.cache_stats().builds
        timings = compare(contenders, baseline=_OURS, rounds=7, round_ms=25)
        assert native.cache_stats().builds == builds, "a plan was built while timing"
        what = "with gradients" if gradients else "forward"
        rows += [_row(work, what, name, timing) for name, timing in timings.items()]
        if torch is not None:
            torch_side.release_memory()
    return rows


def _row(work: Workload, what: str, name: str, timing: Timing) -> dict[str, Any]:
    size = f"({work.b},{work.s},{work.h}h:{work.k},{work.d})"
    print(
        f"{work.name:34s} {what:15s} {name:15s} {timing.median_us:10.1f} us  "
        f"{timing.ratio:5.3f} ({timing.ratio_low:.3f}-{timing.ratio_high:.3f})",
        flush=True,
    )
    facts = {"workload": work.name, "size": size, "what": what, "contender": name}
    return {**facts, **dataclasses.asdict(timing)}


def markdown(data: dict[str, Any]) -> str:
    """Return the report as a table, a line a contender."""
    lines = [
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
        *table(
            "workload | size | GPU | | contender | >µs | >ratio | range",
            map(_cells, data["rows"]),
        ),
    ]
    return page(
        data,
        lines,
        title="Attention's features",
        comment="What attention's features take on a GPU, beside other libraries.",
        command="python -m benchmarks.attention_features",
        names_gpus=True,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    labels = [row["workload"], row["size"], gpu_of(row), row["what"], row["contender"]]
    times = f"{row['median_us']:.1f}", f"{row['ratio']:.3f}", spread(row, digits=3)
    return [*labels, *times]


def main() -> None:
    """Run the workloads and write the report."""
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", default=["*"], help="names of workloads")
    made.add_argument("--no-flex", action="store_true")
    made.add_argument("--small", action="store_true", help="try the script on a CPU")
    options = made.parse_args()
    if tokamax_side.tokamax is not None:
        plans.add_tokamax()
    names = [work.name for work in WORKLOADS]
    chosen = named(made, WORKLOADS, options.only)
    rows = Table(
        folder=options.out,
        name="attention_features",
        markdown=markdown,
        keys=["workload"],
        order=names,
    )
    if len(chosen) == len(names):
        rows.forget()
    for work in chosen:
        if options.small:
            work = dataclasses.replace(work, b=1, s=64, d=16, e=work.e and 8)
        rows.add(*run_workload(work, with_flex=not options.no_flex))


if __name__ == "__main__":
    main()
