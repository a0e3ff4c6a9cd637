# SPDX-License-Identifier: Apache-2.0
"""Writes docs/attention_support.md and operation_support.md: what cuDNN plans.

    python -m scripts.plan_support             # all versions
    python -m scripts.plan_support 9.28.1.4    # one; the others' answers are kept

from the repository's root, on a machine without a GPU, with the "gpuless" extra. Each
version of cuDNN in `VERSIONS` is fetched with pip into build/cudnn, and asked in a
process of its own for a plan of each feature in tests/attention/shared/features.py and
tests/plans/operation_features.py.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jax_cudnn
from jax_cudnn import native
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import is_anchor
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.decision import Attempt, PartDecision, decide_part
from jax_cudnn.offline import find
from jax_cudnn.offline.planner import NamedGpu, greeting
from tests.attention.shared import features as attention_features
from tests.plans import operation_features
from tests.plans.features import Feature

_ROOT = Path(__file__).parent.parent
_WHEELS = _ROOT / "build" / "cudnn"
# The small wheel of cuDNN, which has the engines that are compiled when planned: those
# of attention. Of versions before 9.13 it does not open without a GPU. There is none of
# 9.28; the full wheel of 9.19 answers as the small one.
_SMALL, _FULL = "nvidia-cudnn-jit-cu13", "nvidia-cudnn-cu13"
VERSIONS = {
    "9.13.1.26": _SMALL,
    "9.15.1.9": _SMALL,
    "9.17.1.4": _SMALL,
    "9.19.1.2": _SMALL,
    "9.21.1.3": _SMALL,
    "9.24.1.1": _SMALL,
    "9.27.0.42": _SMALL,
    "9.28.1.4": _FULL,
}
# The version that the newest one is compared with: most was measured with it.
_MEASURED = "9.19.1"
GPUS = ("a100", "h200", "b200")
_DIRECTIONS = ("forward", "gradient")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """A page of docs/, and the features that its tables are of."""

    name: str
    title: str
    source: str
    features: Sequence[Feature]
    about: str

    @property
    def path(self) -> Path:
        """Where the page is."""
        return _ROOT / "docs" / f"{self.name}.md"

    @property
    def data(self) -> Path:
        """Where the answers are that it is written from."""
        return self.path.with_suffix(".json")


PAGES = (
    Page(
        name="attention_support",
        title="Supported configurations: attention",
        source="tests/attention/shared/features.py",
        features=attention_features.FEATURES,
        about="""\
The requests are those of "auto".""",
    ),
    Page(
        name="operation_support",
        title="Supported configurations: norms, pooling and grouped matmuls",
        source="tests/plans/operation_features.py",
        features=operation_features.FEATURES,
        about="""\
The calls have `implementation="cudnn"`: "auto" leaves most of them to XLA until cuDNN
was measured to be faster. [Convolutions and matmuls](support.md) have a page of their
own.""",
    ),
)

# cuDNN gives a reason for each engine. These only say that an engine is another one.
_UNTELLING = r"supported for this engine|KERNEL_CFG"

Answer = dict[str, Any]


class _Asked(NamedGpu):
    """A GPU of a name, whose plans are listed and not built."""

    def plan(self, graph_json: str, request: str = "") -> native.PlanInfo:
        """Return the first plan that is listed; raise as if it were built."""
        listed = self.candidates(graph_json, request)
        first = next((each for each in listed if not each.refusal), None)
        if first is None:
            reasons = [each.refusal for each in listed]
            raise UnsupportedError("cuDNN has no plan for this graph.", reasons)
        return native.PlanInfo(failures=(), **dataclasses.asdict(first))


def answers(page: Page, gpu: str) -> dict[str, dict[str, Answer]]:
    """Return what the installed cuDNN answers to every feature, for a GPU's name."""
    description = find(gpu)
    version = greeting()["cudnn_version"]
    asked = _Asked(description=description, target=description.target(version))
    return {feature.key: _answers_to(feature, asked) for feature in page.features}


def _answers_to(feature: Feature, gpu: NamedGpu) -> dict[str, Answer]:
    found = {"forward": _answer(feature.call, feature.operands, gpu, "")}
    if feature.trained:
        operands = (feature.cotangent(), *feature.operands)
        found["gradient"] = _answer(feature.gradient(), operands, gpu, "_backward")
    return found


