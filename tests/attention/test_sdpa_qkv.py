# SPDX-License-Identifier: Apache-2.0
"""Tests attention over one array of q, k and v against attention over its parts.

Arrays are put together and taken apart in NumPy (qkv.py); the truth is `jax_cudnn.sdpa`
over the parts, and dense attention in float64 NumPy.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.test_util import check_grads

from jax_cudnn import masks, qkv_sdpa, sdpa
from jax_cudnn.errors import GraphError
from jax_cudnn.graph import Graph, Tensor
from jax_cudnn.graph.attention.qkv import with_parts
from jax_cudnn.legalize import legalize
from tests.attention.shared import qkv
from tests.attention.shared.flash import flash
from tests.attention.shared.legal import HOPPER, assert_results_close, gradient_of
from tests.attention.shared.oracle import numpy_attention, numpy_gradients
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate
from tests.products.shared.fused import assert_close, graphs, stacked, subsets

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_KEY = jax.random.key(3)


def _draw(layout: str, dtype: Any = jnp.float64, **sizes: int) -> jax.Array:
    rng = np.random.default_rng(len(layout) + ord(layout[1]))
    return jnp.asarray(
        np.asarray(rng.standard_normal(qkv.shape_of(layout, **sizes)), dtype)
    )


def _by_parts(layout: str, x: jax.Array, *bias: jax.Array, **options: Any) -> Any:
    """Return the results of sdpa over the parts, in the layout."""
    found = sdpa(*qkv.apart(layout, x), *bias, **options)
    output, *lse = found if isinstance(found, tuple) else (found,)
    return (qkv.in_layout(layout, output), *lse)


def _in_one(layout: str, x: jax.Array, *bias: jax.Array, **options: Any) -> Any:
    found = qkv_sdpa(x, *bias, **qkv.arguments_of(layout), **options)
    return found if isinstance(found, tuple) else (found,)


# --- values and gradients -------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", qkv.LAYOUTS)
def test_values_and_gradients_are_those_of_the_definition(layout: str) -> None:
    x = _draw(layout)
    parts = [np.swapaxes(each, 1, 2) for each in qkv.apart(layout, np.asarray(x))]
    call = functools.partial(
        _in_one, layout, is_causal=True, return_residual=True, scale=0.7
    )
    (output, lse), pull = jax.vjp(call, x)
    rng = np.random.default_rng(0)
    cotangents = rng.standard_normal(output.shape), rng.standard_normal(lse.shape)
    (found,) = pull(tuple(map(jnp.asarray, cotangents)))

    logical: dict[str, Any] = dict(zip(("query", "key", "value"), parts, strict=True))
    want = numpy_attention(logical, scale=0.7, is_causal=True)
    plain = layout.replace("3", "")
    gradients = numpy_gradients(
        logical,
        cotangents[0].transpose([plain.index(letter) for letter in "bhsd"]),
        np.swapaxes(cotangents[1], 1, 2)[..., None],
        scale=0.7,
        is_causal=True,
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    close(output, qkv.in_layout(layout, np.swapaxes(want["output"], 1, 2)))
    close(lse, np.swapaxes(want["stats"][..., 0], 1, 2))
    close(
        found,
        qkv.together(layout, [np.swapaxes(gradients[role], 1, 2) for role in logical]),
    )


_SLOPES = np.array([0.5, -1.25, 2.0, 0.25])
_OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (1, 1)},
    "lengths": {"query_seq_lengths": np.array([2, 3]), "is_causal": True},
    "mask": {"mask": np.tri(5, 5, 1, dtype=bool)},
    "mask_data": {"mask": masks.Causal() & masks.Window(2, 3)},
    "packed": {"mask": masks.Packed.from_lengths(np.array([1, 3]))},
    "dropout": {"dropout_rate": 0.4, "dropout_key": _KEY},
    "sinks": {"sinks": _SLOPES},
    "softcap": {"score_mod": lambda s, *_: 2 * jnp.tanh(s / 2), "is_causal": True},
    "no_graph": {"score_mod": lambda s, b, h, q, k: jnp.where(q > k, s, jnp.sinh(s))},
    "scale": {"scale": -0.75},
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", _OPTIONS)
def test_all_options_mean_the_same(name: str, with_lse: bool) -> None:
    x, options = _draw("bsh3d"), {**_OPTIONS[name]}
    options |= {"return_residual": with_lse, "return_max_logit": with_lse}
    found, pull = jax.vjp(functools.partial(_in_one, "bsh3d", **options), x)
    want, pull_parts = jax.vjp(functools.partial(_by_parts, "bsh3d", **options), x)
    assert_close(found, want)
    cotangents = jax.tree.map(jnp.cos, want)
    assert_close(pull(cotangents), pull_parts(cotangents))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", ["bs3hd", "sbhd"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_biases_have_gradients(has_sinks: bool, layout: str) -> None:
    x = _draw(layout)
    heads = 4 if "3" in layout else 6
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.standard_normal((1, heads, 5, 5)))
    options = {"sinks": rng.standard_normal(heads)} if has_sinks else {}

    def run(call: Callable[..., Any]) -> Any:
        output, pull = jax.vjp(functools.partial(call, layout, **options), x, bias)
        return output, pull(jax.tree.map(jnp.sin, output))

    assert_close(run(_in_one), run(_by_parts))


@pytest.mark.parametrize("layout", qkv.LAYOUTS)
def test_without_a_batch_axis(layout: str) -> None:
    x = _draw(layout, jnp.float32)
    axis = layout.index("b")
    whole = _in_one(layout, x[(slice(None),) * axis + (slice(0, 1),)])
    found = _in_one(layout, jnp.take(x, 0, axis), return_residual=True)
    place = layout.replace("3", "").index("b")
    assert_close(found[0], jnp.squeeze(whole[0], place))
    assert found[1].shape == (5, 4 if "3" in layout else 6)


@pytest.mark.parametrize("empty", "bsd")
def test_sizes_of_zero(empty: str) -> None:
    for layout in ("bs3hd", "bshd"):
        x = _draw(layout, jnp.float32, **{empty: 0})
        assert_close(_in_one(layout, x), _by_parts(layout, x))
    x = jnp.zeros((2, 5, 3, 0, 8))
    assert qkv_sdpa(x).shape == (2, 5, 0, 8)


# --- transformations ------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", ["bs3hd", "sbh3d", "bhsd"])
@pytest.mark.parametrize("batched", subsets(3), ids=str)
def test_vmap_over_any_operands_and_cotangents(
    batched: tuple[int, ...], layout: str
) -> None:
    heads = 4 if "3" in layout else 6
    rng = np.random.default_rng(2)
    shapes = (
        qkv.shape_of(layout),
        (2, 1, 5, 5),
        _in_one(layout, _draw(layout))[0].shape,
    )
    assert heads in shapes[2]
    axes = [i + 1 if i in batched else None for i in range(3)]
    given = [
        jnp.asarray(
            rng.standard_normal(
                shape if axis is None else (*shape[:axis], 3, *shape[axis:])
            )
        )
        for shape, axis in zip(shapes, axes, strict=True)
    ]

    def run(x: Any, bias: Any, cotangent: Any) -> Any:
        call = functools.partial(_in_one, layout, is_causal=True)
        output, pull = jax.vjp(call, x, bias)
        return output, pull((cotangent,))

    found = jax.jit(jax.vmap(run, in_axes=tuple(axes)))(*given)
    assert_close(found, stacked(run, given, axes))


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", ["bs3hd", "bshd"])
def test_both_modes_agree_with_finite_differences(layout: str) -> None:
    call = functools.partial(_in_one, layout, is_causal=True, return_residual=True)
    check_grads(call, (_draw(layout),), order=2, modes=("fwd", "rev"))


def test_scan_remat_and_export() -> None:
    x, w = _draw("bs3hd", jnp.float32), jnp.ones((3,), jnp.float32)

    def step(call: Any, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        (output,) = call("bs3hd", x, is_causal=True)
        return x + output[:, :, None] * w[None, None, :, None, None], None

    def loss(call: Any, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(functools.partial(step, call))
        return jnp.sum(jnp.sin(jax.lax.scan(body, x, length=2)[0]))

    gradient = jax.grad(functools.partial(loss, _in_one))
    want = jax.grad(functools.partial(loss, _by_parts))(x)
    assert_close(gradient(x), want, 1e-4)
    exported = export.export(jax.jit(gradient))(x)
    assert_close(export.deserialize(exported.serialize()).call(x), want, 1e-4)
    sizes = export.symbolic_shape("a, c, 3, h, 6")
    many = export.export(jax.jit(qkv_sdpa))(jax.ShapeDtypeStruct(sizes, jnp.float32))
    assert_close(many.call(x), qkv_sdpa(x), 1e-5)


def test_the_gradient_is_one_graph_of_one_array() -> None:
    x = _draw("bs3hd", jnp.float32)
    found = graphs(jax.grad(lambda x: jnp.sum(jnp.sin(qkv_sdpa(x)))), x)
    kinds = [graph.nodes[0].kind for graph, _ in found]
    assert kinds == ["sdpa", "sdpa_backward"]
    assert [graph.inputs[0] for graph, _ in found] == ["qkv", "qkv"]
    assert found[1][0].outputs == ("grad_qkv",)


# --- what cuDNN gets ------------------------------------------------------------------


def _lowered(function: Callable[..., Any], *operands: Any) -> str:
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _both_directions(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: jax.Array, cotangent: jax.Array) -> Any:
        (output,), pull = jax.vjp(call, x)
        return output, pull((cotangent,))[0]

    return run


_IN_PLACE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "bias": {"bias": np.ones((2, 1, 5, 5), jnp.bfloat16)},
    "sinks": {"sinks": np.ones(1)},
}


@pytest.mark.usefixtures("without_rules")
@pytest.mark.parametrize("name", _IN_PLACE)
@pytest.mark.parametrize("layout", qkv.LAYOUTS)
def test_nothing_is_sliced_or_joined_around_the_kernels(layout: str, name: str) -> None:
    x = _draw(layout, jnp.bfloat16, d=8)
    options = dict(_IN_PLACE[name])
    if "sinks" in options:
        options["sinks"] = np.ones(4 if "3" in layout else 6, np.float32)
    call = functools.partial(_in_one, layout, **options)
    cotangent = jax.eval_shape(call, x)[0]
    text = _lowered(_both_directions(call), x, cotangent)
    kernels = re.findall(r"@jax_cudnn\.graph\w*\(([^)]*)\)", text)
    assert len(kernels) == 2
    if "bias" not in options:  # Rows far from 0 are beside the kernel.
        # The numbers of rows that sinks scale by have other axes than the output.
        words = ("slice", "concatenate", "transpose", "pad")
        for word in words if "sinks" not in options else ("slice", "concatenate"):
            assert f"stablehlo.{word}" not in text
    main = text[text.index("@main") :]
    reshaped = re.search(r"(%\d+) = stablehlo\.reshape %arg0 ", main)
    given = "%arg0" if reshaped is None else reshaped[1]
    for graph in re.findall(r'graph = "(\{.*?\})"', text):
        names = re.search(r"inputs\\22:\[(.*?)\]", graph)
        assert names is not None
        assert "qkv" in names[1]
        assert "query" not in names[1]
    if "bias" not in options:
        assert all(each.split(", ")[0] == given for each in kernels)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, {"d": 12}),
        ({"scale": -1.0}, {"d": 8}),
        ({"mask": masks.Packed.from_lengths(np.array([2, 3]))}, {"d": 8}),
    ],
    ids=["head_size", "scale", "packed"],
)
def test_what_a_kernel_takes_otherwise_is_copied(
    options: dict[str, Any], sizes: dict[str, int]
) -> None:
    x = _draw("bs3hd", jnp.bfloat16, **sizes)
    (graph, _), *_ = graphs(lambda x: qkv_sdpa(x, **options), x)
    for rewrite in legalize(graph, HOPPER).candidates:
        assert "qkv" not in rewrite.graph.inputs
        assert rewrite.notes[-1] == (
            "query, key and value are copied out of qkv: the kernel takes them in "
            "another form (padded, scaled or packed)"
        )


def test_dropout_leaves_the_array_as_it_is() -> None:
    x = _draw("bs3hd", jnp.bfloat16, d=8)
    found = graphs(functools.partial(qkv_sdpa, dropout_rate=0.5, dropout_key=_KEY), x)
    ((graph, _),) = found
    drawn, _, by_mask, _ = legalize(graph, HOPPER).candidates
    assert drawn.graph.inputs == ("qkv", "dropout_seed", "dropout_offset")
    assert by_mask.graph.inputs == ("qkv", "dropout_mask")


def _flash(graph: Graph, operands: Any) -> Any:
    """Return a kernel's results, which takes its operands out of the array itself."""
    if "qkv" not in graph.inputs:
        return flash(graph, operands)
    plain = with_parts(graph)
    given = dict(zip(graph.inputs, operands, strict=True))
    tensor = graph.tensor("qkv")
    letters = "".join("b3hsd"[axis] for axis in tensor.order)
    array = np.asarray(given.pop("qkv"))
    if tensor.dims[2] == 1 and tensor.dims[1] != 3:
        letters = letters.replace("h", "").replace("3", "h")
        array = array.reshape(
            [n for n, a in zip(array.shape, tensor.order, strict=True) if a != 2]
        )
    parts = qkv.apart(letters, array)
    for role, x in zip(("query", "key", "value"), parts, strict=True):
        given[role] = jnp.asarray(qkv.in_layout(letters, x))
    found = flash(plain, [given[name] for name in plain.inputs])
    named = dict(zip(plain.outputs, found, strict=True))
    if "grad_qkv" in graph.outputs:
        axes = ["bshd".index(x) for x in letters.replace("3", "")]
        back = np.argsort(axes)
        parts = [
            np.asarray(named[f"grad_{r}"]).transpose(back)
            for r in ("query", "key", "value")
        ]
        whole = qkv.together(letters, parts)
        named["grad_qkv"] = jnp.asarray(whole.reshape(tensor.stored_shape))
    return [named[name] for name in graph.outputs]


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("with_grad_stats", [False, True])
@pytest.mark.parametrize("d", [8, 6])
@pytest.mark.parametrize("extra", ["", "mask", "key_lengths", "bias"])
@pytest.mark.parametrize("layout", ["bs3hd", "sbh3d", "bhsd"])
def test_legal_graphs_keep_the_meaning(
    layout: str, extra: str, d: int, with_grad_stats: bool
) -> None:
    graph = qkv.graph_of(layout, extra, d=d)
    operands = draw_arrays(graph)
    outputs = evaluate(graph, operands)
    backward, given = gradient_of(graph, operands, outputs, stats=with_grad_stats)
    for each, arrays in ((graph, operands), (backward, given)):
        want = evaluate(each, arrays)
        candidates = legalize(each, HOPPER).candidates
        in_place = ["qkv" in rewrite.graph.inputs for rewrite in candidates]
        is_taken = d == 8 and not (each is backward and with_grad_stats)
        assert in_place.count(True) == (len(in_place) // 2 if is_taken else 0)
        for rewrite in candidates:
            with jax.disable_jit():
                got = rewrite.after(
                    arrays, _flash(rewrite.graph, rewrite.before(arrays))
                )
                if rewrite.fast_path is not None:
                    assert rewrite.fast_path.applies(arrays)
            assert_results_close(each, got, want, notes=rewrite.notes)


# --- graphs and messages --------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "heads", "text"),
    [
        ((2, 4, 1, 5, 8), 1, "4 parts are not 1 for queries and as many for keys as"),
        ((2, 7, 1, 5, 8), 3, "7 parts are not 3 for queries and as many for keys as"),
        ((2, 4, 3, 5, 8), 6, "4 parts of 3 heads; there are 3 parts, or parts of one"),
    ],
)
def test_parts_that_are_no_queries_keys_and_values_are_refused(
    dims: tuple[int, ...], heads: int, text: str
) -> None:
    tensor = Tensor(name="qkv", dtype="f32", dims=dims, order=(0, 3, 1, 2, 4))
    whole = qkv.graph_of("bs3hd")
    output = Tensor(
        name="output", dtype="f32", dims=(2, heads, 5, 8), order=(0, 2, 1, 3)
    )
    node = dataclasses.replace(whole.nodes[0], outputs=(("output", "output"),))
    with pytest.raises(GraphError, match=re.escape(text)):
        Graph(
            tensors=(tensor, output),
            nodes=(node,),
            inputs=("qkv",),
            outputs=("output",),
        )


