# SPDX-License-Identifier: Apache-2.0
"""Tests convolutions in groups on a GPU, in every way of rewriting them.

They have several channels a group, or are depthwise. Each way is run by each of
cuDNN's plans.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import native, plans
from jax_cudnn.config import Options
from jax_cudnn.lowering.decision import decide_part
from jax_cudnn.lowering.devices import LocalGpu, local_target
from jax_cudnn.policy import ranked
from jax_cudnn.policy.tables import tables_for
from tests.common.gpu.pinned import judge_every_plan
from tests.fusing.functions import normal
from tests.products.gpu.conv_parts import conv_parts

pytestmark = pytest.mark.gpu

_DEPTHWISE = {
    "windows of 3": ((2, 13, 14, 24), (3, 3), {"padding": "SAME"}),
    "windows of 7": ((2, 13, 14, 24), (7, 7), {"padding": "VALID"}),
    "steps of 2": (
        (2, 18, 17, 24),
        (5, 5),
        {"padding": "SAME", "window_strides": (2, 2)},
    ),
    "holes": ((2, 15, 14, 24), (3, 3), {"padding": "SAME", "rhs_dilation": (2, 2)}),
    "unequal": ((2, 13, 14, 24), (2, 5), {"padding": "SAME"}),
    "large": ((2, 20, 19, 24), (9, 9), {"padding": "SAME"}),
    "causal": ((3, 70, 32), (4,), {"padding": ((3, 0),)}),
    "one axis": ((3, 70, 32), (31,), {"padding": "SAME"}),
    "one axis, holes": ((3, 70, 32), (3,), {"padding": "SAME", "rhs_dilation": (4,)}),
    "three axes": ((2, 7, 8, 9, 16), (3, 3, 3), {"padding": "SAME"}),
}
_LOAD = 16  # bytes
_KINDS = ("conv_fprop", "conv_dgrad", "conv_wgrad")


@pytest.mark.parametrize(
    ("name", "dtype", "activation"),
    [
        *((name, "bfloat16", None) for name in _DEPTHWISE),
        ("windows of 3", "float16", None),
        ("causal", "float16", None),
        ("holes", "float16", None),
        ("windows of 7", "bfloat16", "silu"),
        ("causal", "bfloat16", "silu"),
        ("steps of 2", "bfloat16", "relu"),
        ("windows of 3", "float16", "gelu"),
        ("three axes", "bfloat16", "silu"),
    ],
)
def test_depthwise(name: str, dtype: str, activation: Any) -> None:
    images, window, options = _DEPTHWISE[name]
    channels = images[-1]
    shapes: list[tuple[int, ...]] = [images, (*window, 1, channels)]
    shapes += [(channels,)] if activation else []
    parts = conv_parts(
        shapes, dtype, feature_group_count=channels, activation=activation, **options
    )
    if activation:
        *_, last = [way.rewrite for way in ranked(parts["conv_fprop"], None)]
        # What surrounds the convolution is in the kernel, and groups are kept.
        assert len(last.graph.nodes) > 1
        assert not any("are merged" in note for note in last.notes)
    # cuDNN 9.14 plans no activation in a depthwise kernel.
    is_old = native.device_target(0).cudnn_version < 91500
    for kind in ("conv_fprop",) if activation else _KINDS:
        is_few = (name, kind) == ("three axes", "conv_wgrad")
        fewest = 0 if activation and is_old else 1 if is_few else 2
        judge_every_plan(parts[kind], fewest=fewest)


# Images, window, groups, channels out, and options.
_GROUPS: dict[str, Any] = {
    "2 channels": ((2, 13, 14, 64), (3, 3), 32, 64, {}),
    "8 channels": ((2, 13, 14, 64), (3, 3), 8, 64, {}),
    "8 channels, steps of 2": (
        (2, 18, 17, 64), (3, 3), 8, 64, {"window_strides": (2, 2)},
    ),
    "16 channels": ((2, 13, 14, 128), (3, 3), 8, 128, {}),
    "16 channels, holes": ((2, 13, 14, 64), (3, 3), 4, 64, {"rhs_dilation": (2, 2)}),
    "24 channels": ((2, 13, 14, 120), (3, 3), 5, 120, {}),
    "40 channels": ((2, 7, 8, 400), (3, 3), 10, 400, {}),
    "40 channels, steps of 2": (
        (2, 18, 17, 240), (3, 3), 6, 240, {"window_strides": (2, 2)},
    ),
    "8 channels to 16": ((2, 7, 8, 256), (3, 3), 32, 512, {}),
    "24 channels to 8": ((2, 7, 8, 192), (3, 3), 8, 64, {}),
    "7 groups of 4": ((2, 13, 14, 28), (3, 3), 7, 28, {}),
    "windows of 1": ((2, 13, 14, 120), (1, 1), 5, 120, {}),
    "windows of 5": ((2, 13, 14, 120), (5, 5), 5, 120, {}),
    "one axis, 24 channels": ((3, 70, 240), (7,), 10, 240, {}),
    "three axes, 24 channels": ((2, 7, 8, 9, 48), (3, 3, 3), 2, 48, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "activation"),
    [
        *((name, "bfloat16", None) for name in _GROUPS),
        ("8 channels", "float16", None),
        ("40 channels", "float16", None),
        ("8 channels", "bfloat16", "relu"),
        ("24 channels", "bfloat16", "silu"),
        ("40 channels", "bfloat16", "gelu"),
    ],
)
def test_groups(name: str, dtype: str, activation: Any) -> None:
    images, window, groups, outer, options = _GROUPS[name]
    shapes = [images, (*window, images[-1] // groups, outer)]
    shapes += [(outer,)] if activation else []
    options = {"padding": "SAME", "feature_group_count": groups, **options}
    parts = conv_parts(shapes, dtype, activation=activation, **options)
    for kind in ("conv_fprop",) if activation else _KINDS:
        judge_every_plan(parts[kind])


def _dense(
    x: np.ndarray,
    w: np.ndarray,
    cotangent: np.ndarray,
    groups: int,
    options: dict[str, Any],
) -> tuple[np.ndarray, ...]:
    """Return a convolution in groups and its gradients, an element of w at a time.

    XLA's own on a CPU multiplies other groups by zeros, and so spreads NaN.
    """
    window, sizes = w.shape[:-2], x.shape[1:-1]
    steps = options["window_strides"]
    holes = options.get("rhs_dilation", (1,) * len(window))
    padding = options["padding"]
    if isinstance(padding, str):
        reach = [
            hole * (size - 1) + 1 for hole, size in zip(holes, window, strict=True)
        ]
        padding = jax.lax.padtype_to_pads(sizes, reach, steps, padding)
    padded = np.pad(x, ((0, 0), *padding, (0, 0)))
    padded = padded.reshape(*padded.shape[:-1], groups, -1)
    given = cotangent.reshape(*cotangent.shape[:-1], groups, -1)
    result, by_x, by_w = np.zeros_like(given), np.zeros_like(padded), []
    for tap in np.ndindex(*window):
        seen = tuple(
            slice(hole * i, hole * i + step * (count - 1) + 1, step)
            for hole, i, step, count in zip(
                holes, tap, steps, cotangent.shape[1:-1], strict=True
            )
        )
        filters = w[tap].reshape(w.shape[-2], groups, -1)
        result += np.einsum("...gc,cgo->...go", padded[:, *seen], filters)
        by_x[:, *seen] += np.einsum("...go,cgo->...gc", given, filters)
        pairs = (
            each.reshape(-1, *each.shape[-2:]) for each in (padded[:, *seen], given)
        )
        by_w.append(np.einsum("ngc,ngo->cgo", *pairs))
    inner = tuple(
        slice(low, low + size) for (low, _), size in zip(padding, sizes, strict=True)
    )
    by_x = by_x.reshape(*by_x.shape[:-2], -1)
    return (
        result.reshape(cotangent.shape), by_x[:, *inner], np.reshape(by_w, w.shape)
    )  # fmt: skip


# Depthwise convolutions that cuDNN runs faster, all by its first plans, and gradients.
_FAST: dict[str, Any] = {
    "windows of 3": ((64, 28, 28, 192), 3, {}),
    "holes": ((64, 28, 28, 192), 3, {"rhs_dilation": (2, 2)}),
    "even windows": ((64, 28, 28, 192), 2, {"padding": "VALID"}),
    "windows of 13": ((32, 28, 28, 256), 13, {}),
    "three axes": ((2, 32, 32, 32, 64), 3, {}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", _FAST)
def test_auto_takes_depthwise_plans(name: str, dtype: str) -> None:
    local = local_target()
    assert local is not None
    ordinal, target = local
    if not tables_for(target).about("depthwise").is_of(target):
        pytest.skip("not measured with this GPU and cuDNN")
    gpu = LocalGpu(ordinal=ordinal, target=target)
    images, window, options = _FAST[name]
    shapes = [images, (*[window] * (len(images) - 2), 1, images[-1])]
    options = {"padding": "SAME", "feature_group_count": images[-1], **options}
    parts = conv_parts(shapes, dtype, **options)
    for kind in _KINDS:
        step = decide_part(parts[kind], gpu, Options())
        assert step.rewrite is not None, (kind, step.attempts)
        assert not step.attempts, "a later way"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [*_DEPTHWISE, *_GROUPS])
def test_by_auto(name: str, dtype: str) -> None:
    """As a user calls it, beside a dense one in f64, also with a NaN in x."""
    if name in _DEPTHWISE:
        images, window, options = _DEPTHWISE[name]
        groups = outer = images[-1]
    else:
        images, window, groups, outer, options = _GROUPS[name]
    letters = "DHW"[-(len(images) - 2) :]
    options = {"window_strides": (1,) * len(window), "padding": "SAME", **options}
    x = normal(0, *images).astype(dtype)
    w = normal(1, *window, images[-1] // groups, outer).astype(dtype)

    def layer(x: Any, w: Any) -> jax.Array:
        return jax_cudnn.conv(
            x,
            w,
            **options,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            feature_group_count=groups,
        )

    def all_of_it(cotangent: Any, x: Any, w: Any) -> Any:
        result, pullback = jax.vjp(layer, x, w)
        return result, *pullback(cotangent)

    cotangent = normal(2, *jax.eval_shape(layer, x, w).shape).astype(dtype)
    calls = plans.inspect(all_of_it, cotangent, x, w).calls
    # A NaN of x then is in all channels of a group. cuDNN's own kernels for groups that
    # fill one load or less multiply two at once.
    is_merged = any(
        "are merged" in why
        for call in calls
        for why in call.reasons
        if "conv_wgrad" not in call.op
    )
    is_merged |= groups < images[-1] and w.shape[-2] * w.dtype.itemsize <= _LOAD
    place = (1, *(size // 2 for size in images[1:-1]), 3)
    bound = {"float32": 1e-3, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
    for given in (x, x.at[place].set(jnp.nan)):
        found = jax.jit(all_of_it)(cotangent, given, w)
        a, b, c = (np.asarray(each, np.float64) for each in (given, w, cotangent))
        truth = _dense(a, b, c, groups, options)
        for i, (got, want) in enumerate(zip(found, truth, strict=True)):
            got = np.asarray(got, np.float64)
            if not is_merged or i > 0:  # No gradient needs what is NaN in x elsewhere.
                np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            keep = ~np.isnan(got)
            assert not np.isnan(want[keep]).any()
            error = np.linalg.norm(got[keep] - want[keep])
            assert error < bound * np.linalg.norm(want[keep])
