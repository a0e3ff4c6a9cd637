# SPDX-License-Identifier: Apache-2.0
"""Times the ways of writing depthwise convolutions, and XLA's code.

    python -m benchmarks.depthwise --out docs/internals/measured

times depthwise convolutions and their gradients on one GPU, as MobileNets,
EfficientNets, ConvNeXts and models of sequences have them: as they are, rewritten
(legalize/products/conv_depthwise.py) and with merged groups, each by cuDNN's first plan
and by the fastest of the first ten, and by XLA. Times include the work on arrays around
the kernel. It writes depthwise.json and depthwise.md there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.page import Data, Page
from benchmarks.harness.program import run_benchmark
from benchmarks.products.conv_ways import (
    Cell,
    is_like,
    is_merged,
    measured_ways,
    tables_beside_xla,
)
from jax_cudnn.legalize import Rewrite

_WAYS = ("as it is", "rewritten", "merged")
# With what follows in the kernel, too.
_FUSED = "fused"


def _cell(images: tuple[int, ...], window: int, step: int = 1, **more: Any) -> Cell:
    channels = images[-1]
    every = {"outer": channels, **more}
    return Cell(images=images, window=window, step=step, groups=channels, **every)


def cells(*, small: bool) -> list[Cell]:
    """Return the convolutions."""
    if small:
        return [_cell((2, 8, 8, 32), 3)]
    return [
        _cell((64, 112, 112, 32), 3, activation="relu"),
        _cell((64, 112, 112, 96), 3, step=2),
        _cell((64, 56, 56, 144), 3, activation="silu"),
        _cell((64, 28, 28, 192), 3),
        _cell((64, 14, 14, 576), 3, step=2),
        _cell((64, 7, 7, 960), 3, activation="relu"),
        _cell((128, 28, 28, 240), 5, step=2, activation="silu"),
        _cell((64, 14, 14, 480), 5),
        _cell((64, 7, 7, 1152), 5, activation="silu"),
        _cell((64, 56, 56, 96), 7),
        _cell((64, 28, 28, 192), 7),
        _cell((64, 14, 14, 384), 7),
        _cell((64, 7, 7, 768), 7),
        _cell((1, 56, 56, 128), 7),
        _cell((8, 14, 14, 512), 7),
        _cell((1, 28, 28, 192), 3, activation="relu"),
        _cell((32, 112, 112, 64), 7, step=2),
        _cell((8, 2048, 2048), 4, activation="silu", ends=(3, 0)),
        _cell((1, 8192, 1024), 4, ends=(3, 0)),
        _cell((8, 2048, 512), 4),
        _cell((16, 1024, 512), 31),
        _cell((16, 1024, 512), 3, step=2),
        # cuDNN has no engines for these.
        _cell((64, 56, 56, 96), 9),
        _cell((32, 28, 28, 256), 13),
        _cell((64, 28, 28, 192), 3, hole=2),
        _cell((64, 28, 28, 192), 3, outer=384),
        _cell((64, 28, 28, 192), 2),
        _cell((64, 30, 30, 192), 3, step=3),
        _cell((16, 2048, 512), 3, hole=4),
        _cell((2, 32, 32, 32, 64), 3),
        _cell((4, 16, 56, 56, 96), 3),
        _cell((64, 24, 24, 100), 3),
        _cell((64, 28, 28, 192), 3, dtype="float16"),
        _cell((64, 28, 28, 192), 5, dtype="float16"),
        _cell((64, 28, 28, 192), 3, dtype="float32"),
        _cell((64, 14, 14, 384), 7, dtype="float32"),
    ]


def way_of(rewrite: Rewrite, first: Rewrite) -> str:
    """Return the name of a way of writing a convolution."""
    told = ("is a convolution to cuDNN", "the gradient is of windows")
    is_rewritten = any(words in note for note in rewrite.notes for words in told)
    name = "merged" if is_merged(rewrite) else _WAYS[is_rewritten]
    return name if is_like(rewrite, first) else f"{name}, {_FUSED}"


def measure(found: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel."""
    parts = [part for cell in found for part in cell.parts()]
    yield from measured_ways(parts, way_of)


def _fused_ways(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the fused ways that were measured."""
    ways = (f"{way}, {_FUSED}" for way in _WAYS)
    return [way for way in ways if any(f"{way}, first" in x["us"] for x in rows)]


def _lines(data: Data) -> list[str]:
    rows = data["rows"]
    return [
        "In a depthwise convolution, each channel has filters of its own. cuDNN has",
        "engines for some of them. It runs others with groups that are merged into",
        "larger ones, of filters with zeros in between. Some gradients are rewritten:",
        "those with respect to images as convolutions with flipped filters, and those",
        "of filters as gradients of wider ones, of which a part is kept. What follows",
        f"is computed by XLA, and in a way that is {_FUSED} by the same kernel. Which",
        'of these ways "auto" takes is said in',
        "[Memory and performance](../../performance.md#shapes).",
        "",
        *tables_beside_xla(rows, [*_WAYS, *_fused_ways(rows)]),
    ]


markdown = Page(
    name="depthwise",
    title="Depthwise convolutions",
    comment="Depthwise convolutions in several ways, by cuDNN and by XLA.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, cells, measure, markdown)
