# SPDX-License-Identifier: Apache-2.0
"""Tests that every call that is planned without a GPU runs on one, and is right.

The calls are those of tests/products/shared/fusion_cases.py: each operation, dtype,
activation, bias, residual and scale, forward and with the gradient of each operand, and
various shapes and layouts. The results are compared with the same calls written in
jax.lax and jax.nn, in float64 on the CPU. scripts/gpu_report.py lists what was planned
and not launched.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import UnsupportedError, native
from jax_cudnn.graph import Graph, derivative_of, to_json
from jax_cudnn.lowering.cuda import run_cudnn
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.policy import ranked
from jax_cudnn.reference import evaluate
from jax_cudnn.reference.dtypes import jax_dtype
from tests.common.drawn_operands import draw_arrays
from tests.common.gpu.versions import REFUSED_BY_VERSION
from tests.products.shared import fusion_cases
from tests.products.shared.fused import graphs
from tests.products.shared.fusion_cases import ACTIVATIONS, Case
from tests.products.shared.plain_calls import kinks_of, plain_activation, plain_call

pytestmark = pytest.mark.gpu

# In units of eps of the coarsest dtype: what rounding the operands of each product, the
# saved argument of the activation and the result may do to an array by its norm. What
# is wrong is off by more.
_UNITS = 4
_MOST = 0.3
_ITEMS = 36
_PARTIAL_ITEMS = 8


def _draw(case: Case, rng: np.random.Generator) -> dict[str, jax.Array]:
    arrays: dict[str, jax.Array] = {}
    for name, shape in case.operands.items():
        if jnp.issubdtype(shape.dtype, jnp.integer):
            low = 0 if shape.dtype == jnp.uint8 else -5
            x = rng.integers(low, 6, shape.shape)
        else:
            x = 0.5 * rng.standard_normal(shape.shape)
        arrays[name] = jnp.asarray(x, shape.dtype)
    return arrays


def _bound(*dtypes: Any) -> float:
    """Return the relative error that results over these dtypes may have."""
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    coarsest = max((float(jnp.finfo(dtype).eps) for dtype in floats), default=0.0)
    # Products of f32 are TF32's, with the fraction of f16.
    return min(_MOST, _UNITS * max(coarsest, float(jnp.finfo(jnp.float16).eps)))


def _check(name: str, found: jax.Array, truth: np.ndarray, bound: float) -> None:
    found64 = np.asarray(found, np.float64)
    assert found64.shape == truth.shape, name
    error = float(np.linalg.norm(found64 - truth))
    size = float(np.linalg.norm(truth))
    assert error <= bound * size + 1e-6, f"{name}: {error:.3e} of {size:.3e}"


def _near_kinks(case: Case, arrays: Mapping[str, jax.Array]) -> np.ndarray:
    """Return where the activation's derivative may jump within rounding's reach."""
    activation = case.call.keywords.get("activation")  # type: ignore[attr-defined]
    kinks = kinks_of(activation)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = {k: jnp.asarray(np.asarray(x, np.float64)) for k, x in arrays.items()}
        argument = np.asarray(plain_call(case, activated=False)(**wide))
    reach = 0.02 * (np.std(argument) + np.abs(argument))
    return np.any([np.abs(argument - kink) < reach for kink in kinks], axis=0)


def _truth(
    case: Case, arrays: Mapping[str, jax.Array], cotangent: np.ndarray | None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = {k: jnp.asarray(np.asarray(x, np.float64)) for k, x in arrays.items()}
        moving = {k: wide.pop(k) for k in case.wanted}
        value, pullback = jax.vjp(lambda m: plain_call(case)(**wide, **m), moving)
        if cotangent is None:
            return np.asarray(value), {}
        (grads,) = pullback(jnp.asarray(cotangent, jnp.float64))
    return np.asarray(value), {k: np.asarray(x) for k, x in grads.items()}


def _run(case: Case, implementation: str, rng: np.random.Generator) -> None:
    """Run the call and its gradients, and compare them with the truth."""
    arrays = _draw(case, rng)

    def call(moving: dict[str, jax.Array], rest: dict[str, jax.Array]) -> jax.Array:
        return case.call(**moving, **rest, implementation=implementation)

    rest = {k: x for k, x in arrays.items() if k not in case.wanted}
    moving = {k: arrays[k] for k in case.wanted}
    dtypes = [x.dtype for x in arrays.values()]
    value = jax.jit(call)(moving, rest)
    bound = _bound(*dtypes, value.dtype)
    if not case.wanted:
        _check("output", value, _truth(case, arrays, None)[0], bound)
        return
    drawn = rng.standard_normal(value.shape)
    drawn = np.where(_near_kinks(case, arrays), 0, drawn)
    cotangent = jnp.asarray(drawn, value.dtype)

    def with_gradients(
        moving: dict[str, jax.Array], rest: dict[str, jax.Array], cotangent: jax.Array
    ) -> Any:
        output, pullback = jax.vjp(lambda moving: call(moving, rest), moving)
        return output, pullback(cotangent)[0]

    trained, grads = jax.jit(with_gradients)(moving, rest, cotangent)
    truth, expected = _truth(case, arrays, np.asarray(cotangent, np.float64))
    _check("output", value, truth, bound)
    _check("output in training", trained, truth, bound)
    for name, grad in grads.items():
        _check(f"gradient of {name}", grad, expected[name], bound)


def _refused(case: Case) -> set[str]:
    """Return the steps of a case that cuDNN has no plan for, as documented."""
    return {
        part.step
        for part in fusion_cases.parts(case)
        if part.step != "around" and fusion_cases.is_refused(part.graph, 90)
    }


@functools.cache
def _cases() -> tuple[list[Case], list[Case]]:
    """Return the cases that cuDNN runs as a whole, and the others."""
    is_partial = [bool(_refused(case)) for case in fusion_cases.ALL]
    pairs = list(zip(fusion_cases.ALL, is_partial, strict=True))
    return [c for c, partial in pairs if not partial], [c for c, p in pairs if p]


def _launch(case: Case, seed: int, record: Callable[[str, object], None]) -> str:
    """Run a case, by cuDNN as far as it is not refused; return what went wrong."""
    parts = [part for part in fusion_cases.parts(case) if part.step != "around"]
    refused = _refused(case)
    launched = {part.step for part in parts} - refused
    if "forward" in refused:
        launched.clear()
    for part in parts:
        record("planned", part.key)
        if part.step in refused:
            record("refused", part.key)
    # Graphs of convolutions name the operands x and w.
    steps = {n: f"grad_{ {'lhs': 'x', 'rhs': 'w'}.get(n, n) }" for n in case.wanted}
    taken = tuple(n for n in case.wanted if steps[n] not in refused)
    try:
        if refused:
            _run(case, "auto", np.random.default_rng(seed))
        if launched:
            rest = replace(case, wanted=taken) if refused else case
            _run(rest, "cudnn", np.random.default_rng(seed))
    except Exception as error:  # All of an item are to be heard of.
        if isinstance(error, UnsupportedError) and REFUSED_BY_VERSION in str(error):
            return ""
        return f"{case.name}: {type(error).__name__}: {error}"[:600]
    for part in parts:
        if part.step in launched:
            record("launched", part.key)
    return ""


@pytest.mark.parametrize("item", range(_ITEMS))
def test_every_planned_call_is_launched_and_right(
    item: int, record_property: Callable[[str, object], None]
) -> None:
    failures = [
        _launch(case, 1000 * item + number, record_property)
        for number, case in enumerate(_cases()[0][item::_ITEMS])
    ]
    assert not any(failures), "\n".join(filter(None, failures))


@pytest.mark.parametrize("item", range(_PARTIAL_ITEMS))
def test_calls_that_are_refused_in_part_are_launched_in_part(
    item: int, record_property: Callable[[str, object], None]
) -> None:
    failures = [
        _launch(case, 100_000 + 1000 * item + number, record_property)
        for number, case in enumerate(_cases()[1][item::_PARTIAL_ITEMS])
    ]
    assert not any(failures), "\n".join(filter(None, failures))


def _around() -> Iterator[fusion_cases.Part]:
    for case in fusion_cases.ALL:
        if case.row in ACTIVATIONS or case.row.startswith(("bias", "scale")):
            yield from (p for p in fusion_cases.parts(case) if p.step == "around")


@pytest.mark.parametrize("dtype", [*fusion_cases.FLOATS])
def test_sums_beside_activations_are_launched_and_right(
    dtype: str, record_property: Callable[[str, object], None]
) -> None:
    # Only tuning lets cuDNN run them: the rest of a gradient is XLA's by default.
    target = native.device_target(0)
    failures: list[str] = []
    launched = 0
    for number, part in enumerate(
        each for each in _around() if each.case.dtype == dtype
    ):
        operands = draw_arrays(part.graph, number)
        for rewrite in [way.rewrite for way in ranked(part.graph, target)]:
            record_property("planned", part.key)
            plan = native.plan(to_json(rewrite.graph))
            step = PartDecision(
                part=part.graph, rewrite=rewrite, plan=plan, target=target
            )
            found = jax.jit(lambda *xs, step=step: run_cudnn(step, *xs))(*operands)
            truth = _in_f64(part.graph, operands)
            try:
                for tensor, x, expected in zip(
                    part.graph.output_tensors, found, truth, strict=True
                ):
                    _check(tensor.name, x, expected, _bound(jax_dtype(tensor.dtype)))
            except AssertionError as error:
                failures.append(f"{part.key}: {error}")
            else:
                record_property("launched", part.key)
            launched += 1
    assert launched
    assert not failures, "\n".join(failures)


def _in_f64(graph: Graph, operands: Sequence[jax.Array]) -> list[np.ndarray]:
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jnp.asarray(np.asarray(x, np.float32)) for x in operands]
        found = evaluate(
            graph, [x.astype(o.dtype) for x, o in zip(arrays, operands, strict=True)]
        )
    return [np.asarray(x, np.float64) for x in found]


# --- special values -------------------------------------------------------------------

_LARGEST = float(np.finfo(np.float32).max)
_SPECIAL = np.array(
    [
        *(np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 6.0),
        *(sign * x for x in (_LARGEST, 6e4, 104.0, 89.0) for sign in (1, -1)),
        *(sign * x for x in (30.0, 17.0, 5.6, 5.4, 2.5, 1.0) for sign in (1, -1)),
        *(sign * x for x in (0.5, 0.1, 1e-3, 1e-5, 1e-8, 1e-11) for sign in (1, -1)),
    ],
    np.float32,
)
# What a subtraction from 1 leaves of the tail of an erf or a tanh.
_TAIL = 1e-6
_FUNCTIONS: dict[str, Any] = {
    **ACTIVATIONS,
    "clip": lambda x: jnp.clip(x, -1.0, 1.5),
    "softsign": lambda x: x / (1 + jnp.abs(x)),
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "hard_swish": jax.nn.hard_swish,
    "maximum of two": lambda x: jnp.maximum(x, 0.5 * x * jnp.abs(x)),
    # In no graph: applied to what the kernel gives.
    "rounded on its way": lambda x: jnp.tanh(jax.lax.reduce_precision(x, 8, 7)),
}


def _special_call(op: str, dtype: Any, activation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a call whose activation gets the bias, and its operands."""
    n = 48
    values = np.resize(_SPECIAL, n)
    with np.errstate(over="ignore"):  # f16 ends at 65504
        bias = jnp.asarray(values, dtype)
    options = {"activation": activation, "implementation": "cudnn"}
    if op == "matmul":
        operands = jnp.zeros((8, 64), dtype), jnp.zeros((64, n), dtype)
        residual = jnp.zeros((8, n), dtype)

        def call(residual: jax.Array, bias: jax.Array) -> jax.Array:
            return jax_cudnn.matmul(*operands, bias=bias, residual=residual, **options)

        return call, (residual, bias)
    images, filters = jnp.zeros((2, 4, 4, 32), dtype), jnp.zeros((3, 3, 32, n), dtype)
    dilation = (2, 2) if op == "transposed conv" else None
    padding = ((2, 1), (2, 1)) if dilation else "SAME"
    size = 8 if dilation else 4
    residual = jnp.zeros((2, size, size, n), dtype)

    def call(residual: jax.Array, bias: jax.Array) -> jax.Array:
        return jax_cudnn.conv(
            images,
            filters,
            (1, 1),
            padding,
            dilation,
            None,
            ("NHWC", "HWIO", "NHWC"),
            bias=bias,
            residual=residual,
            **options,
        )

    return call, (residual, bias)


