# SPDX-License-Identifier: Apache-2.0
"""Does what the package prints fit a terminal, and stay whole everywhere else?"""

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import columns, plans
from jax_cudnn.choices import Choice, Key
from jax_cudnn.plans.tuning import Tuning

pytestmark = pytest.mark.once

_NAMES = ("op", "operands", "notes")
_ROWS = [
    ("matmul", "bf16[64,4096], bf16[4096,4096], bf16[1,4096]", "TENSOR_CORE"),
    ("sdpa_backward", "bf16[4,2048,16,128], f32[4,16,2048,1]", "RUNTIME_COMPILATION"),
]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let pages be printed to a terminal of so many columns."""

    def set_width(width: int) -> None:
        monkeypatch.setattr(columns, "terminal_width", lambda: width)

    return set_width


def test_files_get_whole_lines_and_terminals_their_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert columns.terminal_width() is None
    monkeypatch.setattr(sys, "stdout", None)  # as for pythonw and some services
    assert columns.terminal_width() is None
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setitem(os.environ, "COLUMNS", "77")
    assert columns.terminal_width() == 77


def test_a_table_that_fits_is_one(narrow: Callable[[int], None]) -> None:
    whole = list(columns.table(_NAMES, _ROWS))
    assert whole == [
        "op             operands                                      notes",
        "matmul         bf16[64,4096], bf16[4096,4096], bf16[1,4096]  TENSOR_CORE",
        "sdpa_backward  bf16[4,2048,16,128], f32[4,16,2048,1]         "
        "RUNTIME_COMPILATION",
    ]
    narrow(max(map(len, whole)))
    assert list(columns.table(_NAMES, _ROWS)) == whole


def test_a_table_that_does_not_fit_is_blocks(narrow: Callable[[int], None]) -> None:
    narrow(40)
    assert list(columns.table(_NAMES, _ROWS)) == [
        "matmul",
        "  operands  bf16[64,4096],",
        "            bf16[4096,4096],",
        "            bf16[1,4096]",
        "  notes     TENSOR_CORE",
        "sdpa_backward",
        "  operands  bf16[4,2048,16,128],",
        "            f32[4,16,2048,1]",
        "  notes     RUNTIME_COMPILATION",
    ]


def test_a_table_without_rows_keeps_its_names(narrow: Callable[[int], None]) -> None:
    narrow(3)
    assert "operands" in "".join(columns.table(_NAMES, []))


def test_sentences_are_folded_and_names_are_not(narrow: Callable[[int], None]) -> None:
    lines = ["  - the kernel writes f32, and XLA converts", "", "a/path/" + "x" * 40]
    assert columns.page(lines) == "\n".join(lines)
    narrow(24)
    assert columns.page(lines).splitlines() == [
        "  - the kernel writes",
        "    f32, and XLA",
        "    converts",
        "",
        "a/path/" + "x" * 40,
    ]


def _gradient(q: jax.Array) -> jax.Array:
    def loss(q: jax.Array) -> jax.Array:
        return jax_cudnn.sdpa(q, q, q, is_causal=True).astype(jnp.float32).sum()

    return jax.grad(loss)(q)


_Q = jax.ShapeDtypeStruct((4, 2048, 16, 128), jnp.bfloat16)
_PAGES: dict[str, Callable[[], Any]] = {
    "inspect": lambda: plans.inspect(_gradient, _Q),
    "doctor": plans.doctor,
    "fuse": lambda: jax_cudnn.fuse(
        lambda a, b: jnp.sort(jax.nn.gelu(jnp.dot(a, b) * 3.0 + 1.0), axis=-1)
    ).explain(*(jax.ShapeDtypeStruct((512, 512), jnp.bfloat16),) * 2),
    "tuning": lambda: Tuning(
        device="NVIDIA H200",
        choices={
            Key("H200", 91900, "0"): Choice(
                op="sdpa_backward",
                operands=", ".join(["bf16[4,2048,16,128]"] * 6),
                implementation="cudnn",
            )
        },
    ),
}


@pytest.mark.parametrize("name", _PAGES)
def test_pages_fit_a_terminal(name: str, narrow: Callable[[int], None]) -> None:
    result = _PAGES[name]()
    whole = str(result)
    narrow(80)
    folded = str(result)
    for line in folded.splitlines():
        assert len(line) <= 80 or " " not in line.strip(), line
    assert set(folded.split()) >= set(whole.split()) - {"op", "first", "/", "best"}
