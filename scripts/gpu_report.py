# SPDX-License-Identifier: Apache-2.0
"""Runs the GPU tests and writes what they measured: docs/gpu-report.md and .json.

    python -m scripts.gpu_report [--out docs] [--again TEST...] [pytest arguments]
    python -m scripts.gpu_report [--out docs] --junit FILE... --environment FILE
    python -m scripts.gpu_report [--out docs] --merge FILE...
    python -m scripts.gpu_report --print-environment

The committed report is this script's output. It keeps the results of each pair of
versions of cuDNN and JAX, and each result's commit, GPU and day. A run replaces what
its own pair had; with --again, only the named tests run and are replaced. Interrupted,
it keeps the results that there are. --junit takes the results of pytest elsewhere, with
the --environment that --print-environment printed there, and --merge those of other
reports, the newest last. tests/common/gpu/explained.json has the reasons of failures.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_page import (
    LISTED,
    Record,
    Run,
    has_unexplained,
    markdown,
    name_of,
    pair_of,
)

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/gpu"))
_PREFIX = "error ratio of "


def _output(*command: str) -> str:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT
        )
    except FileNotFoundError:
        return ""
    return result.stdout.strip()


_VERSIONS = """
import dataclasses, json, jax, jax_cudnn
from jax_cudnn import native
target = native.device_target(0)
print(json.dumps({
    "GPU": f"{len(jax.local_devices())} x {target.name} (sm_{target.sm_version})",
    "cuDNN": native.cudnn_version().version_text,
    "JAX": jax.__version__,
    "jax_cudnn": jax_cudnn.__version__,
    **{k: str(v) for k, v in dataclasses.asdict(native.build_info()).items()},
}))
"""


def commit() -> str:
    """Return the commit that runs; JAX_CUDNN_COMMIT says it where there is no git."""
    found = _output("git", "rev-parse", "--short", "HEAD")
    is_dirty = bool(_output("git", "status", "--porcelain", "--untracked-files=no"))
    return (
        os.environ.get("JAX_CUDNN_COMMIT")
        or (f"{found} with changes" if is_dirty else found)
        or "unknown"
    )


def environment() -> dict[str, str]:
    """Return what the tests ran with."""
    versions = json.loads(_output(sys.executable, "-c", _VERSIONS).splitlines()[-1])
    driver = _output(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    )
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "driver": ", ".join(sorted(set(driver.split()))),  # a line per GPU
        "Python": sys.version.split()[0],
        **{name: str(value) for name, value in versions.items()},
    }


# --- running --------------------------------------------------------------------------

# Many processes share the GPU, so none may take its memory in advance. XLA's tuning of
# the reference is off, since it would take most of the time.
_SHARED_GPU = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
# These tests look at memory, threads and command buffers, and need the GPU alone.
_ALONE = (
    "tests/attention/gpu/test_sdpa_execution.py",
    "tests/attention/gpu/test_sdpa_long.py",
    "tests/attention/gpu/test_sdpa_several_gpus.py",
    "tests/lowering/gpu/test_large.py",
)


def run_tests(tests: list[str], arguments: list[str]) -> list[Record]:
    """Run pytest on the tests and return one record per test."""
    alone = [test for test in tests if test.startswith(_ALONE)]
    together = [test for test in tests if test not in alone]
    if together == FOLDERS:
        together += [f"--ignore={path}" for path in _ALONE]
        alone = [*_ALONE]
    processes = ["-n", str(min(20, os.cpu_count() or 1))]
    shared = {**os.environ, **_SHARED_GPU}
    records: list[Record] = []
    is_over = False
    if together:
        records, is_over = _run_pytest([*processes, *arguments, *together], shared)
    if alone and not is_over:
        # Whatever the arguments say, in one process.
        one = [*arguments, "-n", "0", *alone]
        records += _run_pytest(one, dict(os.environ))[0]
    return records


def _run_pytest(arguments: list[str], env: dict[str, str]) -> tuple[list[Record], bool]:
    """Return a record per test that came to its end, and whether it was interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-rfEs", *arguments]
        tests = subprocess.Popen([*command, f"--junitxml={report}"], cwd=ROOT, env=env)
        is_interrupted = False
        try:
            tests.wait()
        except KeyboardInterrupt:  # pytest has it too, and writes what it knows.
            is_interrupted = True
            tests.wait()
        return records_of(report), is_interrupted


