# SPDX-License-Identifier: Apache-2.0
"""Runs random problems in several processes that share GPUs, and writes a page.

What scripts/random_attention.py and scripts/random_operations.py have in common. The
page and its data are written every few seconds, so that a run that is cut off leaves
what it has found out. A process that ends, or whose GPU context is lost, is replaced.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp

from benchmarks.harness.page import versions_text
from benchmarks.harness.records import write_records
from benchmarks.harness.versions import environment
from scripts.gpu_report import commit

Record = dict[str, Any]
Key = dict[str, Any]
# Versions, the command and the problems, with a pair of versions of cuDNN and JAX.
Run = dict[str, Any]

# Seconds between two writings of the page, and for what runs when the time is up.
_BETWEEN, _GRACE = 10, 60
# The exit code of a process whose GPU fails whatever it is asked.
_LOST = 3


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Some random problems, and how to run and show them.

    Attributes:
      name: the script's name, and that of the files which it writes.
      title: the page's.
      comment: what the page is for, in its second line.
      about: lines of the page that say what was run.
      keys: lists the problems, in the order to run them. A key is the part of a record
        that says which problem it is of; it has a "seed".
      begin: returns a problem's text, and what runs it and returns the record's rest:
        "outcome" ("right", "wrong" or "refused"), and "ratios" or "reason".
      tables: returns the page's tables.
    """

    name: str
    title: str
    comment: str
    about: Sequence[str]
    keys: Callable[[argparse.Namespace], Iterator[Key]]
    begin: Callable[[argparse.Namespace, Key], tuple[str, Callable[[], Record]]]
    tables: Callable[[Sequence[Record]], list[str]]


