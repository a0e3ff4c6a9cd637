# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN's kernels read and write layouts, and fused q, k and v, in place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import plans, qkv_sdpa, sdpa
from tests.common.gpu.numerics import judge, to_f32

pytestmark = pytest.mark.gpu

_B, _S, _D = 3, 256, 64
_OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (37, 0)},
    "lengths": {"key_value_seq_lengths": np.array([256, 77, 1])},
    "dropout": {"dropout_rate": 0.5, "dropout_key": jax.random.key(5)},
    "mask": {"mask": np.random.default_rng(1).random((_B, 1, _S, _S)) < 0.8},
}
_QKV = {
    **{layout: {} for layout in ("bs3hd", "bsh3d", "sb3hd", "sbh3d", "b3hsd")},
    **{layout: {"key_value_heads": 2} for layout in ("bshd", "sbhd", "bhsd")},
}


def _draw(seed, shape, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def _qkv(layout, dtype=jnp.bfloat16, **sizes):
    # 6 query heads; beside 2 of keys and of values in one axis.
    own = {"b": _B, "s": _S, "h": 6 if "3" in layout else 10, "d": _D, "3": 3, **sizes}
    return _draw(len(layout), [own[letter] for letter in layout], dtype)


def _apart(layout, x):
    """Return q, k and v of an array in a layout, as (b, s, h, d)."""
    axes = [layout.index(letter) for letter in "bshd"]
    if "3" in layout:
        whole = x.transpose([layout.index("3"), *axes])
        return whole[0], whole[1], whole[2]
    whole = x.transpose(axes)
    return whole[:, :, :6], whole[:, :, 6:8], whole[:, :, 8:]


def _from_bshd(layout, x):
    return x.transpose(["bshd".index(letter) for letter in layout.replace("3", "")])


def _with_gradient(call):
    def run(cotangent, *operands):
        output, pull = jax.vjp(call, *operands)
        return output, *pull(cotangent.astype(output.dtype))

    return jax.jit(run)


def _judged(call, operands, record_property):
    """Compare a call with its f32 truth; return its results."""
    output = jax.eval_shape(functools.partial(call, implementation="xla"), *operands)
    cotangent = _draw(9, output.shape)
    results, references = (
        _with_gradient(functools.partial(call, implementation=each))(
            cotangent, *operands
        )
        for each in ("cudnn", "xla")
    )
    with jax.default_matmul_precision("highest"):
        truths = _with_gradient(functools.partial(call, implementation="xla"))(
            *map(to_f32, (cotangent, *operands))
        )
    names = ("output", "gradient 0", "gradient 1", "gradient 2")[: len(results)]
    for name, ratio in judge(names, results, references, truths).items():
        record_property(f"error ratio of {name}", f"{ratio:.2f}")
    return cotangent, results


def _assert_near(got, want):
    """Kernels that add up in another order differ by rounding only."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    error = np.linalg.norm(got - want)
    assert error <= 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.linalg.norm(want)


@pytest.mark.parametrize("name", _OPTIONS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_every_layout_gives_the_results_of_bshd(layout, name, record_property):
    shapes = ((_B, _S, 6, _D), (_B, _S, 2, _D), (_B, _S, 2, 96))
    plain = [_draw(i, shape) for i, shape in enumerate(shapes)]
    operands = [_from_bshd(layout, x) for x in plain]
    call = functools.partial(sdpa, **_OPTIONS[name], layout=layout)
    cotangent, results = _judged(call, operands, record_property)
    back = [layout.index(letter) for letter in "bshd"]
    call = functools.partial(sdpa, **_OPTIONS[name], implementation="cudnn")
    want = _with_gradient(call)(cotangent.transpose(back), *plain)
    for x, y in zip(results, want, strict=True):
        _assert_near(x.transpose(back), y)


@pytest.mark.parametrize("name", _OPTIONS)
@pytest.mark.parametrize("layout", _QKV)
def test_one_array_gives_the_results_of_its_parts(layout, name, record_property):
    x = _qkv(layout)
    call = functools.partial(qkv_sdpa, layout=layout, **_QKV[layout], **_OPTIONS[name])
    cotangent, results = _judged(call, [x], record_property)

    def by_parts(x):
        parts = _apart(layout, x)
        output = sdpa(*parts, **_OPTIONS[name], implementation="cudnn")
        return _from_bshd(layout, output)

    for got, want in zip(results, _with_gradient(by_parts)(cotangent, x), strict=True):
        _assert_near(got, want)


@pytest.mark.parametrize("d", [8, 40, 72, 128, 256])
@pytest.mark.parametrize("s", [65, 200])
@pytest.mark.parametrize("layout", ["bs3hd", "bsh3d", "bshd"])
def test_odd_lengths_and_other_head_sizes(layout, s, d, record_property):
    call = functools.partial(qkv_sdpa, layout=layout, **_QKV[layout], is_causal=True)
    _judged(call, [_qkv(layout, s=s, d=d, dtype=jnp.float16)], record_property)


@pytest.mark.parametrize("layout", ["bs3hd", "bshd"])
def test_a_bias_has_its_gradient(layout, record_property):
    x, bias = _qkv(layout), _draw(4, (1, 6, _S, _S))

    def call(x, bias, implementation):
        return qkv_sdpa(
            x, bias, layout=layout, **_QKV[layout], implementation=implementation
        )

    _judged(call, [x, bias], record_property)


def test_rows_that_a_bias_moves_far_have_their_gradient(record_property):
    x, bias = _qkv("bs3hd", s=64), _draw(4, (1, 6, 64, 64), jnp.float32)
    bias = bias.at[:, :, ::5].add(-1e9)

    def call(x, implementation):
        return qkv_sdpa(x, bias, implementation=implementation)

    _judged(call, [x], record_property)


def _moving(text):
    """Return what a compiled program does to bf16 arrays outside of kernels."""
    words = "copy|transpose|fusion|slice|dynamic-slice|concatenate|pad|reshape"
    return re.findall(rf"= \(?bf16\[[^=\n]*? (?:{words})\(.*", text)


def test_no_array_is_moved_around_the_kernels():
    calls = {
        layout: (
            functools.partial(qkv_sdpa, layout=layout, **given),
            [_qkv(layout)],
        )
        for layout, given in _QKV.items()
    }
    for layout in ("bshd", "bhsd", "sbhd"):
        operands = [_from_bshd(layout, _draw(i, (_B, _S, 4, _D))) for i in range(3)]
        calls[f"{layout} apart"] = functools.partial(sdpa, layout=layout), operands
    for name, (call, operands) in calls.items():
        call = functools.partial(call, is_causal=True, implementation="cudnn")
        cotangent = jnp.ones_like(jax.eval_shape(call, *operands))
        lowered = _with_gradient(call).lower(cotangent, *operands)
        text = lowered.compile().as_text()
        assert text.count('custom_call_target="jax_cudnn.graph"') == 2, name
        assert not _moving(text), (name, _moving(text))


def test_slices_and_transposes_show_what_that_test_looks_for():
    def sliced(x):
        return sdpa(*_apart("bs3hd", x), implementation="cudnn")

    x = _qkv("bs3hd")
    cotangent = jnp.ones((_B, _S, 6, _D), jnp.bfloat16)
    assert _moving(_with_gradient(sliced).lower(cotangent, x).compile().as_text())


def test_the_gradient_needs_no_more_memory_than_its_workspace():
    def bytes_of(call):
        x = _qkv("bs3hd", s=2048)
        cotangent = jnp.ones((_B, 2048, 6, _D), jnp.bfloat16)
        compiled = _with_gradient(call).lower(cotangent, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes, x.nbytes

    in_place, size = bytes_of(functools.partial(qkv_sdpa, implementation="cudnn"))
    copied, _ = bytes_of(lambda x: sdpa(*_apart("bs3hd", x), implementation="cudnn"))
    # The copies of q, k and v, and their gradients before they are put together.
    assert copied - in_place >= size // 2


def test_inspect_says_what_is_copied():
    def reasons(x, **options):
        call = functools.partial(qkv_sdpa, implementation="cudnn", **options)
        return [why for each in plans.inspect(call, x).calls for why in each.reasons]

    assert not reasons(_qkv("bs3hd"))
    assert "copied out of qkv" in " ".join(reasons(_qkv("bs3hd", d=20)))


def test_results_repeat_bit_by_bit_and_do_not_depend_on_the_other_parts():
    x = _qkv("bs3hd")
    run = jax.jit(functools.partial(qkv_sdpa, is_causal=True, implementation="cudnn"))
    first = np.asarray(run(x)).view(np.uint16)
    assert np.array_equal(first, np.asarray(run(x)).view(np.uint16))
    # The last token is no other's key.
    changed = x.at[:, -1, 1:].set(3)
    second = np.asarray(run(changed)).view(np.uint16)
    assert np.array_equal(first[:, :-1], second[:, :-1])
