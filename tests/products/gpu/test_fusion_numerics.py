# SPDX-License-Identifier: Apache-2.0
"""Tests the accuracy of random convolutions and matmuls through cuDNN.

Each item runs a few random problems, forward and (every other one) with the gradients
of all float operands. Results are judged against f32 truth from jax.lax, by the error
of `implementation="xla"`, which multiplies in the same dtype. In two cases XLA's error
alone is too strict a measure, and a second reference has the error of the hardware:

* cuDNN multiplies f32 in TF32, while XLA may use more bits (for small products, and for
  convolutions for which it picks another kernel). The second reference reads operands
  as TF32.
* Hopper's f8 tensor cores keep 14 bits of a sum (DeepSeek-V3 technical report,
  arXiv:2412.19437, section 3.5.2), so that a result in f16 or f32 is no more exact than
  one in bf16. The second reference is the truth rounded to bf16.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn.config import Implementation
from tests.common.gpu.numerics import judge, worse
from tests.common.gpu.versions import REFUSED_BY_VERSION
from tests.products.shared.fusion_problems import (
    F8,
    Evaluated,
    Problem,
    eps_of,
    evaluate,
    exact_integers,
    run_call,
    unit_of,
)
from tests.products.shared.random_convs import conv_problem
from tests.products.shared.random_matmuls import dot_general_problem, matmul_problem

pytestmark = pytest.mark.gpu

_PROBLEMS = 7


@dataclass(frozen=True, kw_only=True)
class Group:
    """Problems of one sort: how one is drawn, how many items, what is required.

    ``least`` is how many problems of an item cuDNN must run as a whole, gradients
    included, with `implementation="cudnn"`. ``only_cudnn`` leaves out XLA, which has no
    kernels for these: the truth rounded to the result's dtype is the reference.
    """

    name: str
    items: int
    draw: Callable[..., Problem]
    least: int
    only_cudnn: bool = False


GROUPS = [
    Group(
        name="conv_1d",
        items=4,
        draw=functools.partial(conv_problem, spatial=1),
        least=5,
    ),
    Group(
        name="conv_2d",
        items=8,
        draw=functools.partial(conv_problem, spatial=2),
        least=5,
    ),
    Group(
        name="conv_3d",
        items=4,
        draw=functools.partial(conv_problem, spatial=3),
        least=5,
    ),
    Group(
        name="conv_layouts",
        items=4,
        draw=functools.partial(conv_problem, any_layout=True),
        least=5,
    ),
    Group(
        name="conv_strides_and_holes",
        items=4,
        draw=functools.partial(conv_problem, stretch=True),
        least=4,
    ),
    Group(
        name="conv_dilated_x",
        items=3,
        draw=functools.partial(conv_problem, transposed=True),
        least=3,
    ),
    Group(
        name="conv_feature_groups",
        items=4,
        draw=functools.partial(conv_problem, grouping="feature"),
        least=3,
    ),
    Group(
        name="conv_depthwise",
        items=3,
        draw=functools.partial(conv_problem, grouping="depthwise"),
        least=3,
    ),
    Group(
        name="conv_batch_groups",
        items=1,
        draw=functools.partial(conv_problem, grouping="batch"),
        least=2,
    ),
    Group(
        name="conv_8_bit",
        items=2,
        draw=functools.partial(conv_problem, dtypes=("int8", *F8[:1])),
        least=0,
        only_cudnn=True,
    ),
    Group(
        name="matmul_aligned",
        items=3,
        draw=functools.partial(matmul_problem, sizes="aligned"),
        least=6,
    ),
    Group(
        name="matmul_unaligned",
        items=3,
        draw=functools.partial(matmul_problem, sizes="unaligned"),
        least=5,
    ),
    Group(
        name="matmul_large",
        items=2,
        draw=functools.partial(matmul_problem, sizes="large"),
        least=5,
    ),
    Group(
        name="matmul_batched",
        items=3,
        draw=functools.partial(matmul_problem, batched=True),
        least=5,
    ),
    Group(
        name="matmul_weight_only",
        items=4,
        draw=functools.partial(matmul_problem, kind="weight_only"),
        least=3,
    ),
    Group(
        name="matmul_int8",
        items=3,
        draw=functools.partial(matmul_problem, kind="int8"),
        least=1,
    ),
    Group(
        name="matmul_f8",
        items=3,
        draw=functools.partial(matmul_problem, kind="f8"),
        least=1,
    ),
    Group(name="dot_general", items=5, draw=dot_general_problem, least=5),
]
ITEMS = [(group, i) for group in GROUPS for i in range(group.items)]


def problems(group: Group, item: int) -> list[Problem]:
    """Return the problems of an item, every other one with gradients."""
    is_forward = group.only_cudnn
    return [
        group.draw(seed, group.name, with_gradients=bool(i % 2) and not is_forward)
        for i, seed in enumerate(range(_PROBLEMS * item, _PROBLEMS * (item + 1)))
    ]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the results of one problem are judged by."""

    truth: Evaluated
    references: list[tuple[Any, dict[str, Any]]]
    unit: float