def _with_slope(
    call: Callable[..., jax.Array],
    residual: jax.Array,
    bias: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    output, pullback = jax.vjp(lambda residual: call(residual, bias), residual)
    return call(residual, bias), output, pullback(cotangent)[0]


_SHARES = 4


@pytest.mark.parametrize("share", range(_SHARES))
@pytest.mark.parametrize("dtype", [*fusion_cases.FLOATS])
@pytest.mark.parametrize("op", ["transposed conv", "conv", "matmul"])
def test_special_values_pass_through_every_epilogue(
    op: str, dtype: str, share: int
) -> None:
    failures: list[str] = []
    for name, activation in [*_FUNCTIONS.items()][share::_SHARES]:
        call, (residual, bias) = _special_call(
            op, fusion_cases.FLOATS[dtype], activation
        )
        run = jax.jit(functools.partial(_with_slope, call))
        forward, trained, slope = run(residual, bias, jnp.ones_like(residual))
        function = plain_activation(activation)
        with jax.default_device(jax.devices("cpu")[0]):
            x = jnp.asarray(np.asarray(bias, np.float32))
            truth, pullback = jax.vjp(function, x)
            (slopes,) = pullback(jnp.ones_like(x))
            # What is saved for the gradient is rounded to the results' dtype.
            truths = [
                np.asarray(each.astype(bias.dtype), np.float32)
                for each in (truth, truth, slopes)
            ]
        for what, found, expected in zip(
            ("forward", "training", "slope"),
            (forward, trained, slope),
            truths,
            strict=True,
        ):
            rows = np.asarray(found, np.float32).reshape(-1, x.size)
            # TF32 and 16 bits do not enter: the sums are 0. The CPU takes denormals to
            # be 0, where a derivative may jump.
            is_denormal = (np.asarray(x) != 0) & (np.abs(x) < 1e-37)
            unit = float(jnp.finfo(bias.dtype).eps)
            tolerance = max(2 * unit, 1e-4) * np.abs(expected)
            tolerance += np.where(np.abs(x) >= 1, _TAIL, 1e-30)
            is_same = (rows == expected) | (np.isnan(rows) & np.isnan(expected))
            with np.errstate(invalid="ignore"):
                is_same |= np.abs(rows - expected) <= tolerance
            is_same |= is_denormal & (what == "slope") & np.isfinite(rows)
            for column in np.flatnonzero(~is_same.all(axis=0)):
                failures.append(
                    f"{name}, {what} at {float(x[column]):g}: "
                    f"{rows[:, column].min():g}, not {expected[column]:g}"
                )
    assert not failures, "\n".join(failures)


def _with_the_argument_as_a_result() -> Graph:
    """Return an f32 convolution with bias and tanh, the argument of which is a result.

    cuDNN 9.19 builds plans for it on an H200, and cannot launch them; legalisation
    keeps such graphs from it.
    """
    x, w = jnp.zeros((2, 8, 8, 8)), jnp.zeros((3, 3, 8, 16))

    def layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax_cudnn.conv(
            x, w, dimension_numbers=numbers, bias=bias, activation="tanh"
        )

    ((graph, _),) = graphs(layer, x, w, jnp.zeros(16))
    derivative = derivative_of(graph)
    assert derivative is not None
    return derivative.with_residuals(graph, (True, True, True))


def test_a_plan_that_cannot_be_launched_is_refused() -> None:
    graph = _with_the_argument_as_a_result()
    refused: list[str] = []
    for candidate in native.candidates(to_json(graph)):
        try:
            native.plan(to_json(graph), request=candidate.request)
        except jax_cudnn.UnsupportedError as error:
            refused.append(str(error))
    if native.cudnn_version().version == 91900:
        assert refused
    assert all("cannot be launched" in text or "build" in text for text in refused)
