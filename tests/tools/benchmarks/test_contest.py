# SPDX-License-Identifier: Apache-2.0
"""Tests of what a contest compares, and with which rival."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytestmark = pytest.mark.once


def test_a_wrong_gradient_of_a_loss_fails() -> None:
    from benchmarks.harness import contest

    @jax.custom_vjp
    def wrong(x: Any) -> Any:
        return jnp.sin(x)

    wrong.defvjp(lambda x: (jnp.sin(x), x), lambda x, grad: (2 * jnp.cos(x) * grad,))
    cell = contest.Cell(
        operation="sine",
        size="5 x 7",
        operands=(contest.Operand((5, 7), dtype="float32"),),
        rivals={"plain": contest.Way(function=jnp.sin)},
        ours=None,
        by_xla=wrong,
        has_loss=True,
    )
    settings = contest.Settings(
        with_torch=False, with_tuning=False, most_sets=2, rounds=1, round_ms=0.1
    )
    rows = contest.measure(cell, settings, {})
    found = {(row["what"], row["contender"]): row for row in rows}
    assert len(found) == len(rows) == 6
    for what in ("with gradients", "of a loss"):
        told = found[what, "jax_cudnn by xla"]["failure"]
        assert told.startswith("WrongError: gradients are wrong by 1.0e+00"), told
        assert found[what, "plain"]["errors"] == [0.0, 0.0]
    assert "failure" not in found["forward", "jax_cudnn by xla"]


def test_times_are_relative_to_the_rival_that_a_cell_names() -> None:
    from benchmarks.harness import contest, contest_report

    cell = contest.Cell(
        operation="sine",
        size="5 x 7",
        operands=(contest.Operand((5, 7)),),
        rivals={
            "slow": contest.Way(function=lambda x: jnp.sin(x + jnp.sin(x) * 0)),
            "other": contest.Way(function=jnp.cos, is_checked=False),
            "named": contest.Way(function=jnp.sin),
        },
        ours=None,
        has_gradients=False,
        baseline="named",
    )
    settings = contest.Settings(
        with_torch=False, with_tuning=False, most_sets=2, rounds=1, round_ms=0.1
    )
    rows = {row["contender"]: row for row in contest.measure(cell, settings, {})}
    assert list(rows) == ["slow", "other", "named"]
    assert rows["named"]["ratio"] == 1 != rows["slow"]["ratio"]
    # What computes something else is not compared.
    assert rows["other"]["errors"] == []
    assert len(rows["slow"]["errors"]) == 1
    page = contest_report.page_of((), name="sines", title="Sines")
    named = [{"GPU": "NVIDIA A7", **row} for row in rows.values()]
    text = page({"environment": {"GPU": "NVIDIA A7"}, "rows": named})
    assert re.search(r"\| other \|[^|]*\|[^|]*\|[^|]*\|  \|  \|\n", text)

    wrong = dataclasses.replace(
        cell, rivals={**cell.rivals, "named": contest.Way(function=jnp.cos)}
    )
    with pytest.raises(RuntimeError, match=r"^no rival ran forward: .'named': 'Wrong"):
        contest.measure(wrong, settings, {})


def test_gradients_of_a_loss_that_are_rounding_alone_do_not_count() -> None:
    """The sum of the squares of what is normed is the same for all x."""
    from benchmarks.harness import contest

    def normed(x: Any, scale: Any) -> Any:
        return jax.nn.standardize(x, 0) * scale[None]

    cell = contest.Cell(
        operation="norm",
        size="50 x 7",
        operands=(contest.Operand((50, 7)), contest.Operand((7,))),
        rivals={"plain": contest.Way(function=normed)},
        ours=None,
        has_loss=True,
    )
    settings = contest.Settings(
        with_torch=False, with_tuning=False, most_sets=2, rounds=1, round_ms=0.1
    )
    *_, row = contest.measure(cell, settings, {})
    assert row["what"] == "of a loss"
    assert max(row["errors"]) < 0.03