def bounds_of(problem: Problem, *, only_cudnn: bool = False) -> Bounds:
    """Return truth and references of a problem."""
    truth = evaluate(problem)
    references: list[tuple[Any, dict[str, Any]]] = []
    if not only_cudnn:
        references.append(run_call(problem, "xla", truth.cotangent))
    if problem.wide == "float32":
        tf32 = evaluate(replace(problem, cotangent=truth.cotangent), tf32=True)
        references.append((tf32.output, tf32.gradients))
    if problem.wide is None and problem.out_dtype != "int32":
        # Also where the sums of integers are exact: XLA is no judge of its own.
        has_f8 = any(str(problem.arrays[side].dtype) in F8 for side in problem.sides)
        coarse = jnp.bfloat16 if has_f8 else jnp.dtype(problem.out_dtype)
        references.append(_rounded(truth, coarse))
    return Bounds(truth=truth, references=references, unit=unit_of(problem))


def _rounded(truth: Evaluated, dtype: Any) -> tuple[Any, dict[str, Any]]:
    return (
        jnp.asarray(truth.output, dtype),
        {name: jnp.asarray(grad, dtype) for name, grad in truth.gradients.items()},
    )


def judge_problem(
    problem: Problem, bounds: Bounds, implementation: Implementation
) -> float:
    """Run the call and assert the bounds; return the largest ratio of errors."""
    truth = bounds.truth
    output, gradients = run_call(problem, implementation, truth.cotangent)
    if problem.out_dtype == "int32":
        np.testing.assert_array_equal(np.asarray(output), exact_integers(problem))
        return 0.0
    assert output.dtype == jnp.dtype(problem.out_dtype)
    assert gradients.keys() == truth.gradients.keys()
    truths = [truth.output, *truth.gradients.values()]
    noises: list[Any] = [0.0]
    for name in truth.gradients:
        # Rounding errors, of random sign, of the terms that a gradient sums, or of the
        # one term in the call's dtype that a gradient in a wider dtype is made of.
        operand = problem.operands[name]
        is_sum = operand.aligned != operand.full
        is_wider = eps_of(str(operand.array.dtype)) < eps_of(problem.out_dtype)
        noises.append(bounds.unit * truth.norms[name] if is_sum or is_wider else 0.0)
    every = [
        [reference[0], *(reference[1][name] for name in truth.gradients)]
        for reference in bounds.references
    ]
    references = [
        worse(list(candidates), value)
        for *candidates, value in zip(*every, truths, strict=True)
    ]
    results = [output, *(gradients[name] for name in truth.gradients)]
    names = ["output", *(f"grad_{name}" for name in truth.gradients)]
    return max(judge(names, results, references, truths, noises).values())


@pytest.mark.parametrize(
    ("group", "item"), ITEMS, ids=[f"{group.name}_{item}" for group, item in ITEMS]
)
def test_random_problems_match_f32_truth(
    group: Group, item: int, record_property: Callable[[str, object], None]
) -> None:
    refused: list[str] = []
    errors: list[Exception] = []
    ratios = {"auto": 0.0, "cudnn": 0.0}
    for problem in problems(group, item):
        try:
            bounds = bounds_of(problem, only_cudnn=group.only_cudnn)
            if not group.only_cudnn:
                ratio = judge_problem(problem, bounds, "auto")
                ratios["auto"] = max(ratios["auto"], ratio)
        except Exception as error:
            errors.append(_named(error, problem, "auto"))
            continue
        try:
            ratio = judge_problem(problem, bounds, "cudnn")
            ratios["cudnn"] = max(ratios["cudnn"], ratio)
        except jax_cudnn.UnsupportedError as error:
            refused.append(f"{problem.text}\n{error}")
        except Exception as error:
            errors.append(_named(error, problem, "cudnn"))
    for name, ratio in ratios.items():
        record_property(f"error ratio of {name}", f"{ratio:.2f}")
    record_property("run with cuDNN", f"{_PROBLEMS - len(refused)} of {_PROBLEMS}")
    if errors:
        raise ExceptionGroup(f"{len(errors)} problems of {group.name}", errors)
    # Refused because this version is wrong: it has such limits alone that end.
    of_version = sum(REFUSED_BY_VERSION in each for each in refused)
    counted = len(refused) - of_version
    assert _PROBLEMS - counted >= group.least, "\n\n".join(refused)


def _named(error: Exception, problem: Problem, implementation: str) -> Exception:
    error.add_note(f'implementation="{implementation}": {problem.text}')
    if problem.with_gradients:
        error.add_note("with gradients")
    return error
