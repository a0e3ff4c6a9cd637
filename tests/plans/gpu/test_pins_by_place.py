# SPDX-License-Identifier: Apache-2.0
"""Tests choices of plans that have no other name than their place in the list.

cuDNN has kernels for convolutions whose knobs cudnn-frontend cannot name. The truth is
that of jax.lax, in float64 on the CPU.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
from jax_cudnn import choices, native, plans
from jax_cudnn.choices import Choice, digest_of, key_of
from jax_cudnn.graph import to_json
from jax_cudnn.lowering.devices import local_target
from tests.common.gpu.numerics import judge

pytestmark = pytest.mark.gpu

_NUMBERS = ("NHWC", "HWIO", "NHWC")
_IMAGES, _FILTERS = (8, 28, 28, 64), (3, 3, 64, 64)
_RESULTS = (*_IMAGES[:-1], _FILTERS[-1])


@pytest.fixture(autouse=True)
def own_choices() -> Iterator[None]:
    """Give each test a table of its own."""
    before = choices.table().all()
    choices.table().clear()
    yield
    choices.table().clear()
    choices.table().add(before)


def _ours(x: jax.Array, w: jax.Array, implementation: Any = "auto") -> jax.Array:
    return jax_cudnn.conv(
        x, w, (1, 1), "SAME", dimension_numbers=_NUMBERS, implementation=implementation
    )


def _plain(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=_NUMBERS
    )


_Layer = Callable[[jax.Array, jax.Array], jax.Array]


def _gradients(layer: _Layer, x: Any, w: Any, dy: Any) -> tuple[jax.Array, ...]:
    y, pullback = jax.vjp(layer, x, w)
    return y, *pullback(dy)


def _per_example(layer: _Layer, x: Any, w: Any, dy: Any) -> tuple[jax.Array, ...]:
    """Return the results for several images, and filters and a cotangent for all."""
    one = functools.partial(_gradients, layer)
    return jax.vmap(one, in_axes=(0, None, None))(x, w, dy)


def _per_filter(layer: _Layer, x: Any, w: Any, dy: Any) -> tuple[jax.Array, ...]:
    """Return the results for several filters and cotangents, and the same images."""
    one = functools.partial(_gradients, layer)
    return jax.vmap(one, in_axes=(None, 0, 0))(x, w, dy)


# Shapes of images, filters and cotangents.
_PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "gradients": (_gradients, (_IMAGES, _FILTERS, _RESULTS)),
    "an example each": (_per_example, ((3, *_IMAGES), _FILTERS, _RESULTS)),
    "a filter each": (_per_filter, (_IMAGES, (3, *_FILTERS), (3, *_RESULTS))),
}


def _drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    # Such numbers have no more digits than bf16.
    return [np.round(8 * rng.standard_normal(s)).clip(-32, 32) / 8 for s in shapes]


def _choose(nth: int, program: Callable[..., Any], *args: Any) -> list[str]:
    """Choose plans that only their places name, for kernels of a program that have any.

    Each gets the first one, or the last; returned is what they are asked for by.
    """
    local = local_target()
    assert local is not None
    ordinal, target = local
    chosen: list[str] = []
    # All of its kernels, also those that are XLA's without a choice.
    layer = functools.partial(_ours, implementation="cudnn")
    for call in plans.inspect(functools.partial(program, layer), *args).calls:
        if call.part is None or call.graph is None:
            continue
        named = [
            each.request
            for each in native.candidates(to_json(call.graph), device=ordinal)
            if native.is_by_place(each.request) and not each.refusal
        ]
        if named:
            choice = Choice(
                op=call.op,
                operands=call.shapes,
                implementation="cudnn",
                plan=named[nth],
                rewritten=digest_of(call.graph),
            )
            choices.table().add({key_of(call.part, target): choice})
            chosen.append(named[nth])
    if not chosen:
        pytest.skip("this cuDNN can name all plans for this GPU")
    return chosen


def _are_tuned(chosen: list[str], function: Callable[..., Any], *args: Any) -> bool:
    calls = plans.inspect(function, *args).calls
    tuned = [call.request for call in calls if call.why == "tuned"]
    return sorted(tuned) == sorted(chosen)


def _truth(
    program: Callable[..., Any], arrays: list[np.ndarray], dtype: Any
) -> tuple[list[jax.Array], list[np.ndarray]]:
    """Return what XLA computes in a dtype, and in float64."""
    plain = jax.jit(functools.partial(program, _plain))
    own = plain(*(jnp.asarray(x, dtype) for x in arrays))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        truth = plain(*(jnp.asarray(x, jnp.float64) for x in arrays))
        return list(own), [np.asarray(x) for x in truth]


def _choose_and_judge(
    nth: int,
    program: Callable[..., Any],
    arrays: list[np.ndarray],
    operands: list[jax.Array],
) -> None:
    ours = functools.partial(program, _ours)
    chosen = _choose(nth, program, *operands)
    assert _are_tuned(chosen, ours, *operands)
    found = jax.jit(ours)(*operands)
    own, truth = _truth(program, arrays, operands[0].dtype)
    judge(("y", "dx", "dw"), found, own, truth)


@pytest.mark.parametrize("nth", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_program_runs_by_them_and_is_right(name: str, dtype: str, nth: int) -> None:
    program, shapes = _PROGRAMS[name]
    arrays = _drawn(*shapes)
    operands = [jnp.asarray(x, dtype) for x in arrays]
    _choose_and_judge(nth, program, arrays, operands)


@pytest.mark.parametrize("nth", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_where_it_belongs(value: float, nth: int) -> None:
    arrays = _drawn(_IMAGES, _FILTERS, _RESULTS)
    arrays[0][3, 5, 6, 7] = value
    arrays[2][2, 9, 8, 1] = value
    operands = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    _choose_and_judge(nth, _gradients, arrays, operands)


@pytest.mark.parametrize("nth", [0, -1], ids=["first", "last"])
def test_a_sharded_program_runs_by_them(nth: int) -> None:
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    arrays = _drawn(_IMAGES, _FILTERS, _RESULTS)
    shardings = [NamedSharding(mesh, spec) for spec in (P("data"), P(), P("data"))]
    operands = [
        jax.device_put(jnp.asarray(x, jnp.bfloat16), sharding)
        for x, sharding in zip(arrays, shardings, strict=True)
    ]
    _choose_and_judge(nth, _gradients, arrays, operands)