def poison() -> None:
    """Fill the memory that results and workspace will be in with NaN."""
    sizes = [2**12] * 64 + [2**20] * 64 + [2**24] * 16 + [2**27] * 2
    if jax.default_backend() == "cpu":
        sizes = sizes[:64]
    blocks = [jnp.full((size // 4,), jnp.nan, jnp.float32) for size in sizes]
    jax.block_until_ready(blocks)


def why_refused(text: str) -> str:
    """Return a refusal without what differs from problem to problem."""
    lines = [line.strip(" -") for line in text.splitlines() if line.strip()]
    told = next((x for x in lines if re.search(r"cuDNN|sm_|takes", x[20:])), lines[0])
    return re.sub(r"\d+", "N", told)[:200]


def main(suite: Suite, parser: argparse.ArgumentParser) -> None:
    """Parse the arguments, run the problems and write the page."""
    folder = Path("build") / suite.name
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=3600, help="then stop")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--out", type=Path, default=folder)
    parser.add_argument("--more", action="store_true", help="keep what is in --out")
    parser.add_argument("--only", type=int, help="run the problems with this number")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), help="of the problems, such as 2/4"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    number, count = arguments.part
    keys = suite.keys
    suite = dataclasses.replace(
        suite,
        keys=lambda given: itertools.islice(keys(given), number - 1, None, count),
    )
    # Read when a backend starts, which no import does.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    platforms = dict.fromkeys((arguments.platform, "cpu"))
    jax.config.update("jax_platforms", ",".join(platforms))
    if arguments.worker:
        _work(suite, arguments)
    elif arguments.only is not None:
        for key in suite.keys(arguments):
            if key["seed"] == arguments.only:
                text, run = suite.begin(arguments, key)
                print(text, run(), flush=True)
    else:
        _run_all(suite, arguments)


def _part(text: str) -> tuple[int, int]:
    """Return which part of how many a text such as "2/4" says."""
    number, _, count = text.partition("/")
    if not (
        number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2/4")
    return int(number), int(count)


# --- the processes --------------------------------------------------------------------


def _work(suite: Suite, arguments: argparse.Namespace) -> None:
    """Run problems that no other process has taken, until there are none."""
    folder: Path = arguments.worker
    done = set((folder / "done").read_text(encoding="utf-8").splitlines())
    own = folder / f"{os.getpid()}"
    with own.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        for key in suite.keys(arguments):
            if time.time() > arguments.until:
                break
            if _name(key) in done or not _take(folder / "taken" / _name(key)):
                continue
            begun: Record = {**key, "problem": "?"}
            try:
                text, run = suite.begin(arguments, key)
                begun["problem"] = text
                # Says what ran, should the process end.
                own.with_suffix(".now").write_text(json.dumps(begun), encoding="utf-8")
                record = run()
            except Exception as error:  # It is a record like any other.
                told = f"{type(error).__name__}: {error}"
                record = {"outcome": "failed", "reason": told[:300]}
            file.write(json.dumps({**begun, **record}) + "\n")
            file.flush()
            own.with_suffix(".now").unlink(missing_ok=True)
            if record["outcome"] == "failed" and not _has_device():
                sys.exit(_LOST)


def _name(key: Key) -> str:
    return "_".join(str(value) for value in key.values())


def _take(file: Path) -> bool:
    """Take a problem: True for the first process that asks."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _has_device() -> bool:
    try:
        jax.block_until_ready(jnp.arange(3) + 1)
    except Exception:  # What a lost context raises differs.
        return False
    return True


def load_runs(file: Path) -> list[Run]:
    """Return the runs of a file, one for each pair of versions of cuDNN and JAX."""
    if not file.exists():
        return []
    data = json.loads(file.read_text(encoding="utf-8"))
    of_run = collections.defaultdict[str, list[Record]](list)
    for record in data["problems"]:
        of_run[record.pop("run")].append(record)
    return [{**run, "problems": of_run[run["run"]]} for run in data["runs"]]


def _earlier(runs: Sequence[Run], pair: str) -> tuple[list[Record], str]:
    """Return what earlier runs with the same pair found out, and on which GPU."""
    for run in runs:
        if run["run"] == pair:
            # What failed or was wrong is run again.
            kept = [x for x in run["problems"] if x["outcome"] in ("right", "refused")]
            return kept, run["versions"]["GPU"]
    return [], ""


def _both(earlier: str, now: str) -> str:
    """Return the names of the GPUs of two runs."""
    return " and ".join(dict.fromkeys([*filter(None, earlier.split(" and ")), now]))


def _run_all(suite: Suite, arguments: argparse.Namespace) -> None:
    until = time.time() + arguments.seconds
    versions, measured_at = environment(), commit()
    command = _command(suite, arguments.out)
    pair = f"cuDNN {versions['cuDNN']}, JAX {versions['JAX']}"
    runs = load_runs(arguments.out / f"{suite.name}.json")
    earlier, gpus = _earlier(runs, pair) if arguments.more else ([], "")
    versions["GPU"] = _both(gpus, versions["GPU"])

    def write(found: Iterable[Record]) -> str:
        new = [{**record, "commit": measured_at} for record in found]
        records = sorted([*earlier, *new], key=lambda record: record.get("seed", -1))
        run = {"run": pair, "versions": versions, "command": command}
        others = [each for each in runs if each["run"] != pair]
        every = [*others, {**run, "problems": records}]
        write_runs(suite, arguments.out, every)
        return page(suite, every)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "taken").mkdir()
        fields = next(suite.keys(arguments), {}).keys()
        done = [_name({name: each.get(name) for name in fields}) for each in earlier]
        (folder / "done").write_text("\n".join(done), encoding="utf-8")
        workers = _Workers(suite, folder, until)
        for _ in range(arguments.processes):
            workers.start()
        written = time.time()
        while workers.running:
            time.sleep(0.2)
            workers.look_after()
            if time.time() > written + _BETWEEN:
                write(workers.records())
                written = time.time()
        print(write(workers.records()))


def _command(suite: Suite, out: Path) -> str:
    """Return how to run the same, with the folder that the page is kept in."""
    given = ["docs" if each == str(out) else each for each in sys.argv[1:]]
    return " ".join([f"python -m scripts.{suite.name}", *given])


def write_runs(suite: Suite, folder: Path, runs: Sequence[Run]) -> None:
    """Write page and data, each of them whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    text = page(suite, runs)
    data = {
        "runs": [{k: v for k, v in run.items() if k != "problems"} for run in runs],
        "problems": [{"run": run["run"], **x} for run in runs for x in run["problems"]],
    }
    markdown, records = (folder / f"{suite.name}.{x}" for x in ("md", "json"))
    for file, write in (
        (markdown, lambda path: path.write_text(text, encoding="utf-8")),
        (records, lambda path: write_records(path, data)),
    ):
        part = file.with_name(file.name + ".part")
        write(part)
        part.replace(file)


class _Workers:
    """The processes that run problems; those that end before the time are replaced."""

    def __init__(self, suite: Suite, folder: Path, until: float) -> None:
        self.folder, self.until = folder, until
        module = f"scripts.{suite.name}"
        self.command = [sys.executable, "-m", module, *sys.argv[1:]]
        self.command += ["--worker", str(folder), "--until", str(until)]
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.gpus = named.split(",") if named else range(jax.local_device_count())
        self.started = 0
        self.running: list[subprocess.Popen[bytes]] = []
        self.ended: list[Record] = []

    def start(self) -> None:
        """Start one more, on the next GPU."""
        gpu = str(self.gpus[self.started % len(self.gpus)])
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        self.running.append(subprocess.Popen(self.command, env=environ))
        self.started += 1

    def look_after(self) -> None:
        """Note which have ended, and start as many anew as ended too early."""
        for process in list(self.running):
            code = process.poll()
            if code is None:
                if time.time() > self.until + _GRACE:
                    process.kill()
                continue
            self.running.remove(process)
            if not code:
                continue
            ran = self.folder / f"{process.pid}.now"
            if ran.exists():
                begun = json.loads(ran.read_text(encoding="utf-8") or "{}")
                self.ended.append(
                    {**begun, "outcome": "failed", "reason": f"exit code {code}"}
                )
            elif code != _LOST:
                # It ended outside of any problem, and so would another one.
                self.ended.append({"outcome": "failed", "reason": f"exit code {code}"})
                continue
            if time.time() < self.until:
                self.start()

    def records(self) -> list[Record]:
        """Return all records that there are."""
        found = list(self.ended)
        for file in self.folder.glob("*.jsonl"):
            with file.open(encoding="utf-8") as lines:
                found += _whole(lines)
        return found


def _whole(lines: IO[str]) -> list[Record]:
    """Return the records of lines that are written to their end."""
    return [json.loads(line) for line in lines if line.endswith("\n")]


# --- the page -------------------------------------------------------------------------


def page(suite: Suite, runs: Sequence[Run]) -> str:
    """Return the page, with a section for each pair of versions, the newest first."""
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        f"<!-- {suite.comment} -->",
        "",
        f"# {suite.title}",
        "",
        *suite.about,
    ]
    for run in sorted(runs, key=_as_numbers, reverse=True):
        commits = dict.fromkeys(record["commit"] for record in run["problems"])
        lines += [
            "",
            f"## {run['run']}",
            "",
            f"Written by `{run['command']}` on {versions_text(run['versions'])}; "
            f"do not edit. Commits: {', '.join(commits)}.",
            "",
            *suite.tables(run["problems"]),
            *_refusals(run["problems"]),
        ]
    return "\n".join(lines) + "\n"


def _as_numbers(run: Run) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", run["run"])]


def counts(
    titles: Sequence[str],
    rows: Iterable[tuple[str, Sequence[Record]]],
    outcome: Callable[[Record], str] = lambda record: record["outcome"],
) -> list[str]:
    """Return a table of how many records of each row have which outcome."""
    lines = [
        f"| problems | run | {' | '.join(titles)} |",
        "| --- | --- |" + " --- |" * len(titles),
    ]
    for name, chosen in rows:
        counted = collections.Counter(map(outcome, chosen))
        told = (len(chosen), *(counted[title] for title in titles))
        lines.append(f"| {name} | {' | '.join(map(str, told))} |")
    return lines


def largest_errors(
    records: Iterable[Record], title: Callable[[Record, str], str]
) -> list[str]:
    """Return a table of the largest error of each result that has a title."""
    lines = ["", "The largest error of each result, as a part of its bound:", ""]
    lines += ["| result | largest error |", "| --- | --- |"]
    worst: dict[str, float] = {}
    for record in records:
        for name, ratio in record.get("ratios", {}).items():
            shown = title(record, name)
            worst[shown] = max(worst.get(shown, 0.0), ratio)
    return lines + [f"| {name} | {worst[name]:.2f} |" for name in sorted(worst)]


def _refusals(records: Sequence[Record]) -> list[str]:
    reasons = collections.Counter(
        x["reason"] for x in records if x["outcome"] == "refused"
    )
    lines = ["", "### Refused", ""]
    lines += [f"- {count} times: {reason}" for reason, count in reasons.most_common()]
    lines += [] if reasons else ["None."]
    others = [x for x in records if x["outcome"] in ("wrong", "failed")]
    lines += ["", "### Wrong or failed", ""]
    lines += [
        f"- {x['outcome']}: {x.get('problem', 'a process')}"
        f" ({_first_sentence(x) or _shown(x['ratios'])})"
        for x in others
    ]
    return lines + ([] if others else ["None."])


def _first_sentence(record: Record) -> str:
    told = record.get("reason", "").partition(". ")[0]
    return " ".join(told.split())


def _shown(ratios: dict[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.2g}" for name, ratio in ratios.items())
