# SPDX-License-Identifier: Apache-2.0
"""Judges how well kernels that were measured with one cuDNN tell of another one.

    python -m scripts.other_versions

writes docs/internals/measured/other_versions.md. The kernels of the package's table
for the newest cuDNN are judged by those of the older table of their architecture, by
each other, and by both, as "auto" does. A kernel is not judged by itself, nor by those
that were measured right before and after it, which may be of the same call.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_cudnn.calibration.choosing import name_of
from jax_cudnn.calibration.rules import kernel_of_row
from jax_cudnn.calibration.storing import has_rules
from jax_cudnn.policy import evidence, tables
from jax_cudnn.policy.nearest import FAR, LOSS, Measured, verdict_of
from jax_cudnn.policy.tables import OTHER_CUDNN, Table

_FOLDER = Path(__file__).parents[1] / "docs" / "internals" / "measured"
_BESIDE = 3
# What takes longer than this is a great loss.
_GREAT = 1.3

_Near = Callable[[int], Iterator[tuple[float, float, int]]]


def _by_others(rows: Sequence[Mapping[str, Any]]) -> _Near:
    def near(i: int) -> Iterator[tuple[float, float, int]]:
        others = [*rows[: max(0, i - _BESIDE)], *rows[i + _BESIDE + 1 :]]
        # The same kernel may have been measured on another GPU.
        known = Measured(
            (kernel_of_row(row), row["ratio"])
            for row in others
            if name_of(row) != name_of(rows[i])
        )
        return ((*each, 1) for each in known.near(kernel_of_row(rows[i])))

    return near


def _by_table(rows: Sequence[Mapping[str, Any]], table: Table, more: float) -> _Near:
    known = evidence.kernels(table)
    return lambda i: ((a + more, x, 0) for a, x in known.near(kernel_of_row(rows[i])))


def _row(
    name: str,
    near: _Near,
    rows: Sequence[Mapping[str, Any]],
    most_apart: float = math.inf,
) -> str:
    verdicts = [verdict_of(near(i), most_apart) for i in range(len(rows))]
    pairs = list(zip(verdicts, rows, strict=True))
    kept = [row["ratio"] for v, row in pairs if v is not None and v.is_faster]
    mean = f"{statistics.geometric_mean(kept):.2f}" if kept else ""
    # Where nothing is known, a row decides, or cuDNN runs it: not counted here.
    every = math.exp(sum(map(math.log, kept)) / len(rows))
    return (
        f"| {name} | {len(rows)} | {verdicts.count(None)} | {len(kept)} | {mean} "
        f"| {sum(x > LOSS for x in kept)} | {sum(x > _GREAT for x in kept)} "
        f"| {every:.2f} |"
    )


def markdown() -> str:
    """Return the page."""
    *_, old, new = sorted(tables.shipped(), key=lambda table: table.cudnn)
    version = f"{new.cudnn // 100}.{new.cudnn % 100}"
    name = f"calibration_sm{new.sm_version}-cudnn{version}.json"
    data = json.loads((_FOLDER / name).read_text())
    found = data["environment"]
    products = [row for row in data["rows"] if has_rules(row)]
    others = {
        "depthwise convolutions": [
            x for x in data["rows"] if "depthwise" in x["class"]
        ],
        "attention": [x for x in data["rows"] if x["class"].startswith("sdpa")],
    }
    by_old, by_new = _by_table(products, old, 0.0), _by_others(products)
    farther = _by_table(products, old, OTHER_CUDNN)

    def by_both(i: int) -> Iterator[tuple[float, float, int]]:
        yield from farther(i)
        yield from by_new(i)

    was = f"{old.cudnn // 100}.{old.cudnn % 100}"
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- How well one version of cuDNN tells of another. -->",
        "",
        "# What one cuDNN tells of another",
        "",
        "Printed by `python -m scripts.other_versions`; do not edit. Kernels measured",
        f"on {found['GPU']} with cuDNN {found['cuDNN']} and JAX {found['JAX']},",
        'and what "auto" would make of them without tuning, by other kernels. Unknown',
        "are those of which too few others tell. The ratio is the geometric mean of",
        "the time of cuDNN's first plan over that of XLA's code, for the kernels that",
        f"cuDNN runs. The next columns count those over {LOSS} and over {_GREAT}.",
        "The last one is the mean of all kernels, if XLA runs the others.",
        "",
        f"| judged by | kernels | unknown | cuDNN's | ratio | over {LOSS} "
        f"| over {_GREAT} | all |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        _row(f"products and convolutions, by those of {was}", by_old, products),
        _row(f"the same, by others of {version}", by_new, products),
        _row("the same, by both", by_both, products),
    ]
    lines += [
        _row(f"{what}, by others of {version}", _by_others(rows), rows, FAR)
        for what, rows in others.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    (_FOLDER / "other_versions.md").write_text(markdown())


if __name__ == "__main__":
    main()