def test_a_bias_for_other_keys_is_refused() -> None:
    whole = qkv.graph_of("bs3hd", "bias")
    tensors = [
        dataclasses.replace(each, dims=(1, 4, 5, 6)) if each.name == "bias" else each
        for each in whole.tensors
    ]
    with pytest.raises(GraphError, match="bias is for 6 keys, but there are 5"):
        dataclasses.replace(whole, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("shape", "options", "kind", "text"),
    [
        (
            (2, 5, 3, 4, 8),
            {"layout": "b3shd"},
            ValueError,
            "qkv_sdpa: layout='b3shd' is not one of 'bs3hd', 'bsh3d', 'sb3hd', 'sbh3d'",
        ),
        (
            (2, 5, 12, 8),
            {"layout": "bsh3d"},
            ValueError,
            "qkv is f32[2,5,12,8], whose axis 2 is not 3, as the layout 'bsh3d' says",
        ),
        (
            (2, 5, 12),
            {},
            ValueError,
            "qkv is f32[2,5,12], which has 3 axes. In the layout 'bs3hd' it has 5, or 4"
            " without b.",
        ),
        (
            (2, 5, 3, 4, 8),
            {"key_value_heads": 2},
            ValueError,
            "key_value_heads=2, but in the layout 'bs3hd' there are as many as query "
            "heads, 4. With fewer, put the heads of query, key and value side by side, "
            "in the layout 'bshd'.",
        ),
        (
            (2, 5, 10, 8),
            {"layout": "bshd"},
            ValueError,
            "qkv is f32[2,5,10,8] in the layout 'bshd', whose 10 heads are not three "
            "times as many. Pass key_value_heads",
        ),
        (
            (2, 5, 11, 8),
            {"layout": "bshd", "key_value_heads": 2},
            ValueError,
            "Of its 11 heads, key_value_heads=2 are of keys and as many of values, "
            "which leaves 7 for queries. These must be a multiple of key_value_heads.",
        ),
        (
            (2, 5, 10, 8),
            {"layout": "bshd", "key_value_heads": 2.0},
            TypeError,
            "key_value_heads is float. It must be an int known when the program is",
        ),
        (
            (2, 5, 3, 4, 8),
            {"bias": np.zeros((3, 5), np.float32)},
            ValueError,
            "qkv_sdpa: bias is f32[3,5], which does not broadcast to (batch, heads, ",
        ),
        (
            (2, 5, 3, 4, 8),
            {"is_causal": 1},
            TypeError,
            "qkv_sdpa: is_causal is int. It must be True or False",
        ),
    ],
)
def test_bad_arguments_are_refused(
    shape: tuple[int, ...], options: dict[str, Any], kind: Any, text: str
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        qkv_sdpa(jnp.zeros(shape), **options)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"qkv_sdpa: qkv is i32\[2,5,3,4,8\]"):
        qkv_sdpa(jnp.zeros((2, 5, 3, 4, 8), jnp.int32))
    assert math.isclose(float(jnp.sum(qkv_sdpa(jnp.ones((1, 2, 3, 1, 8))))), 16.0)
