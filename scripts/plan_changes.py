# SPDX-License-Identifier: Apache-2.0
"""Compares which engines two versions of cuDNN list for the same graphs, in what order.

    python -m scripts.plan_changes --record 9.19.json
    python -m scripts.plan_changes --record 9.28.json    # with another cuDNN installed
    python -m scripts.plan_changes 9.19.json 9.28.json

Recording asks the installed cuDNN for the candidates of the kernels of random calls, on
this machine's GPU, or with `--gpu H100` on one that need not be here: then without the
engines that are compiled for a GPU at hand. The last command writes
docs/internals/measured/plan_changes.md: for each kind of kernel, how often both
versions list the same engine first, which engines came and went, and whose knobs
changed. What is kept of one version, such as the choices of the tuner and the engines
that a table names, holds for the other as far as these agree.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_cudnn import offline
from jax_cudnn.calibration.choosing import drawn
from jax_cudnn.config import Options
from jax_cudnn.errors import LibraryError
from jax_cudnn.graph import operand_text, to_json, version_text
from jax_cudnn.lowering.devices import gpu_for
from jax_cudnn.policy import ranked
from jax_cudnn.policy.nearest import family_of

_PAGE = Path(__file__).parents[1] / "docs/internals/measured/plan_changes.md"


def record(gpu: str, count: int) -> dict[str, Any]:
    """Return the candidates of so many kernels, by the cuDNN that is installed."""
    named = offline.named_gpu(gpu) if gpu else gpu_for(Options())
    if named is None:
        raise LibraryError("JAX sees no NVIDIA GPU here: name one with --gpu")
    rows: list[dict[str, Any]] = []
    for candidate in drawn(named.target, lambda _: True):
        if len(rows) == count:
            break
        (way, *_) = ranked(candidate.part, named.target)
        listed = named.candidates(to_json(way.rewrite.graph))
        rows.append(
            {
                "family": family_of(candidate.kernel.name),
                "operands": operand_text(candidate.part),
                "engines": [
                    [each.engine, sorted(name for name, _ in each.knobs)]
                    for each in listed
                    if not each.refusal
                ],
            }
        )
    version = version_text(named.target.cudnn_version)
    return {"gpu": named.target.name, "cudnn": version, "rows": rows}


def _pairs(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[str, Sequence[Any], Sequence[Any]]]:
    """Yield the family and both lists of each kernel that both versions plan."""
    known = {(row["family"], row["operands"]): row["engines"] for row in old["rows"]}
    for row in new["rows"]:
        before = known.get((row["family"], row["operands"]))
        if before and row["engines"]:
            yield row["family"], before, row["engines"]


def markdown(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the page."""
    by_family: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for family, before, after in _pairs(old, new):
        by_family[family].append((before, after))
    count = sum(map(len, by_family.values()))
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Which engines differ between two versions of cuDNN. -->",
        "",
        f"# Engines of cuDNN {old['cudnn']} and {new['cudnn']}",
        "",
        "Printed by `python -m scripts.plan_changes`; do not edit. The candidates that",
        f"both versions list for {count} kernels of random calls on an {new['gpu']}.",
        "An engine came, or went, where no list of the other version has it for such",
        "kernels. Its knobs changed where no list has it with the same names.",
        "",
        "| kernels | number | same engine first | same order | came | went "
        "| other knobs |",
        "| --- | ---: | ---: | ---: | --- | --- | --- |",
    ]
    for family, pairs in sorted(by_family.items()):
        firsts = sum(a[0][0] == b[0][0] for a, b in pairs)
        orders = sum(_order(a) == _order(b) for a, b in pairs)
        was, now = (_knobs(lists) for lists in zip(*pairs, strict=True))
        changed = [e for e in was.keys() & now.keys() if not was[e] & now[e]]
        lines.append(
            f"| {family} | {len(pairs)} | {firsts} | {orders} "
            f"| {_numbers(now.keys() - was.keys())} "
            f"| {_numbers(was.keys() - now.keys())} | {_numbers(changed)} |"
        )
    return "\n".join(lines) + "\n"


def _order(listed: Sequence[Any]) -> list[int]:
    """Return the engines in the order of their first plans."""
    return list(Counter(engine for engine, _ in listed))


def _knobs(lists: Sequence[Sequence[Any]]) -> dict[int, set[tuple[str, ...]]]:
    found: defaultdict[int, set[tuple[str, ...]]] = defaultdict(set)
    for listed in lists:
        for engine, knobs in listed:
            found[engine].add(tuple(knobs))
    return dict(found)


def _numbers(engines: Any) -> str:
    return ", ".join(map(str, sorted(engines)))


def main() -> None:
    """Record, or compare."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="of the old and the new")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--gpu", default="", help="one that need not be here")
    parser.add_argument("--count", type=int, default=600, help="of kernels")
    options = parser.parse_args()
    if options.record is not None:
        found = record(options.gpu, options.count)
        options.record.write_text(json.dumps(found))
        print(f"cuDNN {found['cudnn']}: {len(found['rows'])} kernels")
        return
    old, new = (json.loads(path.read_text()) for path in options.files)
    _PAGE.write_text(markdown(old, new))


if __name__ == "__main__":
    main()
