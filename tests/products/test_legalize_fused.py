# SPDX-License-Identifier: Apache-2.0
"""Tests that every way of handing conv and matmul to cuDNN keeps their meaning.

The parts of forward and gradient graphs are rewritten as for cuDNN, computed by the
reference with the array work around them, and compared with the parts themselves, in
f64. (cuDNN has no f64: the refusal of it is switched off here.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn.graph import (
    GraphWriter,
    Target,
    Tensor,
    derivative_of,
    is_anchor,
)
from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.legalize.products import conv_channels, conv_pairs, fusion, reduction
from jax_cudnn.legalize.products import pointwise as rewriting
from jax_cudnn.legalize.products.pointwise import rewrite_pointwise
from jax_cudnn.lowering import traced_graphs, traced_program
from jax_cudnn.policy import ranked, tables
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate
from tests.common.legal_ways import check_ways, graphs_of, run_way

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> Any:
    _measure_in_f64(monkeypatch)
    with jax.enable_x64(True):
        yield


def _measure_in_f64(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let what was measured in 16 bits hold for f64, with other conditions."""
    monkeypatch.undo()
    monkeypatch.setattr(fusion, "_refusals", lambda *_: [])
    monkeypatch.setattr(reduction, "_refusals", lambda _: ())
    (table, *_) = tables.shipped()
    orders = [
        replace(each, when={**each.when, **_of_f64(each, changes)})
        for each in table.orders
    ]
    made = replace(table, orders=orders)
    monkeypatch.setattr(tables, "shipped", lambda: (made,))


def _of_f64(order: tables.Order, changes: dict[str, Any]) -> dict[str, Any]:
    found = {name: each for name, each in changes.items() if name in order.when}
    if "dtype" in order.when:
        found["dtype"] = [*order.when["dtype"], "f64"]
    return found


@pytest.fixture
def rng() -> np.random.Generator:
    """Return a source of operands, the same ones in every run."""
    return np.random.default_rng(7)


def _draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape))


# --- convolution ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_every_way_keeps_the_meaning_of_a_random_convolution(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def integers(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(low, high, count))

    rank = 1 + seed % 3
    groups, c, o = integers(1, 4, 3)
    strides, holes = integers(1, 3, rank), integers(1, 3, rank)
    spread = integers(1, 3, rank) if seed % 2 else (1,) * rank
    if seed % 4 == 1:
        strides = (1,) * rank
    padding = [integers(-1, 4, 2) for _ in range(rank)]
    layouts = [tuple(int(x) for x in rng.permutation(rank + 2)) for _ in range(3)]
    numbers = jax.lax.ConvDimensionNumbers(*layouts)
    x = _draw(rng, 2, c * groups, *integers(5, 8, rank))
    w = _draw(rng, o * groups, c, *integers(1, 4, rank))
    x = jnp.transpose(x, np.argsort(layouts[0]))
    w = jnp.transpose(w, np.argsort(layouts[1]))

    def layer(x: Any, w: Any, bias: Any, residual: Any) -> jax.Array:
        return jax_cudnn.conv(
            x,
            w,
            strides,
            padding,
            spread,
            holes,
            numbers,
            groups,
            bias=bias,
            residual=residual,
            activation="silu",
        )

    bias = _draw(rng, o * groups)
    shape = jax.eval_shape(layer, x, w, bias, jnp.zeros(())).shape
    assert check_ways(layer, (x, w, bias, _draw(rng, *shape))) >= 3


