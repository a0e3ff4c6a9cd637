# SPDX-License-Identifier: Apache-2.0
"""Runs random problems of attention on cuDNN and writes docs/random_attention.md.

    python -m scripts.random_attention --out docs

Needs an NVIDIA GPU. With torch installed, the answers in float64 are computed there.
Several processes share the GPU. `--more` keeps what an earlier run left in the folder,
and runs the problems that are missing there, or failed. `--only SEED` runs one problem
and prints its errors; `--platform cpu --longest 40` tries the script without a GPU.
"""

import argparse
import collections
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import torch_side
from benchmarks.records import write_records
from benchmarks.report import environment, versions_text
from benchmarks.torch_side import torch
from jax_cudnn.errors import UnsupportedError
from scripts.gpu_report import commit
from tests import random_attentions
from tests.random_attentions import Problem

Record = dict[str, Any]
_DATA, _PAGE = "random_attention.json", "random_attention.md"
_COMMAND = "python -m scripts.random_attention"
# What is no gradient, as the page calls it.
_RESULTS = {"output": "output", "lse": "log-sum-exp", "max": "largest score"}


def run_problem(problem: Problem, *, with_gradients: bool) -> Record:
    """Run a problem with cuDNN and compare all its results with the answers."""
    arrays = random_attentions.make_arrays(problem)
    _poison()
    function = random_attentions.results if with_gradients else random_attentions.call
    run = jax.jit(functools.partial(function, problem, implementation="cudnn"))
    try:
        found = run({name: jnp.asarray(x) for name, x in arrays.items()})
    except UnsupportedError as error:
        return {"outcome": "refused", "reason": _reason(str(error))}
    judged = random_attentions.judge(problem, arrays, with_gradients=with_gradients)
    if torch is not None:
        torch_side.release_memory()  # Other processes share it.
    ratios = {
        name: random_attentions.worst_ratio(x, judged[name])
        for name, x in found.items()
    }
    is_right = max(ratios.values()) <= 1
    return {"outcome": "right" if is_right else "wrong", "ratios": ratios}


