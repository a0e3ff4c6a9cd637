# SPDX-License-Identifier: Apache-2.0
"""Tests which graphs of attention are refused, and that programs do not vary."""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.graph import Target
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.policy import ranked
from tests.attention.legalize import lowered_gradient
from tests.attention.shared.legal import HOPPER
from tests.attention.shared.oracle import attention_graph, backward_graph

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_SIZES = {"b": 2, "s": 5, "t": 7, "h": 6, "k": 3, "d": 5, "e": 3}

_ADVICE = (
    'Pass implementation="xla" (or "auto") to compute it with XLA, or change the call '
    "as the reasons say."
)


def _target(**changes: Any) -> Target:
    return dataclasses.replace(HOPPER, **changes)


@pytest.mark.parametrize(
    ("options", "target", "reasons"),
    [
        ({"dtype": "f64"}, None, ["query is f64; cuDNN's {kind} takes {dtypes}"]),
        (
            {"dtype": "bf16", "bias": "1hst", "bias_dtype": "f16"},
            None,
            ["bias is f16; cuDNN takes bf16 or f32 here"],
        ),
        (
            {"dtype": "f16", "bias": "1hst", "bias_dtype": "f64"},
            HOPPER,
            ["bias is f64; cuDNN takes f16 or f32 here"],
        ),
        (
            {"dtype": "f16", "sizes": {**_SIZES, "b": 65536}},
            None,
            ["cuDNN's attention takes at most 65535 batch entries and 65535 heads"],
        ),
        (
            {"dtype": "f16", "sizes": {**_SIZES, "h": 65538}},
            HOPPER,
            ["cuDNN's attention takes at most 65535 batch entries and 65535 heads"],
        ),
        (
            {"dtype": "bf16"},
            _target(name="Tesla T4", sm_version=75),
            ["Tesla T4 is sm_75; cuDNN's attention needs sm_80 (Ampere) or newer"],
        ),
        (
            {"dtype": "bf16"},
            _target(cudnn_version=91000),
            [
                "cuDNN 9.10.0 to 9.10.1: attention is wrong in some cases. Use cuDNN "
                "9.10.2 or newer"
            ],
        ),
        (
            {"dtype": "f64", "bias": "1hst", "bias_dtype": "f16"},
            _target(name="Tesla T4", sm_version=75, cudnn_version=91001),
            [
                "query is f64; cuDNN's {kind} takes {dtypes}",
                "bias is f16; cuDNN takes f64 or f32 here",
                "Tesla T4 is sm_75; cuDNN's attention needs sm_80 (Ampere) or newer",
                "cuDNN 9.10.0 to 9.10.1: attention is wrong in some cases. Use cuDNN "
                "9.10.2 or newer",
            ],
        ),
    ],
)
def test_what_cudnn_cannot_do_is_refused_with_all_reasons(
    options: dict[str, Any], target: Target | None, reasons: list[str]
) -> None:
    forward = attention_graph(**{"sizes": _SIZES, **options}, with_stats=True)
    for graph, dtypes in (
        (forward, "bf16, f16, f32"),
        (backward_graph(forward), "bf16, f16"),
    ):
        refusal = legalize(graph, target)
        kind = graph.nodes[0].kind
        assert refusal.candidates == ()
        assert list(refusal.reasons) == [
            reason.format(kind=kind, dtypes=dtypes) for reason in reasons
        ]
        assert refusal.advice == _ADVICE


def test_f32_is_taken_forward_as_slower_and_refused_backward() -> None:
    forward = attention_graph(sizes=_SIZES, with_stats=True)
    (way,) = ranked(forward, HOPPER)
    assert way.slower == (
        "cuDNN's f32 attention takes up to twice XLA's time (9.19 on an H200, 4 x 4096 "
        'tokens) and has no gradient; implementation="cudnn" uses it, in memory that '
        "does not grow with s*t"
    )
    refusal = legalize(backward_graph(forward), None)
    assert refusal.reasons == ("query is f32; cuDNN's sdpa_backward takes bf16, f16",)
    (way,) = ranked(attention_graph(sizes=_SIZES, dtype="f16"), None)
    assert way.slower == ""


_CALLS: dict[str, Any] = {
    "plain": jax_cudnn.sdpa,
    "dropout": functools.partial(
        jax_cudnn.sdpa, dropout_rate=0.1, dropout_key=jax.random.key(0)
    ),
    "one array": lambda q, k, v: jax_cudnn.qkv_sdpa(jnp.stack([q, k, v], axis=2)),
}


