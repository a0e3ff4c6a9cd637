# SPDX-License-Identifier: Apache-2.0
"""Tests what the masks refuse: arguments, operands, and operators other than `&`."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import masks, sdpa

pytestmark = pytest.mark.sampled

_OPERANDS = [np.ones((3, size, 2, 4), np.float32) for size in (6, 8, 8)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: masks.Causal("top"),
            ValueError,
            "Causal: alignment='top' is not one of 'top-left', 'bottom-right', "
            "'cache'.",
        ),
        (lambda: masks.Window(1.5, 0), TypeError, "Window: left is 1.5. Pass an int"),
        (lambda: masks.Window(1, True), TypeError, "Window: right is True."),
        (
            lambda: masks.Blocks(np.ones((1, 1), bool), 0),
            ValueError,
            "Blocks: size is 0. Pass (rows, columns), two ints above 0",
        ),
        (
            lambda: masks.Blocks(np.ones((2, 2), bool), (3, 4)).arguments(6, 9),
            ValueError,
            "Blocks: table is bool[1,1,2,2]. Axis 3 must be 1 or 3, the blocks of 4 in "
            "9.",
        ),
        (
            lambda: masks.Segments(np.zeros((2, 4), np.int32)).arguments(5, 5),
            ValueError,
            "Segments: query is i32[2,4]. It must have one number per query, shape [5] "
            "or [batch, 5].",
        ),
        (
            lambda: masks.Segments(np.zeros(5, np.float32)).arguments(5, 5),
            TypeError,
            "sdpa: Segments.query is f32[5]. It must hold integers.",
        ),
        (
            lambda: masks.Prefix(np.zeros((2, 2), np.int32)).arguments(5, 5),
            ValueError,
            "Prefix: length is i32[2,2]. It must be one number",
        ),
        (
            lambda: masks.Where(np.zeros((5, 5), np.float32)).arguments(5, 5),
            TypeError,
            "sdpa: Where.mask is f32[1,1,5,5]. It must be bool",
        ),
        (
            lambda: sdpa(*_OPERANDS, mask=masks.Where(np.ones((7, 8), bool))),
            ValueError,
            "sdpa: mask is bool[1,1,7,8], which does not broadcast to",
        ),
        (
            lambda: sdpa(
                *_OPERANDS, mask=masks.Where(np.ones((8, 6), bool)) & masks.Prefix(2)
            ),
            ValueError,
            "sdpa: masks that are given together are bool[1,1,6,8], bool[1,1,8,6], "
            "which do not broadcast to one another. Each axis must be 1 or the full",
        ),
        (
            lambda: sdpa(
                *_OPERANDS,
                np.zeros((6, 8), np.float32),
                mask=masks.Additive(np.zeros((8, 6), np.float32)),
            ),
            ValueError,
            "sdpa: biases that are given together are f32[1,1,8,6], f32[1,1,6,8], "
            "which do not broadcast to one another.",
        ),
        (
            lambda: sdpa(
                *_OPERANDS,
                mask=masks.Lengths(key=np.ones(4, np.int32)),
                key_value_seq_lengths=np.ones(3, np.int32),
            ),
            ValueError,
            "sdpa: key_value_seq_lengths that are given together are i32[4], i32[3], "
            "which do not broadcast to one another.",
        ),
        (
            lambda: sdpa(*_OPERANDS, mask=masks.Causal),  # type: ignore[arg-type]
            TypeError,
            "sdpa: mask is the class masks.Causal. Pass a mask, such as",
        ),
        (
            lambda: sdpa(*_OPERANDS, mask="causal"),
            TypeError,
            "sdpa: mask is 'causal' (str). It must be an array of bools or one of "
            "jax_cudnn.masks. Pass for example is_causal=True or mask=masks.Causal().",
        ),
        (
            lambda: masks.Causal() & np.ones((5, 5), bool),  # type: ignore[operator]
            TypeError,
            "Causal & ndarray: a mask is combined with masks. Write masks.Where(",
        ),
        (lambda: jnp.ones((5, 5), bool) & masks.Causal(), TypeError, "Causal & "),
        (
            lambda: np.ones((5, 5), bool) & masks.Causal(),
            TypeError,
            "Causal & ndarray: a mask is combined with masks. Write masks.Where(",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        make()


_EACH = (
    masks.Causal(),
    masks.Window(2, 3),
    masks.Lengths(key=jnp.array([3])),
    masks.Segments(jnp.zeros((1, 5), jnp.int32)),
    masks.Prefix(2),
    masks.Blocks(jnp.ones((1, 1), bool), 5),
    masks.Where(jnp.ones((5, 5), bool)),
    masks.Additive(jnp.ones((5, 5))),
    masks.Packed([0, 5]),
    masks.Causal() & masks.Window(2, 3),
)


def test_all_kinds_of_masks_are_tried() -> None:
    kinds = {type(mask).__name__ for mask in _EACH}
    assert kinds == {*masks.__all__} - {"Alignment", "Mask"}


@pytest.mark.parametrize("mask", _EACH, ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize(
    "others", [[masks.Causal()], [jnp.ones((5, 5), bool), np.ones((5, 5), bool), True]]
)
def test_no_operator_combines_masks_but_one(mask: Any, others: list[Any]) -> None:
    """Python's `or`, `and` and `not` would take one of the two in silence."""
    remedy = (
        "masks are combined with & alone, which lets a query see what both let it "
        "see. For another condition, compute an array of bools, which broadcasts to "
        "(batch, heads, query length, key length), and pass it as masks.Where(array)."
    )
    name = type(mask).__name__

    def check(made: Any, what: str) -> None:
        with pytest.raises(TypeError) as raised:
            made()
        assert str(raised.value) == f"{what}: {remedy}"

    for other in others:
        kind = type(other).__name__
        check(lambda other=other: mask | other, f"{name} | {kind}")
        check(lambda other=other: mask ^ other, f"{name} ^ {kind}")
        check(lambda other=other: mask or other, _TRUTH.format(name))
        check(lambda other=other: mask and other, _TRUTH.format(name))
        if not isinstance(other, masks.Mask):
            check(lambda other=other: other | mask, f"{name} | {kind}")
            check(lambda other=other: other ^ mask, f"{name} ^ {kind}")
    check(lambda: ~mask, f"~{name}")
    check(lambda: not mask, _TRUTH.format(name))
    check(lambda: 1 if mask else 2, _TRUTH.format(name))


_TRUTH = "`or`, `and`, `not` or `if` of {}"
