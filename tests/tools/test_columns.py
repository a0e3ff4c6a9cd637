# SPDX-License-Identifier: Apache-2.0
"""Tests that what the package prints fits a terminal, and stays whole elsewhere."""

import io
import os
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import columns, plans
from jax_cudnn.choices import Choice, Key
from jax_cudnn.columns import Details, Heading, Page, Rows, Table, Text
from jax_cudnn.lowering.decision import Attempt
from jax_cudnn.plans import ExplainedCall, Explanation
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
    "explain": lambda: Explanation(
        device="NVIDIA H200",
        cudnn_version="9.19.0",
        calls=(
            ExplainedCall(
                op="sdpa_backward",
                shapes=", ".join(["f32[4,2048,16,128]"] * 6),
                count=2,
                implementation="xla",
                attempts=(Attempt(way="as one kernel", reasons=("d < 8", "s & t")),),
                notes=("the result is transposed",),
                change="cast the operands from f32 to bf16",
                change_plan="eng4",
            ),
        ),
        notes=("Planned without the GPU.",),
    ),
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


# --- notebooks ------------------------------------------------------------------------


class _Reader(HTMLParser):
    """Reads a page: the text that is seen, the tags, and whether all of them close."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


class _Made(Page):
    def __init__(self, *blocks: columns.Block) -> None:
        self._made = blocks

    def _blocks(self) -> tuple[columns.Block, ...]:
        return self._made


def test_cells_are_escaped_and_numbers_are_to_the_right() -> None:
    rows = (("a<b & c", "-", "1,024 B", "9.5"), ("matmul", "-", "-", "10.5 µs"))
    page = _Made(Table(("op", "<none>", "workspace", "time"), rows))._repr_html_()
    left, right = ('"text-align:left"', '"text-align:right"')
    for cell in (
        f"<th style={left}>op</th><th style={left}>&lt;none&gt;</th>"
        f"<th style={right}>workspace</th><th style={right}>time</th></tr></thead>",
        f"<td style={left}>a&lt;b &amp; c</td><td style={left}>-</td>"
        f"<td style={right}>1,024 B</td><td style={right}>9.5</td>",
        f"<td style={right}>-</td><td style={right}>10.5 µs</td>",
    ):
        assert cell in page
    read = _Reader(page)
    assert read.text == ["op", "<none>", "workspace", "time", *rows[0], *rows[1]]
    assert read.tags.count("tr") == 3


def test_a_table_without_rows_has_its_names_in_html() -> None:
    assert _Reader(_Made(Table(("op", "plan"), ()))._repr_html_()).text == [
        "op",
        "plan",
    ]


def test_names_that_text_leaves_out_are_the_head_in_html() -> None:
    rows = Rows((("dot", "f32[3]"), ("exp", "f32[5]")), ("operation", "result"), "  ")
    made = _Made(Heading("kernel <1>"), Text("  on A & B"), Text(""), rows)
    assert str(made) == "kernel <1>\n  on A & B\n\n  dot  f32[3]\n  exp  f32[5]"
    read = _Reader(made._repr_html_())
    assert read.text == [
        *("kernel <1>", "on A & B", "operation", "result"),
        *("dot", "f32[3]", "exp", "f32[5]"),
    ]
    assert (read.tags.count("p"), read.tags.count("thead")) == (2, 1)
    assert "thead" not in _Reader(_Made(Rows((("a", "b"),)))._repr_html_()).tags


def test_notes_unfold_in_html_and_are_all_there_in_text() -> None:
    notes = ("x < 8", "it is transposed")
    folded = Details(title="2 notes", notes=notes, mark="  - ")
    opened = Details(title="why & how", notes=notes, heading="refused:", is_open=True)
    none = Details(title="nothing", notes=(), heading="nothing:")
    made = _Made(folded, opened, none)
    assert str(made).splitlines() == [
        *("  - x < 8", "  - it is transposed"),
        *("refused:", "x < 8", "it is transposed"),
    ]
    items = "<ul><li>x &lt; 8</li><li>it is transposed</li></ul></details>"
    assert made._repr_html_() == (
        f"<div><details><summary>2 notes</summary>{items}"
        f"<details open><summary>why &amp; how</summary>{items}</div>"
    )


_TAGS = {
    "inspect": {"table", "thead", "details"},
    "doctor": {"table"},
    "explain": {"details", "summary"},
    "fuse": {"table", "thead"},
    "tuning": {"table", "thead"},
}


@pytest.mark.parametrize("name", _PAGES)
def test_a_notebook_shows_all_that_text_says(name: str) -> None:
    result = _PAGES[name]()
    read = _Reader(result._repr_html_())
    assert set(read.tags) >= _TAGS[name]
    assert "pre" not in read.tags
    seen = " ".join(" ".join(read.text).split())
    for line in str(result).splitlines():
        # The cells of a table are its own, and so is what only text has before a line.
        for part in filter(None, line.strip().removeprefix("- ").split("  ")):
            assert part.strip().removesuffix(":") in seen, part


def test_an_explanation_shows_why_cudnn_refuses_without_a_click() -> None:
    page = _PAGES["explain"]()._repr_html_()
    assert (
        "<details open><summary>refused (as one kernel)</summary>"
        "<ul><li>d &lt; 8</li><li>s &amp; t</li></ul></details>" in page
    )
    assert "<details><summary>notes</summary><ul><li>the result is transposed" in page