def _poison() -> None:
    """Fill the memory that results and workspace will be in with NaN."""
    sizes = [2**12] * 64 + [2**20] * 64 + [2**24] * 16 + [2**27] * 2
    if jax.default_backend() == "cpu":
        sizes = sizes[:64]
    blocks = [jnp.full((size // 4,), jnp.nan, jnp.float32) for size in sizes]
    jax.block_until_ready(blocks)


def _reason(text: str) -> str:
    """Return a refusal without what differs from problem to problem."""
    lines = [line.strip(" -") for line in text.splitlines() if line.strip()]
    told = next((x for x in lines if re.search(r"cuDNN|sm_|takes", x[20:])), lines[0])
    return re.sub(r"\d+", "N", told)[:200]


# --- the processes --------------------------------------------------------------------


def _work(arguments: argparse.Namespace) -> None:
    """Run every problem whose number leaves this process's rank."""
    until = time.monotonic() + arguments.seconds
    done = {(x["backward"], x["seed"]) for x in _earlier(arguments)}
    with Path(arguments.worker).open("w", encoding="utf-8") as file:
        for is_backward, seed in _seeds(arguments):
            if seed % arguments.processes != arguments.rank:
                continue
            if (is_backward, seed) in done:
                continue
            if time.monotonic() > until:
                break
            problem = _problem(seed, arguments)
            begun = {"seed": seed, "backward": is_backward, "problem": str(problem)}
            try:
                record = run_problem(problem, with_gradients=is_backward)
            except Exception as error:  # It is a record like any other.
                told = f"{type(error).__name__}: {error}"
                record = {"outcome": "failed", "reason": told[:300]}
            file.write(json.dumps({**begun, **record}) + "\n")
            file.flush()


def _seeds(arguments: argparse.Namespace) -> Iterator[tuple[bool, int]]:
    """Return gradients and results by turns, so that a cut-off run has both."""
    forward, backward = arguments.forward, arguments.backward
    for i in range(max(forward, 2 * backward)):
        if i < forward:
            yield False, i
        if i % 2 and i // 2 < backward:
            yield True, forward + i // 2


def _problem(seed: int, arguments: argparse.Namespace) -> Problem:
    return random_attentions.draw_problem(
        seed, longest=arguments.longest, most_scores=arguments.most_scores
    )


def _earlier(arguments: argparse.Namespace) -> list[Record]:
    """Return what an earlier run found out, if it is to be kept."""
    file = arguments.out / _DATA
    if not arguments.more or not file.exists():
        return []
    records = json.loads(file.read_text(encoding="utf-8"))["problems"]
    # What failed or was wrong is run again.
    return [each for each in records if each["outcome"] in ("right", "refused")]


def _run_all(arguments: argparse.Namespace, given: Sequence[str]) -> list[Record]:
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.jsonl" for rank in range(arguments.processes)]
        command = [sys.executable, "-m", "scripts.random_attention", *given]
        running = [
            subprocess.Popen(
                [*command, "--worker", str(file), "--rank", str(rank)], env=env
            )
            for rank, file in enumerate(files)
        ]
        for process, file in zip(running, files, strict=True):
            if code := process.wait():
                records.append({"outcome": "failed", "reason": f"exit code {code}"})
            if file.exists():
                records += map(
                    json.loads, file.read_text(encoding="utf-8").splitlines()
                )
    return records


# --- the page -------------------------------------------------------------------------


def _head_size(text: str) -> int:
    found = re.search(r" d=(\d+)", text)
    assert found is not None
    return int(found.group(1))


_ABOUT = """\
Each problem is drawn from its number (`tests/random_attentions.py`): batch 1 to 16,
lengths 1 to 2048, head sizes to 256 and some to 576, MHA, GQA and MQA as 1 to 4 to 1,
bf16 or f16, and a mixture of masks and other arguments. `implementation="cudnn"`
computes it. Memory is filled with NaN before. Padding is NaN between packed sequences,
and 1e4 past other lengths. Results are compared with float64. Each entry has a bound of
its own, made of what a kernel rounds to 16 bits. A problem is right if all entries of
all results are within it.""".splitlines()
_FEATURES: dict[str, Callable[[str], bool]] = {
    "all": lambda _: True,
    "causal": lambda x: "band=causal" in x,
    "causal, bottom-right": lambda x: "band=bottom-right" in x,
    "window": lambda x: "band=window" in x,
    "bias": lambda x: " bias=" in x,
    "mask": lambda x: " mask=" in x,
    "prefix, segments or blocks": lambda x: " form=" in x,
    "lengths, some of them 0": lambda x: "with_lengths" in x,
    "packed sequences": lambda x: " packed=" in x,
    "softcap": lambda x: " softcap=" in x,
    "dropout": lambda x: " dropout=" in x,
    "sinks": lambda x: "with_sinks" in x,
    "head sizes above 256": lambda x: _head_size(x) > 256,
    "cotangent of the log-sum-exp": lambda x: "with_lse" in x,
    "one query": lambda x: " s=1," in x,
}


def page(records: Sequence[Record], versions: dict[str, str], command: str) -> str:
    """Return the page of a run."""
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- How many random problems of attention cuDNN computed rightly. -->",
        "",
        "# Random problems of attention",
        "",
        f"Written by `{command}` on {versions_text(versions)}; do not edit. "
        f"Commits: {', '.join(dict.fromkeys(x['commit'] for x in records))}.",
        "",
        *_ABOUT,
        "",
        "| problems | run | right | wrong | refused | failed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, has in _FEATURES.items():
        for direction, is_backward in (("results", False), ("gradients", True)):
            chosen = [
                x
                for x in records
                if x.get("backward") is is_backward and has(x["problem"])
            ]
            counts = collections.Counter(x["outcome"] for x in chosen)
            told = [counts[x] for x in ("right", "wrong", "refused", "failed")]
            shown = " | ".join(map(str, (len(chosen), *told)))
            lines.append(f"| {name}, {direction} | {shown} |")
    lines += ["", "The largest error of each result, as a part of its bound:", ""]
    lines += ["| result | largest error |", "| --- | --- |"]
    worst: dict[str, float] = {}
    for record in records:
        for name, ratio in record.get("ratios", {}).items():
            title = _RESULTS.get(name, f"gradient of {name}")
            worst[title] = max(worst.get(title, 0.0), ratio)
    lines += [f"| {name} | {worst[name]:.2f} |" for name in sorted(worst)]
    lines += _refusals(records)
    return "\n".join(lines) + "\n"


def _refusals(records: Sequence[Record]) -> list[str]:
    reasons = collections.Counter(
        x["reason"] for x in records if x["outcome"] == "refused"
    )
    lines = ["", "## Refused", ""]
    lines += [f"- {count} times: {reason}" for reason, count in reasons.most_common()]
    lines += [] if reasons else ["None."]
    others = [x for x in records if x["outcome"] in ("wrong", "failed")]
    lines += ["", "## Wrong or failed", ""]
    lines += [
        f"- {x['outcome']}: {x.get('problem', 'a process')}"
        f" ({_first_sentence(x) or _shown(x['ratios'])})"
        for x in others
    ]
    return lines + ([] if others else ["None."])


def _first_sentence(record: Record) -> str:
    return record.get("reason", "").partition(". ")[0]


def _shown(ratios: dict[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.2g}" for name, ratio in ratios.items())


def main() -> None:
    """Parse the arguments, run the problems and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forward", type=int, default=1500)
    parser.add_argument("--backward", type=int, default=750)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--most-scores", type=int, default=2**25)
    parser.add_argument("--seconds", type=float, default=3600, help="then stop")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/random_attention"))
    parser.add_argument("--more", action="store_true", help="keep what is in --out")
    parser.add_argument("--only", type=int, help="run the problem with this number")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", arguments.platform)
    if arguments.worker:
        _work(arguments)
        return
    if arguments.only is not None:
        problem = _problem(arguments.only, arguments)
        is_backward = arguments.only >= arguments.forward
        print(problem, run_problem(problem, with_gradients=is_backward))
        return
    given = sys.argv[1:]
    measured_at = commit()
    found = [{**record, "commit": measured_at} for record in _run_all(arguments, given)]
    records = sorted(
        [*_earlier(arguments), *found], key=lambda record: record.get("seed", -1)
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    versions = environment()
    command = " ".join([_COMMAND, *given])
    text = page(records, versions, command)
    (arguments.out / _PAGE).write_text(text, encoding="utf-8")
    data = {"versions": versions, "command": command, "problems": records}
    write_records(arguments.out / _DATA, data)
    print(text)


if __name__ == "__main__":
    main()