@pytest.mark.parametrize("name", _CALLS)
def test_f32_and_small_attention_are_slower_by_the_call(name: str) -> None:
    def reasons(dtype: str) -> set[str]:
        operand = jax.ShapeDtypeStruct((8, 256, 1, 64), jnp.dtype(dtype))
        (traced,) = traced_graphs(_CALLS[name], *[operand] * 3)
        return {each.slower for each in ranked(traced.graph, HOPPER)}

    (f32,) = reasons("float32")
    assert f32.startswith("cuDNN's f32 attention takes up to twice XLA's time")
    (small,) = reasons("bfloat16")
    assert small.startswith("with one head") == (name == "plain")
    assert small == "" or name == "plain"


@pytest.mark.parametrize(
    ("changes", "is_trained", "is_slower"),
    [
        # One head or one sequence, up to 2 and with gradients 3 million scores.
        ({"b": 8, "h": 1}, False, True),
        ({"b": 1, "h": 8}, False, True),
        ({"b": 8, "h": 1, "s": 513, "t": 513}, False, False),
        ({"b": 8, "h": 1, "s": 513, "t": 513}, True, True),
        ({"b": 12, "h": 1}, True, True),
        ({"b": 12, "h": 1, "s": 513, "t": 513}, True, False),
        ({"b": 1, "h": 8, "is_causal": True}, True, True),
        ({"b": 8, "h": 1, "d": 256, "e": 256}, False, True),
        # Several of both.
        ({"b": 2, "h": 2}, False, False),
        ({"b": 2, "h": 2}, True, False),
        # What was not measured: few tokens, keys of another number or size, other
        # layouts and head sizes, and what is more than causal.
        ({"b": 8, "h": 1, "s": 127, "t": 127}, False, False),
        ({"b": 8, "h": 1, "t": 256}, True, False),
        ({"b": 8, "h": 1, "e": 128}, True, False),
        ({"b": 8, "h": 1, "d": 32, "e": 32}, True, False),
        ({"b": 8, "h": 1, "order": (2, 0, 1, 3)}, False, False),
        ({"b": 8, "h": 1, "order": (0, 1, 2, 3)}, True, False),
        ({"b": 1, "h": 8, "k": 2}, False, False),
        ({"b": 8, "h": 1, "window": (64, 0)}, False, False),
        ({"b": 8, "h": 1, "bias": "1hst"}, True, False),
        ({"b": 8, "h": 1, "lengths": ("key_lengths",)}, False, False),
    ],
)
def test_small_attention_is_left_to_xla_where_it_was_faster(
    changes: dict[str, Any], is_trained: bool, is_slower: bool
) -> None:
    sizes = {"b": 8, "s": 512, "t": 512, "h": 1, "d": 64, "e": 64}
    sizes |= {name: x for name, x in changes.items() if name in "bsthde"}
    sizes["k"] = changes.get("k", sizes["h"])
    others = {name: x for name, x in changes.items() if name not in "bsthkde"}
    forward = attention_graph(
        sizes=sizes, dtype="bf16", with_stats=is_trained, **others
    )
    graphs = [forward, *([backward_graph(forward)] if is_trained else [])]
    for graph in graphs:
        ways = ranked(graph, HOPPER)
        assert ways
        assert {way.slower != "" for way in ways} == {is_slower}
        if is_slower:
            million = 3 if is_trained else 2
            assert f"up to {million} million scores" in ways[0].slower


@pytest.mark.parametrize(("d", "e"), [(264, 64), (64, 257)])
def test_gradients_with_heads_over_256_are_refused_where_the_gpu_is_known(
    d: int, e: int
) -> None:
    forward = attention_graph(
        sizes={**_SIZES, "d": d, "e": e}, dtype="bf16", with_stats=True
    )
    assert legalize(forward, HOPPER).candidates
    graph = backward_graph(forward)
    assert legalize(graph, None).candidates
    (reason,) = legalize(graph, HOPPER).reasons
    assert reason == f"head sizes d={d}, e={e}; cuDNN's gradient takes at most 256"


@pytest.mark.parametrize("size", [65535, 3])
def test_what_is_at_a_limit_is_taken(size: int) -> None:
    graph = attention_graph(
        sizes={**_SIZES, "b": size, "h": 65535, "k": 3, "d": 256}, dtype="bf16"
    )
    for version in (90999, 91002):
        target = _target(sm_version=80, cudnn_version=version)
        assert legalize(graph, target).candidates


# --- the program ----------------------------------------------------------------------


def test_every_process_writes_the_same_program() -> None:
    # XLA's cache on disk knows a program by its text. Padding made it differ once.
    other = subprocess.run(
        [sys.executable, lowered_gradient.__file__],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "1"},
    )
    assert "jax_cudnn.graph" in other.stdout
    assert other.stdout.strip() == lowered_gradient.text().strip()