def _answer(function: Any, operands: Any, gpu: NamedGpu, ending: str) -> Answer:
    """Return whether each kernel of a call has a plan, with what is done around it.

    Of a gradient, only the kernels whose kind has the ending are looked at.
    """
    steps: list[PartDecision] = []
    for traced in traced_graphs(function, *operands):
        for part in traced.parts:
            kinds = [node.kind for node in part.nodes if is_anchor(node)]
            if any(kind.endswith(ending) for kind in kinds):
                steps.append(decide_part(part, gpu, traced.options))
    if not steps:
        raise RuntimeError("no kernel was asked for")
    refused = [step for step in steps if step.rewrite is None]
    if refused:
        remarks = (reason for step in refused for reason in _reasons(step.attempts))
    else:
        remarks = (
            note for step in steps if step.rewrite for note in step.rewrite.notes
        )
    return {"planned": not refused, "remarks": _distinct(remarks)}


def _reasons(attempts: tuple[Attempt, ...]) -> list[str]:
    """Return why the last way failed: it is the one that asks for the least."""
    told = [r for r in attempts[-1].reasons if not re.search(_UNTELLING, r)]
    return told or ["cuDNN: no engine takes it"]


def _distinct(texts: Any) -> list[str]:
    return list(dict.fromkeys(" ".join(str(text).split()) for text in texts))


def _folder(version: str) -> Path:
    """Return where a version of cuDNN lies, fetched if it is not there."""
    folder = _WHEELS / version
    if not (folder / "nvidia").is_dir():
        command = ("pip", "install", "--quiet", "--no-deps", "--target", str(folder))
        subprocess.run(
            (sys.executable, "-m", *command, f"{VERSIONS[version]}=={version}"),
            check=True,
        )
    return folder