def records_of(report: Path) -> list[Record]:
    """Return a record of each test in pytest's XML that came to its end."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [record for case in cases if (record := _record(case)) is not None]


def _record(case: ElementTree.Element) -> Record | None:
    if not case.get("classname"):
        return None  # a file that was skipped whole
    outcome, text = "passed", ""
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            outcome, text = kind, found.get("message", "")
    properties = [
        (p.get("name", ""), p.get("value", "")) for p in case.iter("property")
    ]
    # tests/conftest.py says which tests came to their end.
    if outcome == "passed" and ("finished", "yes") not in properties:
        return None
    record = {
        "module": case.get("classname", "").split(".")[-1],
        "test": case.get("name"),
        "outcome": outcome,
        "message": " ".join(text[:400].split()),
        "error_ratios": {
            name.removeprefix(_PREFIX): float(value)
            for name, value in properties
            if name.startswith(_PREFIX)
        },
        **{
            name: [value for each, value in properties if each == name]
            for name in LISTED
        },
    }
    return {name: value for name, value in record.items() if value}


# --- keeping --------------------------------------------------------------------------


def with_run(runs: Sequence[Run], new: Run) -> list[Run]:
    """Return the runs with a new one, whose results replace those of its pair.

    A test that is skipped, for lack of a second GPU say, keeps the result it had.
    """
    earlier = [run for run in runs if pair_of(run) == pair_of(new)]
    had = {name_of(x) for run in earlier for x in run["tests"]}
    own = [
        record
        for record in new["tests"]
        if record["outcome"] != "skipped" or name_of(record) not in had
    ]
    replaced = {name_of(record) for record in own}
    kept = [
        {
            **run,
            "tests": [
                x
                for x in run["tests"]
                if run not in earlier or name_of(x) not in replaced
            ],
        }
        for run in runs
    ]
    return [run for run in [*kept, {**new, "tests": own}] if run["tests"]]


def as_json(runs: Sequence[Run]) -> str:
    """Return the report as data, a test on each line."""
    parts = (
        f'{{"environment": {json.dumps(run["environment"])},\n"tests": [\n'
        + ",\n".join(map(json.dumps, run["tests"]))
        + "\n]}"
        for run in runs
    )
    return '{"runs": [\n' + ",\n".join(parts) + "\n]}\n"


def main() -> int:
    """Run, write, and return 1 if a test failed for no known reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--again", nargs="+", metavar="TEST", help="run these alone")
    parser.add_argument("--junit", nargs="+", type=Path, metavar="FILE", default=())
    parser.add_argument("--environment", type=Path, metavar="FILE")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", default=())
    parser.add_argument("--print-environment", action="store_true")
    options, rest = parser.parse_known_args()
    if options.print_environment:
        print(json.dumps(environment()))
        return 0
    data, page = (options.out / f"gpu-report.{x}" for x in ("json", "md"))
    runs: list[Run] = json.loads(data.read_text())["runs"] if data.exists() else []
    if options.merge:
        new = [
            x for file in options.merge for x in json.loads(file.read_text())["runs"]
        ]
    elif options.junit:
        versions = json.loads(options.environment.read_text())
        tests = [record for file in options.junit for record in records_of(file)]
        new = [{"environment": versions, "tests": tests}]
    else:
        found = run_tests(options.again or FOLDERS, rest)
        new = [{"environment": environment(), "tests": found}]
    for run in new:
        runs = with_run(runs, run)
    reasons = json.loads((ROOT / "tests/common/gpu/explained.json").read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    data.write_text(as_json(runs))
    page.write_text(markdown(runs, reasons))
    return int(any(has_unexplained(run, reasons) for run in new))


if __name__ == "__main__":
    raise SystemExit(main())
