# SPDX-License-Identifier: Apache-2.0
"""Attention as cells of the contest: how each library computes a workload."""

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
from benchmarks.attention.attention_cells import Workload
from benchmarks.harness import tokamax_side, torch_side
from benchmarks.harness.contest import Cell, Way
from benchmarks.harness.operands import Operand
from benchmarks.harness.torch_side import torch
from jax_cudnn import f8
from jax_cudnn.flax import make_attention_fn

OURS, THEIRS = "jax_cudnn", "jax.nn cudnn"
# PyTorch's kernels, as its `SDPBackend` names them.
_BACKENDS = {
    "torch cudnn": "CUDNN_ATTENTION",
    "torch flash": "FLASH_ATTENTION",
    "torch efficient": "EFFICIENT_ATTENTION",
}
Attention = Callable[..., Any]


def cell_of(work: Workload, *, baseline: str = OURS) -> Cell:
    """Return a workload as a cell, in which times are relative to one rival."""
    tuned = functools.partial(jax_cudnn.sdpa, **work.ours(work.s))
    operands = [
        Operand((work.b, work.s, work.h, work.d)),
        Operand((work.b, work.s, work.k, work.d)),
        Operand((work.b, work.s, work.k, work.e or work.d)),
    ]
    operands += [Operand((1, work.h, work.s, work.s))] if work.has_bias else []
    operands += [Operand((work.h,), dtype="float32")] if work.has_sinks else []
    return Cell(
        operation=work.name,
        size=f"({work.b},{work.s},{work.h}h:{work.k},{work.d})",
        operands=tuple(operands),
        rivals=_ways(work),
        ours=(lambda: tuned) if work.is_tuned else None,
        torch=None if torch is None else _torch_ways(work),
        truth=functools.partial(_by_heads, work),
        has_gradients=work.has_gradient,
        baseline=baseline,
    )


def small(work: Workload) -> Workload:
    """Return a workload for a CPU."""
    return dataclasses.replace(work, b=1, s=64, d=16, e=work.e and 8)


# --- JAX ------------------------------------------------------------------------------


def _ours(work: Workload, implementation: str) -> Attention:
    function = _with_sinks if work.has_sinks else jax_cudnn.sdpa
    options = work.ours(work.s)
    return functools.partial(function, **options, implementation=implementation)