def test_zeros_in_x_make_a_convolution_a_gradient(rng: np.random.Generator) -> None:
    x, w = _draw(rng, 2, 5, 7, 8), _draw(rng, 3, 3, 8, 16)

    def layer(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.conv(
            x,
            w,
            padding=((1, 1), (2, 0)),
            lhs_dilation=(2, 3),
            dimension_numbers=_NHWC,
        )

    assert check_ways(layer, (x, w)) == 3
    for (graph, _), kinds in zip(
        graphs_of(layer, (x, w)),
        (["conv_dgrad"], ["conv_wgrad", "conv_fprop"]),
        strict=True,
    ):
        found = [
            node.kind
            for part in partition(graph)
            for node in legalize(part, None).candidates[0].graph.nodes
            if is_anchor(node)
        ]
        assert found == kinds


def _in_layout(
    layout: str, x: jax.Array, w: jax.Array, options: Mapping[str, Any]
) -> tuple[Callable[..., jax.Array], tuple[jax.Array, jax.Array]]:
    """Return a convolution in a layout, and its operands of channels-last ones."""
    space = "DHW"[-(x.ndim - 2) :]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    if layout == "channels first":
        numbers = (f"NC{space}", f"OI{space}", f"NC{space}")
        x, w = jnp.moveaxis(x, -1, 1), jnp.moveaxis(w, (-1, -2), (0, 1))

    def layer(x: Any, w: Any) -> jax.Array:
        given = {"padding": "VALID", **options}
        return jax_cudnn.conv(x, w, dimension_numbers=numbers, **given)

    return layer, (x, w)


_PATCHES, _ROWS = "what lies within steps of", "what windows read along the last axis"
_WINDOWS = "all that a window reads"


def _ways_with(
    layer: Callable[..., jax.Array], operands: Sequence[jax.Array], words: str
) -> tuple[set[str], set[str]]:
    """Return the kinds of contractions whose first way has a note with these words.

    And those whose last way has it.
    """
    found: tuple[set[str], set[str]] = (set(), set())
    for graph, _ in graphs_of(layer, operands):
        for part in partition(graph):
            kinds = [node.kind for node in part.nodes if is_anchor(node)]
            first, *rest = (way.rewrite for way in ranked(part, None))
            for kept, ways in zip(found, ([first], rest[-1:]), strict=True):
                if any(words in note for way in ways for note in way.notes):
                    kept.update(kind.removeprefix("conv_") for kind in kinds)
    return found


@pytest.mark.parametrize(
    ("sizes", "window", "options", "words"),
    [
        ((8, 8), (4, 4), {"window_strides": (4, 4)}, _PATCHES),
        ((9, 8), (4, 6), {"window_strides": (2, 3), "padding": "SAME"}, _PATCHES),
        # More than is read, less than is there, and an axis with steps of 1.
        (
            (11, 13),
            (3, 4),
            {"window_strides": (3, 2), "padding": [(-1, -2), (3, 0)]},
            _PATCHES,
        ),
        ((9, 7), (3, 4), {"window_strides": (1, 4), "padding": "SAME"}, _PATCHES),
        ((15,), (6,), {"window_strides": (3,), "padding": "SAME"}, _PATCHES),
        ((6, 5, 7), (2, 4, 2), {"window_strides": (2, 2, 1)}, _PATCHES),
        ((12, 14), (7, 7), {"window_strides": (2, 2), "padding": "SAME"}, _ROWS),
        ((8, 9), (3, 3), {"padding": "SAME"}, _ROWS),
        (
            (11, 10),
            (4, 5),
            {"window_strides": (3, 2), "padding": [(0, 0), (2, 1)]},
            _ROWS,
        ),
        ((8, 12), (3, 4), {"padding": [(2, 0), (-2, 3)]}, _ROWS),
        (
            (9, 13),
            (3, 3),
            {"window_strides": (2, 2), "rhs_dilation": (2, 3), "padding": "SAME"},
            _ROWS,
        ),
        ((15,), (5,), {"window_strides": (3,), "padding": "SAME"}, _ROWS),
        ((6, 5, 7), (3, 3, 3), {"padding": "SAME"}, _ROWS),
    ],
)
@pytest.mark.parametrize("layout", ["channels last", "channels first"])
def test_few_channels_become_more(
    sizes: Sequence[int],
    window: Sequence[int],
    options: dict[str, Any],
    words: str,
    layout: str,
    rng: np.random.Generator,
) -> None:
    x, w = _draw(rng, 2, *sizes, 1), _draw(rng, *window, 1, 4)
    layer, (x, w) = _in_layout(layout, x, w, options)
    check_ways(layer, (x, w))
    kinds = {"fprop", "wgrad", "dgrad"} if words == _PATCHES else {"fprop", "wgrad"}
    # One axis was not measured, and cuDNN's first plans of rows' gradients are slow.
    first, last = _ways_with(layer, (x, w), words)
    is_measured = len(sizes) > 1
    fast = kinds if words == _PATCHES else {"fprop"}
    assert first == (fast if is_measured else set())
    assert last == kinds - first


@pytest.mark.parametrize(
    ("sizes", "window", "options"),
    [
        ((8, 9), (3, 3), {"padding": "SAME"}),
        ((11, 10), (4, 5), {"window_strides": (3, 2), "padding": [(0, 0), (2, 1)]}),
        ((8, 12), (2, 4), {"padding": [(2, 0), (-2, 3)]}),
        (
            (9, 13),
            (3, 3),
            {"window_strides": (2, 2), "rhs_dilation": (2, 3), "padding": "SAME"},
        ),
        ((15,), (5,), {"window_strides": (3,), "padding": "SAME"}),
        ((6, 5, 7), (3, 3, 3), {"padding": "SAME"}),
        ((6, 9, 7), (1, 3, 2), {"window_strides": (1, 2, 1)}),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("layout", ["channels last", "channels first"])
def test_filters_gradients_over_small_windows_are_products(
    sizes: Sequence[int],
    window: Sequence[int],
    options: dict[str, Any],
    channels: int,
    layout: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _measure_in_f64(monkeypatch, window_elements={"at_most": 100})
    load = 4
    monkeypatch.setitem(conv_channels.ELEMENTS_PER_LOAD, "f64", load)
    outer = math.ceil(channels * math.prod(window) / load) * load
    x, w = _draw(rng, 2, *sizes, channels), _draw(rng, *window, channels, outer)
    layer, (x, w) = _in_layout(layout, x, w, options)
    check_ways(layer, (x, w))
    # One channel along two axes in steps of 1 was slow, and one axis was not measured.
    is_strided = "window_strides" in options
    is_fast = len(sizes) > 2 or (len(sizes) == 2 and (channels > 1 or is_strided))
    first, last = _ways_with(layer, (x, w), _WINDOWS)
    assert (first if is_fast else last) == {"wgrad"}
    assert (last if is_fast else first) == set()
    # With fewer filters, x would be the larger of the two operands.
    axis = 0 if layout == "channels first" else -1
    fewer = jax.lax.slice_in_dim(w, 0, outer - load, axis=axis)
    assert _ways_with(layer, (x, fewer), _WINDOWS) == (set(), set())


def test_only_windows_as_small_as_the_measured_ones_go_first() -> None:
    def ways(*window: int) -> tuple[set[str], set[str]]:
        x, w = (
            jnp.ones(shape, jnp.bfloat16)
            for shape in ((2, 16, 16, 4), (*window, 4, 64))
        )

        def layer(x: Any, w: Any) -> jax.Array:
            return jax_cudnn.conv(x, w, (1, 1), "SAME", dimension_numbers=_NHWC)

        return _ways_with(layer, (x, w), _WINDOWS)

    assert ways(2, 5) == ({"wgrad"}, set())
    assert ways(2, 6) == (set(), {"wgrad"})


@pytest.mark.parametrize(("window", "words"), [((3, 2), _PATCHES), ((5, 3), _ROWS)])
def test_few_channels_become_more_with_what_follows(
    window: tuple[int, int], words: str, rng: np.random.Generator
) -> None:
    def layer(x: Any, w: Any, bias: Any) -> jax.Array:
        return jax_cudnn.conv(
            x,
            w,
            (3, 2),
            "SAME",
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
            bias=bias,
            activation="relu",
        )

    operands = _draw(rng, 2, 1, 11, 9), _draw(rng, 6, 1, *window), _draw(rng, 6)
    assert check_ways(layer, operands) > 4
    ((graph, _, _),) = traced_graphs(layer, *operands)
    first, second, *_ = (way.rewrite for way in ranked(graph, None))
    assert len(first.graph.nodes) == len(second.graph.nodes) == 3
    assert any(words in note for note in first.notes)
    assert not any("channels of x" in note for note in second.notes)


@pytest.mark.parametrize(
    ("c", "window", "steps", "options"),
    [
        (2, (4, 4), (4, 4), {}),  # fills a load of f64
        (2, (3, 3), (1, 1), {}),
        (1, (7, 1), (1, 1), {}),  # no more channels along the last axis
        (1, (1, 1), (2, 2), {}),
        (1, (3, 9), (1, 1), {}),  # an array of 9 times the size
        (3, (3, 3), (2, 2), {"feature_group_count": 3}),
    ],
)
def test_channels_stay_where_there_are_enough(
    c: int,
    window: tuple[int, int],
    steps: tuple[int, int],
    options: dict[str, Any],
    rng: np.random.Generator,
) -> None:
    def layer(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.conv(x, w, steps, "SAME", dimension_numbers=_NHWC, **options)

    groups = options.get("feature_group_count", 1)
    x, w = _draw(rng, 2, 9, 8, c), _draw(rng, *window, c // groups, 6)
    for graph, _ in graphs_of(layer, (x, w)):
        for part in partition(graph):
            for way in legalize(part, None).candidates:
                assert not any("channels of" in note for note in way.notes)


def test_auto_leaves_filters_over_few_channels_to_xla_in_steps_of_1() -> None:
    def slower(
        step: int, c: int, dtype: Any = jnp.bfloat16, outer: int = 8, axes: int = 2
    ) -> bool:
        x = jnp.ones((2, *[8] * axes, c), dtype)
        w = jnp.ones((*[3] * axes, c, outer), dtype)
        space = "DHW"[-axes:]
        numbers = (f"N{space}C", f"{space}IO", f"N{space}C")

        def loss(w: Any) -> jax.Array:
            y = jax_cudnn.conv(x, w, (step,) * axes, "SAME", dimension_numbers=numbers)
            return y.astype(jnp.float32).sum()

        traced = traced_graphs(jax.grad(loss), w)
        parts = [part for graph, _, _ in traced for part in partition(graph)]
        (part,) = [each for each in parts if each.nodes[0].kind == "conv_wgrad"]
        said = {way.slower for way in ranked(part, None)}
        return all("over 1 to 4 channels" in text for text in said)

    assert slower(1, 3)
    assert slower(1, 1, jnp.float16)
    assert slower(1, 1, outer=16)  # windows of one channel
    assert not slower(1, 3, outer=32)
    assert not slower(1, 1, outer=32, axes=3)
    assert slower(1, 1, outer=16, axes=3)  # rows
    assert not slower(1, 5)
    assert not slower(2, 3)
    assert not slower(1, 8)
    assert not slower(1, 3, jnp.float32)


def test_places_are_counted_in_32_bits() -> None:
    def is_first(*sizes: int) -> bool:
        types = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            for shape in ((1, *sizes, 1), (3, 3, 1, 16))
        ]

        def gradient(x: Any, w: Any) -> Any:
            def layer(w: Any) -> jax.Array:
                return jax_cudnn.conv(x, w, (2, 2), "SAME", dimension_numbers=_NHWC)

            y, pullback = jax.vjp(layer, w)
            return pullback(y)

        parts = [
            p for each in traced_program(gradient, *types).graphs for p in each.parts
        ]
        (part,) = [each for each in parts if each.nodes[0].kind == "conv_wgrad"]
        return any(_WINDOWS in note for note in ranked(part, None)[0].rewrite.notes)

    assert is_first(2**14, 2**14)
    assert not is_first(2**16, 2**15)
    # An axis of one place, with padding, is three long.
    assert is_first(1, 2**28)
    assert not is_first(1, 2**30)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_filters_that_read_nothing_else_have_finite_gradients(
    value: float, rng: np.random.Generator
) -> None:
    x, w = _draw(rng, 2, 9, 8, 1), _draw(rng, 3, 3, 1, 9)
    x = x.at[0, 0, 0, 0].set(value)  # which only one of nine reads

    def gradient(x: Any, w: Any, cotangent: Any) -> Any:
        def layer(w: Any) -> jax.Array:
            return jax_cudnn.conv(x, w, (1, 1), "VALID", dimension_numbers=_NHWC)

        return jax.vjp(layer, w)[1](cotangent)

    operands = x, w, _draw(rng, 2, 7, 6, 9)
    (part,) = [
        part
        for graph, _, _ in traced_graphs(gradient, *operands)
        for part in partition(graph)
        if part.nodes[0].kind == "conv_wgrad"
    ]
    given = {"x": x, "grad_output": operands[2]}
    roles = {name: role for role, name in part.nodes[0].inputs}
    arrays = [given[roles[name]] for name in part.inputs]
    (want,) = evaluate(part, arrays)
    assert np.sum(~np.isfinite(want)) == 9
    ways = legalize(part, None).candidates
    assert any(_WINDOWS in note for way in ways for note in way.notes)
    for way in ways:
        np.testing.assert_allclose(run_way(way, arrays)[0], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("window", "steps"), [((4, 4), (4, 4)), ((3, 3), (1, 1)), ((7, 7), (2, 2))]
)
def test_what_is_not_finite_stays_where_it_is(
    window: tuple[int, int],
    steps: tuple[int, int],
    value: float,
    rng: np.random.Generator,
) -> None:
    x, w = _draw(rng, 2, 16, 16, 1), _draw(rng, *window, 1, 4)
    x = x.at[0, 5, 6, 0].set(value)

    def layer(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.conv(x, w, steps, "SAME", dimension_numbers=_NHWC)

    ((graph, _, _),) = traced_graphs(layer, x, w)
    (want,) = evaluate(graph, [x, w])
    assert 0 < np.sum(~np.isfinite(want)) < want.size / 2
    for way in legalize(graph, None).candidates:
        np.testing.assert_allclose(run_way(way, [x, w])[0], want, rtol=1e-9, atol=1e-9)


@pytest.fixture
def _small_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    _measure_in_f64(monkeypatch, work={"at_least": 1})
    monkeypatch.setattr(conv_pairs, "_LEAST", 8)


_PAIRS = "places of the last axis are taken in pairs"


@pytest.mark.usefixtures("_small_pairs")
@pytest.mark.parametrize(
    ("sizes", "window", "padding", "channels", "layout", "paired"),
    [
        ((5, 6), (3, 3), "SAME", (8, 16), "NHWC", True),
        ((5, 6), (3, 3), "SAME", (8, 16), "NCHW", True),
        ((6, 8), (5, 5), "SAME", (16, 8), "NHWC", True),
        ((4, 5, 6), (3, 1, 3), "SAME", (8, 8), "NDHWC", True),
        ((5, 8), (3, 4), [(0, 2), (2, 1)], (8, 8), "NHWC", True),
        ((5, 8), (3, 3), [(1, 1), (0, 0)], (8, 8), "NHWC", True),
        ((5, 6), (3, 3), [(-1, 3), (1, 1)], (8, 8), "NHWC", True),
        # x would have to be padded once more, or its places make no pairs.
        ((5, 8), (4, 3), [(1, 1), (2, 0)], (8, 8), "NHWC", False),
        ((5, 9), (3, 4), [(1, 1), (1, 1)], (8, 8), "NHWC", False),
        ((5, 8), (3, 4), [(1, 1), (1, 1)], (8, 8), "NHWC", False),
        ((5, 8), (3, 3), [(1, 1), (-1, 3)], (8, 8), "NHWC", False),
        # Enough channels, too few, and windows that were not measured.
        ((5, 6), (3, 3), "SAME", (8, 40), "NHWC", False),
        ((5, 6), (3, 3), "SAME", (8, 12), "NHWC", False),
        ((5, 6), (9, 1), "SAME", (8, 8), "NHWC", False),
        ((12,), (9,), "SAME", (8, 8), "NWC", False),
    ],
)
def test_places_are_taken_in_pairs(
    sizes: Sequence[int],
    window: Sequence[int],
    padding: Any,
    channels: tuple[int, int],
    layout: str,
    paired: bool,
    rng: np.random.Generator,
) -> None:
    c, o = channels
    filters = layout.replace("N", "O").replace("C", "I")
    x, w = _draw(rng, 2, *sizes, c), _draw(rng, o, *window, c)
    if layout == "NCHW":
        x, w = (jnp.moveaxis(each, -1, 1) for each in (x, w))

    def layer(x: Any, w: Any) -> jax.Array:
        steps, numbers = (1,) * len(sizes), (layout, filters, layout)
        return jax_cudnn.conv(x, w, steps, padding, dimension_numbers=numbers)

    check_ways(layer, (x, w))
    first, _ = _ways_with(layer, (x, w), _PAIRS)
    assert first == ({"wgrad"} if paired else set())


@pytest.mark.usefixtures("_small_pairs")
def test_a_nan_of_a_pair_is_in_no_other_filter(rng: np.random.Generator) -> None:
    x, w = _draw(rng, 2, 5, 6, 8), _draw(rng, 3, 3, 8, 8)

    def layer(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.conv(x, w, padding="SAME", dimension_numbers=_NHWC)

    _, (graph, given) = graphs_of(layer, (x, w))
    (part,) = [part for part in partition(graph) if part.nodes[0].kind == "conv_wgrad"]
    values = dict(zip(graph.inputs, given, strict=True))
    image = dict(part.nodes[0].inputs)["x"]
    # Some elements of the window never see this corner.
    values[image] = values[image].at[0, 0, 0, 3].set(np.nan)
    arguments = [values[name] for name in part.inputs]
    (want,) = evaluate(part, arguments)
    assert 0 < np.sum(np.isnan(want)) < want.size
    for way in legalize(part, None).candidates:
        np.testing.assert_allclose(run_way(way, arguments)[0], want, atol=1e-9)


def test_operands_that_broadcast_in_space_are_completed(
    rng: np.random.Generator,
) -> None:
    x, w = _draw(rng, 2, 5, 7, 8), _draw(rng, 3, 3, 8, 16)
    residual, scale = _draw(rng, 1, 5, 1, 16), _draw(rng, 16)

    def layer(x: Any, w: Any, scale: Any, residual: Any) -> jax.Array:
        return jax_cudnn.conv(
            x,
            w,
            padding="SAME",
            dimension_numbers=_NHWC,
            residual=residual,
            scale=scale,
        )

    check_ways(layer, (x, w, scale, residual))
    ((graph, _, _),) = traced_graphs(layer, x, w, scale, residual)
    way = legalize(graph, None).candidates[0]
    assert way.graph.tensor("residual").dims == (2, 16, 5, 7)
    assert way.graph.tensor("scale").dims == (1, 16, 1, 1)


# --- matmul ---------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "r", "n"), [(3, 5, 7), (9, 16, 8), (8, 12, 6)])
def test_every_way_keeps_the_meaning_of_a_matmul(
    m: int, r: int, n: int, rng: np.random.Generator
) -> None:
    def layer(a: Any, b: Any, bias: Any) -> jax.Array:
        return jax_cudnn.matmul(a, b, bias=bias, activation="gelu")

    operands = _draw(rng, 2, m, r), _draw(rng, 2, r, n), _draw(rng, n)
    assert check_ways(layer, operands) >= 3


def test_what_meets_a_sum_over_the_batch_stays_beside_the_kernel(
    rng: np.random.Generator,
) -> None:
    # The gradient of the scale is a times a sum over the batch, which b alone has.
    operands = [_draw(rng, 4, 5), _draw(rng, 3, 5, 8), _draw(rng, 1, 5)]
    product = lambda a, b, scale: jax_cudnn.matmul(a, b, scale_a=scale)  # noqa: E731
    assert check_ways(product, operands) > 2


def test_a_batch_that_is_stored_last_is_transposed(rng: np.random.Generator) -> None:
    x, y = _draw(rng, 16, 8, 3, 4), _draw(rng, 8, 2, 4)

    def product(x: Any, y: Any) -> jax.Array:
        numbers = (((1,), (0,)), ((3,), (2,)))
        return jax_cudnn.dot_general(x, y, numbers, activation="gelu")

    check_ways(product, (x, y))
    ((graph, _, _),) = traced_graphs(product, x, y)
    assert graph.tensor("b").order == (1, 2, 0)
    way = legalize(graph, None).candidates[0]
    assert way.graph.tensor("b").order == (0, 1, 2)
    assert "b is transposed: its batch was stored last" in way.notes


@pytest.mark.parametrize(
    ("activation", "written"),
    [
        ("elu", {"neg", "relu", "mul", "tanh", "exp", "add"}),
        ("leaky_relu", {"neg", "relu", "mul", "sub"}),
        ("sigmoid", {"neg", "exp", "add", "div"}),
    ],
)
def test_modes_that_cudnn_computes_wrongly_or_slowly_are_written_as_others(
    activation: Any, written: set[str], rng: np.random.Generator
) -> None:
    def layer(a: Any, b: Any, bias: Any) -> jax.Array:
        return jax_cudnn.matmul(a, b, bias=bias, activation=activation, scale_out=0.5)

    operands = _draw(rng, 5, 8), _draw(rng, 8, 4), _draw(rng, 4)
    assert check_ways(layer, operands) >= 3
    ((graph, _, _),) = traced_graphs(layer, *operands)
    way = legalize(graph, None).candidates[0]
    pointwise = [each.attributes for each in way.graph.nodes]
    made = [each for each in pointwise if isinstance(each, PointwiseAttributes)]
    assert written <= {each.mode for each in made} <= written | {"add", "mul"}
    assert all(each.alpha == 0 for each in made)


# Where epilogues go wrong: what is not a number, what is not finite, signed zeros, the
# largest, and what is lost beside 1 or turns an exponential into 0 or infinity.
_SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 6.0, 17.0, -17.0, 30.0, -30.0]
    + [
        sign * x
        for x in (3e38, 1e-30, 1e-9, 1e-4, 0.3, 5.4, 5.6, 89.0)
        for sign in (1, -1)
    ],
    np.float32,
)


def _by_pointwise(mode: str, alpha: float, *operands: np.ndarray) -> jax.Array:
    """Return what a mode gives in f32, written as cuDNN gets it."""
    writer = GraphWriter("f32")
    names = [
        writer.input(Tensor(name=role, dtype="f32", dims=x.shape, order=(0,)))
        for role, x in zip("abc", operands, strict=False)
    ]
    value = writer.pointwise(mode, *names, alpha=alpha)
    final = Tensor(name="output", dtype="f32", dims=writer[value].dims, order=(0,))
    graph = writer.finish([writer.result(value, final)])
    # As within the kernel of a product.
    rewritten = rewriting._rewritten(graph, rewriting._EVERY)
    assert rewritten != graph
    arrays = dict(zip("abc", operands, strict=False))
    (found,) = evaluate(rewritten, [jnp.asarray(arrays[n]) for n in graph.inputs])
    return found


@pytest.mark.parametrize(
    ("mode", "alpha", "function"),
    [
        ("elu", 1.0, jax.nn.elu),
        ("elu", 0.7, lambda x: jax.nn.elu(x, 0.7)),
        ("relu", 0.01, jax.nn.leaky_relu),
        ("sigmoid", 0.0, jax.nn.sigmoid),
        ("silu", 0.0, jax.nn.silu),
        ("softplus", 0.0, jax.nn.softplus),
    ],
)
def test_special_values_pass_through_rewritten_activations(
    mode: str, alpha: float, function: Any
) -> None:
    x = _SPECIAL
    # In f64, and to its rounding: JAX's slope of elu may be exp(x) - 1 + 1.
    expected, slopes = jax.vjp(function, x.astype(np.float64))
    if mode != "silu":  # which is cuDNN's own, but for its gradient
        np.testing.assert_allclose(
            _by_pointwise(mode, alpha, x), expected, rtol=1e-5, atol=1e-38
        )
    cotangent = np.linspace(0.5, 2.0, x.size, dtype=np.float32)
    np.testing.assert_allclose(
        _by_pointwise(f"{mode}_grad", alpha, cotangent, x),
        slopes(cotangent.astype(np.float64))[0],
        rtol=1e-5,
        atol=3e-16,
    )


def test_what_is_slow_is_rewritten_within_a_contraction_alone() -> None:
    writer = GraphWriter("f32")
    x = writer.input(Tensor(name="x", dtype="f32", dims=(8,), order=(0,)))
    value = writer.pointwise("max", writer.pointwise("sigmoid", x), x)
    final = Tensor(name="output", dtype="f32", dims=(8,), order=(0,))
    graph = writer.finish([writer.result(value, final)])
    modes = {
        getattr(node.attributes, "mode", "") for node in rewrite_pointwise(graph).nodes
    }
    assert "sigmoid" in modes
    assert "max" not in modes


def test_constants_lie_as_the_tensors_beside_them() -> None:
    def layer(x: Any, w: Any) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax_cudnn.conv(x, w, dimension_numbers=numbers, activation="relu6")

    operands = jnp.ones((2, 8, 8, 8)), jnp.ones((3, 3, 8, 8))
    ((graph, _, _),) = traced_graphs(layer, *operands)
    written = legalize(graph, None).candidates[0].graph
    made = [node for node in written.nodes if node.kind == "constant"]
    orders = {written.tensor(name).order for node in made for _, name in node.outputs}
    assert orders == {written.output_tensors[0].order} == {(0, 2, 3, 1)}


def test_special_values_pass_through_a_rewritten_reciprocal() -> None:
    expected = np.asarray(jnp.reciprocal(_SPECIAL))
    found = np.asarray(_by_pointwise("reciprocal", 0.0, _SPECIAL))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize(
    ("mode", "function"),
    [("max", jnp.maximum), ("min", jnp.minimum), ("div", jnp.divide)],
)
def test_special_values_pass_through_rewritten_pairs(mode: str, function: Any) -> None:
    x, y = (each.ravel() for each in np.meshgrid(_SPECIAL, _SPECIAL))
    expected = np.asarray(jax.jit(function)(x, y))
    found = np.asarray(_by_pointwise(mode, 0.0, x, y))
    # Scaled down, a quotient of large divisors may leave the range of f32.
    is_tiny = np.abs(expected) < 1e-35
    np.testing.assert_allclose(found[~is_tiny], expected[~is_tiny], rtol=1e-6)
    np.testing.assert_allclose(found[is_tiny], 0, atol=1e-35)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_bounds_that_are_numbers_keep_nan(mode: str, swapped: bool) -> None:
    writer = GraphWriter("f32")
    x = writer.input(Tensor(name="x", dtype="f32", dims=_SPECIAL.shape, order=(0,)))
    operands = [x, writer.constant(0.25, 1)]
    value = writer.pointwise(mode, *(operands[::-1] if swapped else operands))
    final = Tensor(name="output", dtype="f32", dims=_SPECIAL.shape, order=(0,))
    graph = rewrite_pointwise(writer.finish([writer.result(value, final)]))
    modes = [getattr(node.attributes, "mode", "") for node in graph.nodes]
    assert sorted(modes) == ["", "lt" if mode == "max" else "gt", "select"]
    (found,) = evaluate(graph, [jnp.asarray(_SPECIAL)])
    expected = (jnp.maximum if mode == "max" else jnp.minimum)(_SPECIAL, 0.25)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("activation", ["relu6", "sigmoid", "tanh", "gelu", "relu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_argument_of_an_activation_is_no_result_beside_it(
    activation: Any, dtype: Any
) -> None:
    # cuDNN 9.19 lists engines for that which it cannot launch.
    def layer(x: Any, w: Any, bias: Any) -> jax.Array:
        return jax_cudnn.conv(
            x, w, (1, 1), "SAME", None, None, _NHWC, bias=bias, activation=activation
        )

    with jax.enable_x64(False):
        x, w, bias = (
            jnp.zeros(shape, dtype) for shape in ((2, 8, 8, 8), (3, 3, 8, 16), (16,))
        )
        ((plain, _, _),) = traced_graphs(layer, x, w, bias)
        derivative = derivative_of(plain)
        assert derivative is not None
        for graph in (plain, derivative.with_residuals(plain, (True,) * 3)):
            way = legalize(graph, None).candidates[0]
            for node in way.graph.nodes:
                attributes = node.attributes
                if getattr(attributes, "mode", "") not in _FUSED:
                    continue
                (argument,) = dict(node.inputs).values()
                assert argument not in way.graph.outputs
                read = [a for n in way.graph.nodes for _, a in n.inputs].count(argument)
                makers = {name: n for n in way.graph.nodes for _, name in n.outputs}
                maker = getattr(makers[argument].attributes, "mode", "")
                # eng0 has a tanh of its own, with an overflow.
                if activation == "tanh":
                    assert maker == "identity" or read > 1


_FUSED = ("relu", "relu6", "sigmoid", "tanh")


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_f8_results_of_f32_products_are_converted_by_xla(
    dtype: Any, rng: np.random.Generator
) -> None:
    a, b = _draw(rng, 5, 33).astype(jnp.float32), _draw(rng, 33, 7).astype(dtype)
    with jax.enable_x64(False):
        graph = next(
            part
            for found, _, is_linear in traced_graphs(
                jax.grad(lambda b: jax_cudnn.matmul(a, b).sum()), b
            )
            if not is_linear
            for part in partition(found)
            if part.output_tensors[0].dtype.startswith("f8")
        )
        operands = draw_arrays(graph)
        (expected,) = evaluate(graph, operands)
        candidates = legalize(graph, None).candidates
        assert candidates
        for rewrite in candidates:
            (made,) = rewrite.graph.output_tensors
            assert made.dtype == "f32"
            note = f"{graph.outputs[0]} is converted to {graph.output_tensors[0].dtype}"
            assert f"{note} by XLA" in rewrite.notes
            results = evaluate(rewrite.graph, jax.jit(rewrite.before)(operands))
            (found,) = rewrite.after(operands, results)
            assert found.dtype == expected.dtype == dtype
            # The order of the sums is not the same: half an ulp of f8 may turn over.
            np.testing.assert_allclose(
                found.astype(jnp.float32),
                expected.astype(jnp.float32),
                rtol=float(jnp.finfo(dtype).eps),
            )


def test_i32_sums_of_a_convolution_leave_the_kernel_in_f32() -> None:
    # cuDNN 9.19 writes the bits of f32 into an i32 result.
    rng = np.random.default_rng(3)
    x = jnp.asarray(np.asarray(rng.integers(-128, 128, (2, 5, 7, 16)), jnp.int8))

    def conv(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.conv(
            x, w, dimension_numbers=_NHWC, preferred_element_type=jnp.int32
        )

    w = jnp.asarray(np.asarray(rng.integers(-128, 128, (3, 3, 16, 4)), jnp.int8))
    ((graph, _, _),) = traced_graphs(conv, x, w)
    rewrite = legalize(graph, None).candidates[0]
    assert [t.dtype for t in rewrite.graph.output_tensors] == ["f32"]
    assert "output is converted to i32 by XLA" in rewrite.notes
    (found,) = rewrite.after((x, w), evaluate(rewrite.graph, rewrite.before((x, w))))
    exact = jax.lax.conv_general_dilated(
        x.astype(jnp.int32), w.astype(jnp.int32), (1, 1), "VALID", None, None, _NHWC
    )
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, exact)
    wide = jnp.zeros((8, 9, 16, 4), jnp.int8)
    ((graph, _, _),) = traced_graphs(conv, jnp.zeros((2, 9, 9, 16), jnp.int8), wide)
    (reason,) = legalize(graph, None).reasons
    assert "f32, which represents integers up to 2^24 only" in reason


def test_weights_are_converted_in_the_kernel_or_before_it() -> None:
    weights = jax.ShapeDtypeStruct((24, 16), jnp.int8)
    x = jax.ShapeDtypeStruct((5, 24), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((16,), jnp.float32)

    def layer(x: Any, weights: Any, scale: Any) -> jax.Array:
        return jax_cudnn.matmul(x, weights, scale_b=scale)

    ((graph, _, _),) = traced_graphs(layer, x, weights, scale)
    ways = legalize(graph, None).candidates
    dtypes = [[t.dtype for t in way.graph.input_tensors] for way in ways]
    assert dtypes[:2] == [["bf16", "i8", "f32"]] * 2
    assert ["bf16", "bf16", "f32"] in dtypes
    rows = [way.graph.output_tensors[0].dims[1] for way in ways[:2]]
    assert rows == [5, 16], "the weights are on the right, then on the left"
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(np.asarray(rng.normal(size=(1, 5, 24)), jnp.bfloat16)),
        jnp.asarray(np.asarray(rng.integers(-100, 100, (1, 24, 16)), jnp.int8)),
        jnp.asarray(np.asarray(rng.uniform(size=(1, 1, 16)), jnp.float32)),
    ]
    (want,) = evaluate(graph, operands)
    for way in ways:
        (got,) = run_way(way, operands)
        # One rounding more where the sums are rounded on their way.
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2**-6
        )


def test_weights_on_the_left_have_rows_that_fill_a_load() -> None:
    """Weights are stored as dense layers' often are, (n, r), with an odd n."""
    shapes = ((5, 24), (71, 24), (71,), (5, 71))

    def layer(x: Any, weights: Any, bias: Any, residual: Any) -> jax.Array:
        return jax_cudnn.dot_general(
            x, weights, (((1,), (1,)), ((), ())), bias=bias, residual=residual
        )

    dtypes = (jnp.bfloat16, jnp.int8, jnp.bfloat16, jnp.bfloat16)
    operands = map(jax.ShapeDtypeStruct, shapes, dtypes)
    ((graph, _, _),) = traced_graphs(layer, *operands)
    left = legalize(graph, None).candidates[1]
    (result,) = left.graph.output_tensors
    assert (result.dims[1], result.order) == (80, (0, 2, 1))
    for tensor in left.graph.tensors:
        fastest = tensor.dims[tensor.order[-1]]
        assert fastest % 16 == 0, f"{tensor}: 16 elements of i8 fill a load"


def test_no_way_is_there_twice() -> None:
    weights = jax.ShapeDtypeStruct((24, 16), jnp.int8)
    x = jax.ShapeDtypeStruct((5, 24), jnp.bfloat16)
    ((graph, _, _),) = traced_graphs(jax_cudnn.matmul, x, weights)
    graphs = [way.graph for way in legalize(graph, None).candidates]
    assert len(graphs) == len(set(graphs)) == 3


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "dtype", "reason"),
    [
        ((75, 91900), "bfloat16", "sm_75 (GPU): fusions need sm_80 (Ampere) or newer"),
        ((90, 90700), "bfloat16", "cuDNN 9.7.0 is older than 9.8"),
        ((80, 91900), "float8_e4m3fn", "sm_80 has no f8 tensor cores; sm_89 has"),
    ],
)
def test_refusals_say_why(
    target: tuple[int, int],
    dtype: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    sm_version, cudnn_version = target
    gpu = Target(
        name="GPU", sm_version=sm_version, sm_count=1, cudnn_version=cudnn_version
    )
    x = jax.ShapeDtypeStruct((8, 16), jnp.dtype(dtype))

    def layer(x: Any) -> jax.Array:
        return jax_cudnn.dot_general(
            x, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
        )

    ((graph, _, _),) = traced_graphs(layer, x)
    assert legalize(graph, gpu).reasons == (reason,)


def test_f64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = jnp.ones((8, 16), jnp.float64)
    ((graph, _, _),) = traced_graphs(lambda x: jax_cudnn.matmul(x, x.T), x)
    assert legalize(graph, None).reasons == (
        "f64: cuDNN's fusions take bf16, f16, f32 and 8-bit operands",
    )
