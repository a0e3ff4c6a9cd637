# SPDX-License-Identifier: Apache-2.0
"""Tables decide whether cuDNN runs a part, for the nearest GPU that was measured."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_program
from jax_cudnn.lowering.decision import (
    decide_part,
    forget_decisions,
    rewritten_as,
)
from jax_cudnn.policy import ranked, tables
from jax_cudnn.policy.attention import Attention
from jax_cudnn.policy.norms import Norm
from jax_cudnn.policy.products import kernels
from jax_cudnn.policy.products.cublaslt import CublasLtProduct
from jax_cudnn.policy.products.properties import (
    CausalConvolution,
    Convolution,
    CopiedForF8,
    Depthwise,
    GroupedProduct,
    Matmul,
)
from jax_cudnn.policy.tables import Row, Table, tables_for
from tests.policy import answers
from tests.policy.answers import H100
from tests.products.shared.grouped_layers import GroupedLayer

pytestmark = pytest.mark.once

_A100 = Target(name="A100", sm_version=80, sm_count=108, cudnn_version=91900)
_NEWER = replace(H100, cudnn_version=92100)
_PROPERTIES: dict[str, type | None] = {
    "attention": Attention,
    "norms": Norm,
    "pooling": None,
    "causal convolutions": CausalConvolution,
    "grouped products": GroupedProduct,
    "products with sums": None,
    "matmuls": Matmul,
    "matmuls unlike all": Matmul,
    "cuBLASLt": CublasLtProduct,
    "f8 products": CopiedForF8,
    "convolutions": Convolution,
    "around convolutions": Convolution,
    "groups": Convolution,
    "depthwise": Depthwise,
}


def _part(function: Any, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Graph:
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    (graph,) = traced_program(function, *operands).graphs
    (part,) = graph.parts
    return part


def _attention() -> Graph:
    return _part(jax_cudnn.sdpa, *[(2, 256, 4, 64)] * 3)


def test_what_was_measured_is_answered_as_ever() -> None:
    """On an H100: `python -m tests.policy.answers` writes the file."""
    expected = json.loads(answers.FILE.read_text())
    found = answers.answers()
    assert found.keys() == expected.keys()
    assert {k: v for k, v in found.items() if v != expected[k]} == {}


@pytest.mark.parametrize("table", tables.shipped(), ids=lambda t: f"sm_{t.sm_version}")
def test_every_row_names_properties_that_there_are_and_what_measured_it(
    table: Table,
) -> None:
    for row in (*table.rows, *table.orders):
        kind = _PROPERTIES[row.of]
        assert all(_has(kind, name) for name in row.when), row
        assert _is_there(row.by), row


def _is_there(by: str) -> bool:
    """Whether it is a command of calibration or of a benchmark, or a page."""
    folder = Path(__file__).parents[2]
    program = re.match(r"python -m benchmarks\.(\w+)", by)
    if program is not None:
        return any(folder.glob(f"benchmarks/*/{program[1]}.py"))
    return by.startswith("jax-cudnn calibrate") or (folder / by).is_file()


def _has(kind: type | None, name: str) -> bool:
    # A property, or what __init__ sets.
    assert kind is not None
    code = kind.__init__.__code__
    fields = getattr(kind, "__dataclass_fields__", ())
    return hasattr(kind, name) or name in code.co_names or name in fields


def _only(*rows: dict[str, Any]) -> Table:
    """Return a table of sm_80 with cuDNN 9.28 that has these rows and nothing else."""
    return Table.of({"sm_version": 80, "cudnn": 928, "rows": [*rows], "orders": []})


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    """A made-up table of another architecture, beside the shipped ones."""
    (first, *_) = tables.shipped()
    made = _only(
        {"of": "attention", "when": {"tokens": {"at_most": 256}}, "runs": "xla",
         "why": "made up", "by": "nothing"},
        {"of": "norms", "when": {}, "runs": "cudnn", "by": "nothing"},
        {"of": "depthwise", "when": {}, "runs": "cudnn", "fast_engines": [77],
         "why_elsewhere": "other engines", "by": "nothing"},
    )  # fmt: skip
    monkeypatch.setattr(tables, "shipped", lambda: (first, made))
    forget_decisions()
    yield made
    forget_decisions()


def test_a_table_for_another_architecture_decides_there_alone(ampere: Table) -> None:
    part = _attention()
    assert tables_for(_A100).about("attention") is ampere
    assert [way.slower for way in ranked(part, _A100)] == ["made up"]
    assert all(not way.slower for way in ranked(part, H100))
    norm = _part(jax_cudnn.rms_norm, (64, 256))
    assert [bool(way.slower) for way in ranked(norm, _A100)] == [False]
    assert all(way.slower for way in ranked(norm, H100))
    # The nearest other table decides what this one does not speak of: which way is
    # first, and every other family.
    product = _part(jax_cudnn.matmul, (4096, 2048), (2048, 1024))
    (far,), (near,) = ranked(product, _A100), ranked(product, H100)
    assert far.slower == near.slower != ""
    # Engines are those of its own version of cuDNN alone.
    conv = GroupedLayer((9, 8), (3, 3)).parts(jnp.bfloat16)["conv_fprop"]
    own = replace(_A100, cudnn_version=92801)
    assert {way.fast_engines for way in ranked(conv, own)} == {(77,)}
    assert {way.fast_engines for way in ranked(conv, _A100)} == {()}
    assert {way.slower for way in ranked(conv, _A100)} == {"other engines"}


def test_the_decision_goes_by_the_table(ampere: Table) -> None:
    del ampere
    step = decide_part(_attention(), None, Options())
    assert step.runs_on == "cudnn"  # A GPU that is not known has the first table.


@pytest.mark.parametrize("target", [None, _A100, _NEWER])
def test_one_rule_holds_where_nobody_measured(target: Target | None) -> None:
    """The nearest table decides, in every family, but for rows that name engines."""
    assert {*tables_for(target).tables} == {*tables.shipped()}
    name = "" if target is None else target.name
    for key, part in answers.parts().items():
        if not key.startswith(("sdpa", "layer_norm", "ragged_dot", "avg_pool")):
            continue
        if "norm" in key and name != H100.name:
            continue  # These rows are of GPUs by their names.
        told = [bool(way.slower) for way in ranked(part, target)]
        # cuBLASLt's way is none where the GPU is not known.
        want = [
            bool(way.slower)
            for way in ranked(part, H100)
            if target is not None or "by cuBLASLt" not in way.rewrite.names
        ]
        assert told == want, key
    conv = GroupedLayer((9, 8), (3, 3)).parts(jnp.bfloat16)
    assert all(way.slower for way in ranked(conv["conv_fprop"], target))
    # XLA's code for these may take 30 times as long on any GPU.
    assert not ranked(conv["conv_wgrad"], target)[0].slower
    assert all(not way.preference for way in ranked(conv["conv_wgrad"], target))


def test_the_nearest_architecture_goes_before_the_nearest_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, *_) = tables.shipped()
    made = tuple(
        replace(first, sm_version=sm, cudnn=cudnn, is_for_unknown=cudnn == 919)
        for sm, cudnn in ((90, 919), (80, 928), (90, 930), (120, 928))
    )
    monkeypatch.setattr(tables, "shipped", lambda: made)
    for sm, cudnn, expected in (
        (90, 92801, 2),
        (90, 92000, 0),
        (89, 91900, 1),  # of the generation of sm_80
        (100, 92800, 2),
    ):
        target = replace(H100, sm_version=sm, cudnn_version=cudnn)
        assert tables_for(target).tables[0] is made[expected], (sm, cudnn)
    assert tables_for(None).tables[0] is made[0]


_XLAS = {"of": "norms", "when": {}, "runs": "xla", "why": "made up", "by": "nothing"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"why": ""}, "a row has a `why`"),
        ({"runs": "cudnn"}, "a row has a `why`"),
        ({"why_elsewhere": "made up"}, "a row has a `why_elsewhere`"),
        ({"fast_engines": [2]}, "a row has a `why_elsewhere`"),
        ({"preferred": [{}]}, "a row has a `why_elsewhere`"),
        ({"when": {"rows": {"atleast": 3}}}, "rows has bounds"),
    ],
)
def test_rows_that_say_too_little_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    assert _only(_XLAS).rows
    with pytest.raises(ValueError, match=words):
        _only({**_XLAS, **changes})


def test_one_table_is_for_gpus_that_are_not_known() -> None:
    assert [table.is_for_unknown for table in tables.shipped()].count(True) == 1


def test_slow_engines_are_of_their_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"of": "norms", "when": {}, "runs": "cudnn", "slow_engines": [1], "by": "-"}
    found = (_only(row), *tables.shipped())
    monkeypatch.setattr(tables, "shipped", lambda: found)
    norm = _part(jax_cudnn.rms_norm, (64, 256))
    ampere = [way.slow_engines for way in ranked(norm, _A100)]
    others = [way.slow_engines for way in ranked(norm, replace(_A100, sm_version=86))]
    assert (ampere, others) == ([(1,)], [()])


@pytest.mark.parametrize("gpu", [H100, _A100])
def test_norms_judged_by_kernels_are_not_run_by_a_slow_engine(gpu: Target) -> None:
    def gradient(x: jax.Array, scale: jax.Array) -> jax.Array:
        y = jax_cudnn.layer_norm(x, scale, scale)
        return y.astype(jnp.float32).sum()

    target = replace(gpu, cudnn_version=92800)
    operands = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 2048), (2048,))]
    graphs = traced_program(jax.grad(gradient), *operands).graphs
    parts = [part for graph in graphs for part in graph.parts]
    assert [part.nodes[0].kind for part in parts] == [
        "layer_norm",
        "layer_norm_backward",
    ]
    for part in parts:
        (way,) = [way for way in ranked(part, target) if not way.slower]
        assert "kernels" in way.by
        assert way.is_slow_by(1)
        assert not way.is_slow_by(5)
        assert "a rule" in way.engines_by


def test_ways_that_no_order_names_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, *_) = tables.shipped()

    def ordered(of: str, *ways: str) -> None:
        orders = [each for each in first.orders if each.of != of]
        if ways:
            orders.append(tables.Order(of=of, when={}, by="-", ways=ways))
        monkeypatch.setattr(tables, "shipped", lambda: (replace(first, orders=orders),))

    layer = GroupedLayer((8, 8), (3, 3), groups=4, width=8, each=8, activation="silu")
    grouped = layer.parts(jnp.bfloat16)["conv_fprop"]
    ordered("around convolutions", "fused")
    assert all("alone" not in way.rewrite.names for way in ranked(grouped, H100))
    ordered("groups", "merged")
    assert {way.rewrite.names[0] for way in ranked(grouped, H100)} == {"merged"}
    ordered("groups")
    with pytest.raises(LookupError, match="no table has an order of 'groups'"):
        ranked(grouped, H100)
    product = dict(answers.parts())["ragged_dot 16384 8/grouped_matmul/0"]
    ordered("grouped products", "one kernel")
    assert {way.rewrite.names[-1] for way in ranked(product, H100)} == {"one kernel"}


def test_depthwise_engines_are_known_by_their_direction() -> None:
    for kind, part in GroupedLayer((9, 8), (3, 3)).parts(jnp.bfloat16).items():
        assert kernels.own_engines(part, tables_for(H100)), kind


def test_a_choice_without_a_rewriting_is_of_the_way_that_is_tried_first() -> None:
    layer = GroupedLayer((8, 8), (3, 3), groups=16, width=4, each=4)
    part = layer.parts(jnp.bfloat16)["conv_fprop"]
    found = legalize(part, H100)
    first = ranked(part, H100)[0].rewrite
    assert first.names != found.candidates[0].names
    rewrite = rewritten_as(part, found, H100, "")
    assert rewrite is not None
    assert rewrite.names == first.names == ("merged",)


@pytest.mark.parametrize(
    ("when", "value", "is_met"),
    [
        (3, 3, True),
        (3, 4, False),
        (True, False, False),
        (["a", "b"], "b", True),
        (["a", "b"], "c", False),
        ({"at_least": 3}, 3, True),
        ({"at_least": 3}, 2, False),
        ({"at_most": 3}, 4, False),
        ({"below": 3}, 3, False),
        ({"at_least": 2, "below": 3}, 2, True),
        ({"multiple_of": 4}, 12, True),
        ({"multiple_of": 4}, 13, False),
    ],
)
def test_conditions(when: Any, value: Any, is_met: bool) -> None:
    class _Properties:
        size = value

    row = Row(of="", when={"size": when}, by="")
    assert tables.holds(row, _Properties()) == is_met
    with pytest.raises(AttributeError):
        tables.holds(Row(of="", when={"no_such": 1}, by=""), _Properties())


def test_what_decided_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, attention = _part(jax_cudnn.rms_norm, (64, 256)), _attention()
    product = _part(jax_cudnn.matmul, (4096, 2048), (2048, 1024))
    here, nearest = "measured on sm_90 with cuDNN 9.19", "of the nearest table: sm_90, "
    # A row of the table holds for the norm, and none for attention.
    for part, rule in ((norm, "a rule"), (attention, "the rules")):
        assert ranked(part, H100)[0].by == f"{rule} {here}"
        assert ranked(part, _NEWER)[0].by == f"{rule} {nearest}cuDNN 9.19"
    assert ranked(product, H100)[0].by == f"8 kernels {here}"
    assert ranked(product, None)[0].by == f"8 kernels {nearest}cuDNN 9.19"
    layer = GroupedLayer((8, 8), (3, 3), groups=1, width=64, each=64)
    conv = layer.parts(jnp.bfloat16)["conv_fprop"]
    kernels_there = f"8 kernels {nearest}cuDNN 9.19"
    assert ranked(conv, H100)[0].engines_by == f"engines {here}, 8 kernels {here}"
    assert ranked(conv, _A100)[0].engines_by == kernels_there
    # Nothing like it was measured.
    monkeypatch.setattr(tables, "shipped", lambda: (_only(),))
    assert ranked(attention, H100)[0].by == ""


def test_a_decision_tells_what_decided() -> None:
    norm, attention = _part(jax_cudnn.rms_norm, (64, 256)), _attention()
    nearest = "of the nearest table: sm_90, cuDNN 9.19"
    assert decide_part(attention, None, Options()).by == f"the rules {nearest}"
    step = decide_part(norm, None, Options())
    assert (step.runs_on, step.by) == ("xla", f"a rule {nearest}")
    asked = Options(implementation="cudnn")
    assert decide_part(norm, None, asked).by == ""


def test_a_matmul_like_none_that_was_measured_is_xla_s() -> None:
    # The gradient of a table of 32 biases of 12 heads, for 512 x 512 positions.
    part = _part(lambda x, y: jax_cudnn.matmul(x.T, y), (262144, 32), (262144, 12))
    assert "no measured product is like it" in ranked(part, H100)[0].slower
    # With something around it, cuDNN spares an array.
    fused = _part(
        lambda x, y: jax_cudnn.matmul(x.T, y, activation="gelu"),
        *((262144, 32), (262144, 12)),
    )
    assert not ranked(fused, H100)[0].slower


@pytest.mark.parametrize(
    ("queries", "keys", "is_xlas"),
    [(256, 256, True), (520, 520, False), (8, 65536, False), (1024, 128, True)],
)
def test_scores_are_of_all_keys(queries: int, keys: int, is_xlas: bool) -> None:
    heads = 4
    x, y = (
        jax.ShapeDtypeStruct((1, s, heads, 64), jnp.bfloat16) for s in (queries, keys)
    )
    bias = jax.ShapeDtypeStruct((1, heads, queries, keys), jnp.bfloat16)

    def gradients(*operands: Any) -> Any:
        output, back = jax.vjp(jax_cudnn.sdpa, *operands)
        return back(output)

    (part,) = (
        part
        for graph in traced_program(gradients, x, y, y, bias).graphs
        for part in graph.parts
        if part.nodes[0].kind == "sdpa_backward"
    )
    assert ("few scores" in ranked(part, H100)[0].slower) == is_xlas