def _with_sinks(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
    return jax_cudnn.sdpa(q, k, v, sinks=sinks, **options)


def _ways(work: Workload) -> dict[str, Way]:
    """Return the ways in JAX by name, without what is tuned."""
    is_gpu = jax.default_backend() == "gpu"
    options = work.ours(work.s)
    found: dict[str, Attention] = {}
    if work.is_flaxs:
        attention = make_attention_fn(implementation="cudnn")
        found[OURS] = functools.partial(attention, **options)
        found["Flax"] = functools.partial(nnx.dot_product_attention, **options)
    elif work.is_f8:
        found[f"{OURS} bf16"] = _ours(work, "cudnn")
    else:
        found[OURS] = _ours(work, "cudnn")
    plain = functools.partial(jax.nn.dot_product_attention, **(work.theirs or {}))
    if work.theirs is not None and is_gpu:
        found[THEIRS] = functools.partial(plain, implementation="cudnn")
    if work.theirs is not None and work.has_xla:
        found["jax.nn xla"] = functools.partial(plain, implementation="xla")
    if tokamax_side.tokamax is not None and work.tokamax is not None:
        found["tokamax"] = tokamax_side.attention(**work.tokamax)
    ways = {
        name: Way(function=function, is_checked=work.is_checked)
        for name, function in found.items()
    }
    return {**ways, OURS: _in_f8(options)} if work.is_f8 else ways


def _in_f8(options: dict[str, Any]) -> Way:
    """Return attention over operands that stand for themselves, and so does it."""
    names = ("query_scale", "key_scale", "value_scale", "output_scale")
    scales = dict.fromkeys(names, jnp.float32(1))
    return Way(
        function=functools.partial(
            f8.sdpa, **options, implementation="cudnn", **scales
        ),
        enter=lambda operands: [x.astype(jnp.float8_e4m3fn) for x in operands],
        is_checked=False,  # f8 rounds more than the others may differ
    )


def _by_heads(work: Workload, *operands: jax.Array) -> jax.Array:
    """Compute the attention of one key head after another, whose scores fit in memory.

    A key head has some query heads, one after another, with their biases and sinks.
    """
    heads = (2, 2, 2, 1 if work.has_bias else 0)
    parts = [
        jnp.stack(jnp.split(x, work.k, axis))
        for x, axis in zip(operands, heads, strict=False)
    ]
    attend = jax.checkpoint(_ours(work, "xla"))
    found = jax.lax.map(lambda each: attend(*each), parts)
    return jnp.concatenate(list(found), 2)


# --- PyTorch --------------------------------------------------------------------------


def torch_kernels(names: Sequence[str], **options: Any) -> dict[str, Attention]:
    """Return PyTorch's attention by each of the kernels of these names."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(backend: Any, *tensors: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

    return {
        name: functools.partial(attend, getattr(SDPBackend, _BACKENDS[name]))
        for name in names
    }


def heads_second(tensors: Sequence[Any]) -> list[Any]:
    """Return arrays of heads as PyTorch's attention takes them, or back; others stay.

    Of the operands, the first three are such arrays, and so are results.
    """
    return [x.transpose(1, 2) if i < 3 else x for i, x in enumerate(tensors)]


def _torch_ways(work: Workload) -> dict[str, Way]:
    """Return what PyTorch has for a workload."""
    grouped = {"enable_gqa": True} if work.h != work.k else {}
    found: dict[str, Attention] = {}
    if work.torch is not None:
        names = ["torch cudnn", "torch flash"]
        names += ["torch efficient"] if work.has_bias else []
        found |= torch_kernels(names, **work.torch, **grouped)
    varlen = torch_side.installed("torch.nn.attention.varlen")
    if work.varlen is not None and varlen is not None:
        found["torch varlen"] = functools.partial(_varlen, varlen.varlen_attn, work)
    if work.flex is not None:
        found["torch flex"] = _flex(work, grouped)
    return {
        name: Way(
            function=attend,
            enter=heads_second,
            cotangents=heads_second,
            outputs=heads_second,
            gradients=heads_second,
            is_checked=work.is_checked,
            around=_deterministic if work.is_deterministic else contextlib.nullcontext,
        )
        for name, attend in found.items()
    }


def _flex(work: Workload, grouped: dict[str, Any]) -> Attention:
    """Return PyTorch's compiled `flex_attention`."""

    @functools.cache
    def made() -> tuple[Attention, dict[str, Any]]:
        from torch.nn.attention import flex_attention as flex

        assert work.flex is not None
        function = flex.flex_attention
        if work.has_sinks:
            function = functools.partial(_flex_with_sinks, flex)
        options = {**work.flex(flex, work.s), **grouped}
        return torch.compile(function, dynamic=False), options

    def attend(q: Any, k: Any, v: Any, *others: Any) -> Any:
        compiled, options = made()
        if not work.has_bias:
            return compiled(q, k, v, *others, **options)
        (bias,) = others

        def biased(score: Any, b: Any, h: Any, row: Any, column: Any) -> Any:
            del b
            return score + bias[0, h, row, column]

        return compiled(q, k, v, score_mod=biased, **options)

    return attend


def _flex_with_sinks(flex: Any, q: Any, k: Any, v: Any, sinks: Any, **mask: Any) -> Any:
    """Scale PyTorch's attention by the weights' sum, as its users add sinks to it."""
    output, lse = flex.flex_attention(q, k, v, return_lse=True, **mask)
    share = torch.sigmoid(lse - sinks[:, None])
    return (output * share[..., None]).to(output.dtype)


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
