# SPDX-License-Identifier: Apache-2.0
"""Rows as if they had been measured, and a folder to keep them in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_cudnn import cache
from jax_cudnn.calibration import storing
from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import Rewrite
from jax_cudnn.policy import measured_as, ranked
from jax_cudnn.policy.nearest import Kernel
from tests.policy.answers import H100

__all__ = ["H100"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Keep what is calibrated in a folder of the test's own, and return it."""
    before = cache.settings()
    cache.configure(cache.Settings(directory=tmp_path / "cache"))
    storing.reload()
    yield tmp_path / "cache"
    cache.configure(before)
    storing.reload()


def kernel(
    name: str = "matmul, 16 bits, more",
    rows: float = 1024,
    columns: float = 1024,
    depth: float = 1024,
) -> Kernel:
    """Return a kernel of these sizes."""
    return Kernel(name=name, rows=rows, columns=columns, depth=depth)


def row(like: Kernel, ratio: float, number: int = 0, **fields: Any) -> dict[str, Any]:
    """Return the row of a kernel; the number tells it from others that are alike."""
    return {
        "class": like.name,
        "sizes": [round(x) for x in (like.rows, like.columns, like.depth, like.work)],
        "op": "made up",
        "operands": f"bf16[{number}]",
        "xla_us": 10.0,
        "cudnn_us": 10.0 * ratio,
        "ratio": ratio,
        "first_engine": 77,
        "engines": {"77": 1.0},
        "kernels": {},
        **fields,
    }


def first_rewrite(part: Graph, target: Target = H100) -> Rewrite:
    """Return the way to run a part that is tried first."""
    return ranked(part, target)[0].rewrite


def rows_like(part: Graph, ratio: float, count: int = 8) -> list[dict[str, Any]]:
    """Return rows of kernels that are as a part's, all of one ratio."""
    like = measured_as(part, first_rewrite(part), H100)
    assert like is not None
    return [row(like, ratio, number) for number in range(count)]


def file_of(target: Target, folder: Path) -> Path:
    """Return the file that is kept for a GPU."""
    (path,) = folder.glob(f"calibration/*cudnn{target.cudnn_version // 100}-1.json")
    return path
