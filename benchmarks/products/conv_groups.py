# SPDX-License-Identifier: Apache-2.0
"""Times the ways of writing convolutions in groups, and XLA's code.

    python -m benchmarks.conv_groups --out docs/internals/measured

times convolutions in groups and their gradients on one GPU, as ResNeXts, RegNets and
ShuffleNets have them: in each way of writing them (legalize/products/conv_groups.py),
by cuDNN's first plan and by the fastest of the first ten, and by XLA. Times include the
work on arrays around the kernel. It writes conv_groups.json and conv_groups.md there.
Groups of one channel are in depthwise.py.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.page import Data, Page
from benchmarks.harness.program import run_benchmark
from benchmarks.products.conv_ways import (
    Cell,
    is_like,
    measured_ways,
    tables_beside_xla,
)
from jax_cudnn.legalize import Rewrite
from jax_cudnn.policy.nearest import LOSS

_WAYS = ("as it is", "flipped", "padded", "merged", "one group")


def _cell(images: tuple[int, ...], groups: int, window: int = 3, **more: Any) -> Cell:
    every = {"outer": images[-1], "step": 1, **more}
    return Cell(images=images, window=window, groups=groups, **every)


def cells(*, small: bool) -> list[Cell]:
    """Return the convolutions."""
    if small:
        return [_cell((2, 8, 8, 32), 8)]
    return [
        # 2 to 16 channels a group.
        _cell((64, 56, 56, 64), 32),
        _cell((64, 56, 56, 96), 32),
        _cell((64, 56, 56, 128), 32, activation="relu"),
        _cell((64, 28, 28, 256), 32),
        _cell((64, 56, 56, 256), 32, step=2, activation="relu"),
        _cell((128, 112, 112, 32), 4, step=2),
        _cell((64, 14, 14, 512), 32),
        _cell((64, 28, 28, 128), 8, activation="relu"),
        _cell((1, 28, 28, 256), 32),
        _cell((8, 14, 14, 512), 32, activation="silu"),
        _cell((64, 28, 28, 256), 32, outer=512),
        _cell((64, 28, 28, 256), 32, hole=2),
        _cell((64, 28, 28, 256), 32, window=2, step=2),
        _cell((64, 28, 28, 256), 32, window=5),
        _cell((64, 28, 28, 240), 15, window=1),
        # Odd numbers of groups.
        _cell((32, 128, 128, 136), 17),
        _cell((32, 128, 128, 136), 17, activation="silu"),
        _cell((8, 63, 63, 376), 47),
        _cell((8, 63, 63, 376), 47, activation="silu"),
        # 24 channels, 40, 48, and others.
        _cell((64, 56, 56, 48), 2, activation="relu"),
        _cell((64, 28, 28, 120), 5),
        _cell((64, 14, 14, 336), 14, step=2, activation="relu"),
        _cell((64, 7, 7, 912), 38),
        _cell((64, 14, 14, 560), 14, activation="silu"),
        _cell((64, 7, 7, 1360), 34),
        _cell((64, 14, 14, 432), 9),
        _cell((64, 7, 7, 1008), 21, step=2),
        _cell((32, 28, 28, 448), 4),
        _cell((64, 28, 28, 240), 3, window=1),
        _cell((64, 28, 28, 384), 8, window=1),
        _cell((64, 14, 14, 768), 8, window=1, activation="relu"),
        _cell((64, 7, 7, 1024), 32),
        _cell((128, 27, 27, 96), 2, window=5, outer=256, activation="relu"),
        _cell((64, 28, 28, 512), 8),
        _cell((64, 14, 14, 1024), 4),
        # One axis and three.
        _cell((8, 1024, 512), 16, window=7),
        _cell((8, 512, 768), 16, window=31),
        _cell((16, 2048, 256), 32, window=3, activation="relu"),
        _cell((4, 16, 28, 28, 256), 32),
        _cell((2, 32, 32, 32, 64), 8, activation="relu"),
        # Other dtypes.
        _cell((64, 28, 28, 256), 32, dtype="float16"),
        _cell((64, 28, 28, 256), 32, dtype="float32"),
        _cell((64, 14, 14, 512), 32, dtype="float32", activation="relu"),
        _cell((64, 7, 7, 1024), 32, dtype="float32"),
    ]


def _way_of(rewrite: Rewrite, first: Rewrite) -> str:
    """Return the name of a way of writing a convolution; "" for another kernel."""
    if not is_like(rewrite, first):
        return ""
    told = {
        "groups are merged into 1": "one group",
        "groups are merged": "merged",
        "groups are padded": "padded",
        "the filters are flipped": "flipped",
    }
    notes = [f"{note};" for note in rewrite.notes]
    for words, way in told.items():
        is_whole = ";" if way == "one group" else ""
        if any(words + is_whole in note for note in notes):
            return way
    return "as it is"


def measure(found: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel."""
    parts = [part for cell in found for part in cell.parts()]
    yield from measured_ways(parts, _way_of)


def _of_first_ways(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how the ways that come first do beside XLA; rows have them in order."""
    ratios: list[float] = []
    for row in rows:
        first = next(us for name, us in row["us"].items() if name.endswith(", first"))
        ratios.append(first / row["us"]["XLA"])
    over = sum(ratio > LOSS for ratio in ratios)
    yield f"By the ways that come first, the mean of all {len(ratios)} kernels is"
    yield f"{statistics.geometric_mean(ratios):.2f}, and {over} are over {LOSS}."
    yield 'What of these "auto" leaves to XLA goes by [rules](rules.md).'


def _lines(data: Data) -> list[str]:
    rows = data["rows"]
    return [
        "cuDNN has fast engines for groups of 8, 16, 32, 64 and 128 channels, as many",
        "in as out. Channels of others are padded to such a number, or groups are",
        "merged into larger ones, or into one, of filters with zeros in between.",
        "Gradients with respect to images in steps of 1 are written as convolutions",
        "with flipped filters, those of padded groups too. Which way comes first is",
        "said in [Memory and performance](../../performance.md#shapes). Groups of one",
        "channel have [a table of their own](depthwise.md).",
        "",
        *tables_beside_xla(rows, _WAYS, *_of_first_ways(rows), ""),
    ]


markdown = Page(
    name="conv_groups",
    title="Convolutions in groups",
    comment="Convolutions in groups, as they are and with merged groups.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, cells, measure, markdown)
