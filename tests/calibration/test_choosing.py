# SPDX-License-Identifier: Apache-2.0
"""Tests that what is measured next is what least is known of."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from jax_cudnn.calibration import choosing
from jax_cudnn.calibration.choosing import Chooser, drawn
from jax_cudnn.policy.nearest import Kernel, family_of
from tests.calibration.shared import H100, folder, kernel, row

__all__ = ["folder"]

pytestmark = pytest.mark.once


class _Candidate(NamedTuple):
    """Stands for a kernel that was drawn."""

    name: tuple[str, str]
    kernel: Kernel


def _candidates(*kernels: Kernel) -> list[Any]:
    return [
        _Candidate(("made up", f"bf16[{number}]"), each)
        for number, each in enumerate(kernels)
    ]


def _chooser(candidates: Iterable[Any], *rows: dict[str, Any]) -> Chooser:
    return Chooser(iter(candidates), rows)


_SIZES = [kernel(rows=2**i) for i in range(4, 16)]


def test_no_kernel_is_taken_twice() -> None:
    twice = [*_candidates(*_SIZES), *_candidates(*_SIZES)]
    chooser = _chooser(twice)
    names = [each.name for _ in range(5) for each in chooser.take(3)]
    assert len(names) == len(set(names)) == len(_SIZES)
    assert chooser.take(3) == []


def test_families_of_which_nothing_is_known_come_first() -> None:
    others = [kernel("conv_wgrad, f32, alone"), kernel("rms_norm, bf16")]
    chooser = _chooser(_candidates(*_SIZES, *others), row(_SIZES[3], 0.5, 100))
    first = {each.kernel.name for each in chooser.take(2)}
    assert first == {each.name for each in others}


def test_sizes_far_from_those_that_are_known_come_first() -> None:
    chooser = _chooser(_candidates(*_SIZES), row(_SIZES[0], 0.5, 100))
    (first,) = chooser.take(1)
    assert first.kernel == _SIZES[-1]
    # What was taken counts as known before it is measured.
    (second,) = chooser.take(1)
    assert second.kernel in _SIZES[5:8]


@pytest.mark.parametrize("is_first_close", [False, True])
def test_close_ratios_ask_for_more_kernels_like_them(is_first_close: bool) -> None:
    """Of two kernels alike far from others, the one beside a close call comes first."""
    near, far = kernel(rows=2**5), kernel(rows=2**15)
    ratios = (1.0, 0.2) if is_first_close else (0.2, 1.0)
    rows = [row(near, ratios[0], 100), row(far, ratios[1], 101)]
    (first,) = _chooser(_candidates(near, far), *rows).take(1)
    assert first.kernel == (near if is_first_close else far)


def test_what_was_measured_before_is_not_taken_again() -> None:
    candidates = _candidates(*_SIZES)
    chooser = _chooser(candidates, *(row(_SIZES[i], 0.5, i) for i in range(10)))
    assert {each.name for each in chooser.take(12)} == {x.name for x in candidates[10:]}


def test_no_more_are_drawn_than_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_AT_HAND", 4)
    drawn_so_far: list[Any] = []

    def counted() -> Iterator[Any]:
        for each in _candidates(*_SIZES):
            drawn_so_far.append(each)
            yield each

    chooser = _chooser(counted())
    chooser.take(2)
    assert len(drawn_so_far) == 5


def test_calls_of_all_families_are_drawn_the_same_in_every_run() -> None:
    def first(count: int) -> list[tuple[str, str]]:
        found = itertools.islice(drawn(H100, lambda _: True), count)
        return [each.name for each in found]

    names = first(12)
    assert len(set(names)) == 12
    assert names == first(12)
    titles = Counter[str]()
    for number, draw in enumerate([*choosing._DRAWN] * 30):
        titles[draw(number).name.split("+")[0].split()[0]] += 1
    for each in (
        *("matmul", "gated", "MLP", "conv", "sdpa", "biased"),
        *("layer_norm", "rms_norm"),
    ):
        assert titles[each] >= 3, each


def test_only_calls_that_are_wanted_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = drawn(H100, lambda call: "norm" in call.title)
    families = {family_of(each.kernel.name) for each in itertools.islice(found, 4)}
    assert all("norm" in each for each in families)
    # Where there is none, the drawing ends.
    monkeypatch.setattr(choosing, "_IN_VAIN", 20)
    assert list(drawn(H100, lambda _: False)) == []
