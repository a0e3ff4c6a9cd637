# SPDX-License-Identifier: Apache-2.0
"""Draws problems of norms, pooling, convolutions, grouped products and programs.

A problem is drawn from its family and a seed, so that another process can draw it
again. The answers share nothing with the package: they are closed forms in NumPy and
float64 and, for programs and convolutions, the plain function in float64.
scripts/random_operations.py runs them on a GPU. What attention is compared with is in
tests/attention/shared/random_attentions.py.
"""

from typing import Literal, Protocol

from tests.common.random_draws import Draw
from tests.fusing.random_programs import draw_program
from tests.lowering.operation_problems import Problem
from tests.norms.random_norms import draw_norm
from tests.pooling.random_pools import draw_pool
from tests.products.shared.random_experts import draw_groups, draw_layer
from tests.products.shared.random_gated_convs import draw_conv
from tests.products.shared.random_ragged_dots import draw_ragged_dot

Family = Literal[
    "norms", "pooling", "ragged_dot", "groups", "experts", "fuse", "convolutions"
]


class _Drawing(Protocol):
    def __call__(self, draw: Draw, *, gradients: bool, most: int) -> Problem: ...


_DRAWN: dict[Family, _Drawing] = {
    "norms": draw_norm,
    "pooling": draw_pool,
    "ragged_dot": draw_ragged_dot,
    "groups": draw_groups,
    "experts": draw_layer,
    "fuse": draw_program,
    "convolutions": draw_conv,
}
FAMILIES: tuple[Family, ...] = tuple(_DRAWN)
# Elements of the largest array, or of all windows.
_MOST = {
    "norms": 2**19,
    "pooling": 2**16,
    "ragged_dot": 2**21,
    "groups": 2**21,
    "experts": 2**17,
    "fuse": 2**15,
    "convolutions": 2**17,
}


def has_gradients(seed: int) -> bool:
    """Whether a problem has gradients: every other one."""
    return seed % 2 == 1


def draw_problem(family: Family, seed: int, *, most: int | None = None) -> Problem:
    """Return the problem of a seed; `most` bounds the elements of its arrays."""
    draw = Draw(seed, family)
    most = min(most or _MOST[family], _MOST[family])
    return _DRAWN[family](draw, gradients=has_gradients(seed), most=most)
