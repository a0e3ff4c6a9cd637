# SPDX-License-Identifier: Apache-2.0
"""Tests that every way of handing convolutions to cuDNN keeps their meaning.

The parts of forward and gradient graphs are rewritten as for cuDNN, computed by the
reference with the array work around them, and compared with the parts themselves, in
f64. (cuDNN has no f64: the refusal of it is switched off here.)
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn.graph import (
    is_anchor,
)
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.legalize.products import conv_channels
from jax_cudnn.lowering import traced_graphs, traced_program
from jax_cudnn.policy import ranked
from tests.common.evaluating import evaluate
from tests.common.legal_ways import check_ways, graphs_of, run_way, ways_with
from tests.products.shared.in_f64 import double, draw, measure_in_f64, rng

__all__ = ["double", "rng"]

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_NHWC = ("NHWC", "HWIO", "NHWC")


def _nhwc(strides: tuple[int, ...], padding: Any, **options: Any) -> Any:
    """Return a convolution of channels-last images."""
    return functools.partial(
        jax_cudnn.conv,
        window_strides=strides,
        padding=padding,
        dimension_numbers=_NHWC,
        **options,
    )


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
    x = draw(rng, 2, c * groups, *integers(5, 8, rank))
    w = draw(rng, o * groups, c, *integers(1, 4, rank))
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

    bias = draw(rng, o * groups)
    shape = jax.eval_shape(layer, x, w, bias, jnp.zeros(())).shape
    assert check_ways(layer, (x, w, bias, draw(rng, *shape))) >= 3


def test_zeros_in_x_make_a_convolution_a_gradient(rng: np.random.Generator) -> None:
    x, w = draw(rng, 2, 5, 7, 8), draw(rng, 3, 3, 8, 16)

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
    x, w = draw(rng, 2, *sizes, 1), draw(rng, *window, 1, 4)
    layer, (x, w) = _in_layout(layout, x, w, options)
    check_ways(layer, (x, w))
    kinds = {"fprop", "wgrad", "dgrad"} if words == _PATCHES else {"fprop", "wgrad"}
    # One axis was not measured, and cuDNN's first plans of rows' gradients are slow.
    first, last = ways_with(layer, (x, w), words)
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
    measure_in_f64(monkeypatch, window_elements={"at_most": 100})
    load = 4
    monkeypatch.setitem(conv_channels.ELEMENTS_PER_LOAD, "f64", load)
    outer = math.ceil(channels * math.prod(window) / load) * load
    x, w = draw(rng, 2, *sizes, channels), draw(rng, *window, channels, outer)
    layer, (x, w) = _in_layout(layout, x, w, options)
    check_ways(layer, (x, w))
    # One channel along two axes in steps of 1 was slow, and one axis was not measured.
    is_strided = "window_strides" in options
    is_fast = len(sizes) > 2 or (len(sizes) == 2 and (channels > 1 or is_strided))
    first, last = ways_with(layer, (x, w), _WINDOWS)
    assert (first if is_fast else last) == {"wgrad"}
    assert (last if is_fast else first) == set()
    # With fewer filters, x would be the larger of the two operands.
    axis = 0 if layout == "channels first" else -1
    fewer = jax.lax.slice_in_dim(w, 0, outer - load, axis=axis)
    assert ways_with(layer, (x, fewer), _WINDOWS) == (set(), set())


def test_only_windows_as_small_as_the_measured_ones_go_first() -> None:
    def ways(*window: int) -> tuple[set[str], set[str]]:
        x, w = (
            jnp.ones(shape, jnp.bfloat16)
            for shape in ((2, 16, 16, 4), (*window, 4, 64))
        )
        layer = _nhwc((1, 1), "SAME")
        return ways_with(layer, (x, w), _WINDOWS)

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

    operands = draw(rng, 2, 1, 11, 9), draw(rng, 6, 1, *window), draw(rng, 6)
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
    layer = _nhwc(steps, "SAME", **options)

    groups = options.get("feature_group_count", 1)
    x, w = draw(rng, 2, 9, 8, c), draw(rng, *window, c // groups, 6)
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
    x, w = draw(rng, 2, 9, 8, 1), draw(rng, 3, 3, 1, 9)
    x = x.at[0, 0, 0, 0].set(value)  # which only one of nine reads

    def gradient(x: Any, w: Any, cotangent: Any) -> Any:
        def layer(w: Any) -> jax.Array:
            return jax_cudnn.conv(x, w, (1, 1), "VALID", dimension_numbers=_NHWC)

        return jax.vjp(layer, w)[1](cotangent)

    operands = x, w, draw(rng, 2, 7, 6, 9)
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
    x, w = draw(rng, 2, 16, 16, 1), draw(rng, *window, 1, 4)
    x = x.at[0, 5, 6, 0].set(value)
    layer = _nhwc(steps, "SAME")
    ((graph, _, _),) = traced_graphs(layer, x, w)
    (want,) = evaluate(graph, [x, w])
    assert 0 < np.sum(~np.isfinite(want)) < want.size / 2
    for way in legalize(graph, None).candidates:
        np.testing.assert_allclose(run_way(way, [x, w])[0], want, rtol=1e-9, atol=1e-9)


def test_operands_that_broadcast_in_space_are_completed(
    rng: np.random.Generator,
) -> None:
    x, w = draw(rng, 2, 5, 7, 8), draw(rng, 3, 3, 8, 16)
    residual, scale = draw(rng, 1, 5, 1, 16), draw(rng, 16)

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