def _asked(version: str) -> dict[str, Any]:
    """Return the answers of a version, from a process that finds it first."""
    path = os.pathsep.join((str(_folder(version)), str(_ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = (sys.executable, "-m", "scripts.plan_support", "--ask")
    done = subprocess.run(
        command, env=environment, cwd=_ROOT, check=True, stdout=subprocess.PIPE
    )
    found = json.loads(done.stdout)
    if not version.startswith(found["cudnn"] + "."):
        raise RuntimeError(f"asked for cuDNN {version}, got {found['cudnn']}")
    return found


def _lines_of(data: list[dict[str, Any]]) -> str:
    """Return the data as JSON, with a line for each version, GPU and feature."""
    packed = json.dumps(data, sort_keys=True)
    return re.sub(r'("[^"]*": \{)(?="forward")', r"\n\1", packed) + "\n"


class _Remarks:
    """The distinct remarks of a page, numbered as they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def _cell(by_version: list[tuple[str, Answer]], remarks: _Remarks) -> str:
    """Return from which version on there is a plan, with the newest one's remarks."""
    _, newest = by_version[-1]
    if not newest["planned"]:
        planned = [version for version, answer in by_version if answer["planned"]]
        told = f"up to {planned[-1]}" if planned else "no"
        return told + _numbers(newest["remarks"], remarks)
    refusing = [i for i, (_, answer) in enumerate(by_version) if not answer["planned"]]
    told = "yes" if not refusing else f"from {by_version[refusing[-1] + 1][0]}"
    return told + _numbers(newest["remarks"], remarks)


def _numbers(texts: list[str], remarks: _Remarks) -> str:
    numbers = sorted({remarks.number(text) for text in texts})
    return f" ({', '.join(map(str, numbers))})" if numbers else ""


def text(page: Page, data: list[dict[str, Any]]) -> str:
    """Return a page for the answers of several versions, the oldest first."""
    remarks = _Remarks()
    names = [f"sm_{find(gpu).target(90000).sm_version}" for gpu in GPUS]
    columns = [f"{name} {what}" for name in names for what in _DIRECTIONS]
    lines = []
    for group in dict.fromkeys(feature.group for feature in page.features):
        lines += ["", f"## {group.capitalize()}", ""]
        lines += [f"| feature | {' | '.join(columns)} |"]
        lines += ["| --- |" + " --- |" * len(columns)]
        for feature in page.features:
            if feature.group != group:
                continue
            cells = [feature.name]
            for gpu in GPUS:
                for what in _DIRECTIONS:
                    told = [
                        (_short(each["cudnn"]), each["gpus"][gpu][feature.key])
                        for each in data
                    ]
                    if what not in told[0][1]:
                        cells.append(f"XLA's ({remarks.number(feature.why)})")
                        continue
                    cells.append(
                        _cell([(v, answer[what]) for v, answer in told], remarks)
                    )
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Remarks", ""]
    lines += [f"{i}. {text}" for i, text in enumerate(remarks.texts, 1)]
    lines += ["", *_changes(page, data)]
    versions = ", ".join(_short(each["cudnn"]) for each in data)
    return "\n".join([_head(page, versions), *lines]) + "\n"


def _changes(page: Page, data: list[dict[str, Any]]) -> list[str]:
    """Return what the newest version plans otherwise than the one that was measured."""
    old, new = next(x for x in data if x["cudnn"] == _MEASURED), data[-1]
    found: dict[bool, list[str]] = {True: [], False: []}
    for gpu in GPUS:
        name = f"sm_{find(gpu).target(90000).sm_version}"
        for feature in page.features:
            before, now = (each["gpus"][gpu][feature.key] for each in (old, new))
            for what in before:
                if before[what]["planned"] != now[what]["planned"]:
                    told = f"{feature.name} ({feature.group}), {what}, {name}"
                    found[now[what]["planned"]].append(told)
    old_text, new_text = _short(_MEASURED), _short(new["cudnn"])
    return [
        f"## What {new_text} changed since {old_text}",
        "",
        f"- **planned by {new_text} only**: {'; '.join(found[True]) or 'nothing'}.",
        f"- **planned by {old_text} only**: {'; '.join(found[False]) or 'nothing'}.",
    ]


def _short(version: str) -> str:
    """Return the version without what follows its second number."""
    return ".".join(version.split(".")[:2])


def _head(page: Page, versions: str) -> str:
    about = textwrap.fill(
        "This page says which calls cuDNN has plans for, by GPU and by version of "
        f"cuDNN. Each version was asked for a plan of each call in `{page.source}`, "
        "for an A100 (sm_80), an H200 (sm_90) and a B200 (sm_100) that were not "
        f"present. {' '.join(page.about.split())} Plans were listed, not built or run: "
        "[the GPU report](gpu-report.md) says what was run. Numbers in parentheses "
        "refer to the remarks at the end.",
        88,
        break_on_hyphens=False,
    )
    return f"""\
# {page.title}

Written by `python -m scripts.plan_support`, on a machine without a GPU; do not
edit. jax_cudnn {jax_cudnn.__version__}, cuDNN {versions}.

{about}

| cell | meaning |
| --- | --- |
| yes | every version of cuDNN above has a plan |
| from 9.19 | this version and newer ones have a plan |
| no | "auto" runs XLA, and "cudnn" raises `UnsupportedError` |
| XLA's | XLA runs it with every implementation |

- The columns "gradient" are about the kernel of the gradients. The remarks of a "yes"
  say what is done around a kernel, with the newest version.
- GPUs below sm_80 have no plan, and XLA always runs f64.
- 9.28.1 was the full package, the other versions the small one (`nvidia-cudnn-jit`),
  which has only the engines that are compiled when they are planned."""


def main() -> None:
    """Write the page and its data, or print the answers of the cuDNN that is found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--ask", action="store_true", help="print what the installed cuDNN answers"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="write the page from the data that is there",
    )
    parser.add_argument(
        "versions",
        nargs="*",
        help="The versions to ask. By default all are asked, and else the answers of "
        "others are kept.",
    )
    arguments = parser.parse_args()
    if unknown := ", ".join({*arguments.versions}.difference(VERSIONS)):
        parser.error(f"{unknown}: not of {', '.join(VERSIONS)}")
    if arguments.ask:
        version = native.version_text(greeting()["cudnn_version"])
        found = {page.name: {gpu: answers(page, gpu) for gpu in GPUS} for page in PAGES}
        print(json.dumps({"cudnn": version, **found}))
        return
    if not arguments.again:
        asked = [_asked(version) for version in arguments.versions or VERSIONS]
        for page in PAGES:
            found = {x["cudnn"]: x for x in json.loads(page.data.read_text())}
            if not arguments.versions:
                found.clear()
            found |= {
                x["cudnn"]: {"cudnn": x["cudnn"], "gpus": x[page.name]} for x in asked
            }
            order = [version.rpartition(".")[0] for version in VERSIONS]
            data = [found[version] for version in order]
            page.data.write_text(_lines_of(data))
    for page in PAGES:
        page.path.write_text(text(page, json.loads(page.data.read_text())))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
