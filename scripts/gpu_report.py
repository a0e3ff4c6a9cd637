# SPDX-License-Identifier: Apache-2.0
"""Runs the GPU tests and writes what they measured: docs/gpu-report.md and .json.

    python scripts/gpu_report.py [--out docs] [--again TEST...] [pytest arguments]
    python scripts/gpu_report.py [--out docs] --merge FILE...

The committed report is this script's output. With --again, only the named tests run.
Their results replace those of the report that is already in the folder, and each result
says at which commit and on which GPU it was measured. Interrupted, it keeps the results
that there are. With --merge, nothing runs: the results of other reports, the newest
last, replace those of the folder's. A failure there does not replace a result: it says
that the test is to run again.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

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
        "driver": ", ".join(sorted(set(driver.split()))),  # a line per GPU
        "Python": sys.version.split()[0],
        **{name: str(value) for name, value in versions.items()},
    }


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
)


def run_tests(tests: list[str], arguments: list[str]) -> list[dict[str, Any]]:
    """Run pytest on the tests and return one record per test."""
    alone = [test for test in tests if test.startswith(_ALONE)]
    together = [test for test in tests if test not in alone]
    if together == FOLDERS:
        together += [f"--ignore={path}" for path in _ALONE]
        alone = [*_ALONE]
    processes = ["-n", str(min(20, os.cpu_count() or 1))]
    shared = {**os.environ, **_SHARED_GPU}
    records: list[dict[str, Any]] = []
    is_over = False
    if together:
        records, is_over = _run_pytest([*processes, *arguments, *together], shared)
    if alone and not is_over:
        # Whatever the arguments say, in one process.
        one = [*arguments, "-n", "0", *alone]
        records += _run_pytest(one, dict(os.environ))[0]
    return records


def _run_pytest(
    arguments: list[str], env: dict[str, str]
) -> tuple[list[dict[str, Any]], bool]:
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
        root = ElementTree.parse(report).getroot()
    records = [_record(case) for case in root.iter("testcase")]
    return [record for record in records if record.pop("is_done")], is_interrupted


def _record(case: ElementTree.Element) -> dict[str, Any]:
    outcome, text = "passed", ""
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            outcome, text = kind, found.get("message", "")
    properties = [
        (p.get("name", ""), p.get("value", "")) for p in case.iter("property")
    ]
    # tests/conftest.py says which tests came to their end.
    is_done = outcome != "passed" or ("finished", "yes") in properties
    return {
        "is_done": is_done,
        "module": (case.get("classname") or "").split(".")[-1],
        "test": case.get("name"),
        "outcome": outcome,
        "message": text[:400],
        "error_ratios": {
            name.removeprefix(_PREFIX): float(value)
            for name, value in properties
            if name.startswith(_PREFIX)
        },
        **{
            name: [value for each, value in properties if each == name]
            for name in _LISTED
        },
    }


def _never_launched(records: list[dict[str, Any]]) -> tuple[int, int, list[str]]:
    """Return how many parts were launched and refused, and which were neither."""
    planned, launched, refused = (
        {key for record in records for key in record.get(name, ())} for name in _LISTED
    )
    return len(launched), len(refused - launched), sorted(planned - launched - refused)


def markdown(records: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """Return the report as text."""
    counts = collections.Counter(record["outcome"] for record in records)
    summary = ", ".join(
        f"{count} {outcome}" for outcome, count in sorted(counts.items())
    )
    lines = [
        "# GPU test report",
        "",
        f"{len(records)} tests of jax_cudnn {versions['jax_cudnn']} ran on "
        f"{versions['GPU']}: {summary}.",
        "",
        "Written by `python scripts/gpu_report.py`; do not edit.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in versions.items()),
        f"| tests | {summary} |",
        "",
        "## Accuracy",
        "",
        "Error against float32 truth, as a multiple of the error that the same dtype "
        "makes in the reference (in norm); the tests refuse more than 2.",
        "",
        "| case | largest ratio | of | all |",
        "| --- | ---: | --- | --- |",
    ]
    for record in records:
        ratios = record.get("error_ratios")
        if not ratios:
            continue
        worst = max(ratios, key=lambda name: ratios[name])
        every = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        name = str(record["test"]).partition("[")[2].rstrip("]")
        lines.append(f"| {name} | {ratios[worst]:.2f} | {worst} | {every} |")
    launched, refused, missing = _never_launched(records)
    lines += [
        "",
        "## Launch matrix",
        "",
        "Of the kernels that the tests plan without a GPU "
        f"(tests/products/shared/fusion_cases.py), {launched} were "
        f"launched, and right against float64; {refused} are refused, "
        "as docs/support.md says. Planned and never launched:",
        "",
        *(f"- {key}" for key in missing or ["none"]),
    ]
    lines += ["", "## Everything else", "", "| test | outcome |", "| --- | --- |"]
    for record in records:
        if not record.get("error_ratios") or record["outcome"] != "passed":
            message = record.get("message", "").replace("\n", " ").replace("|", "\\|")
            outcome = " ".join(filter(None, (record["outcome"], message)))
            lines.append(f"| {record['test']} | {outcome} |")
    return "\n".join(lines) + "\n"


def as_json(records: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """Return the report as data, a test on each line."""
    tests = (json.dumps({k: v for k, v in r.items() if v}) for r in records)
    lines = ",\n".join(tests)
    return f'{{"environment": {json.dumps(versions)},\n"tests": [\n{lines}\n]}}\n'


# Of what is planned without a GPU: see tests/products/gpu/test_launch_matrix.py.
_LISTED = ("planned", "launched", "refused")


def _name_of(record: dict[str, Any]) -> tuple[str, str]:
    return record["module"], record["test"]


def merged(
    kept: list[dict[str, Any]], new: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the records with new ones in place of old ones of the same test.

    A test that is skipped, for lack of a second GPU say, keeps the result it had.
    """
    had = {_name_of(record) for record in kept}
    new = [r for r in new if r["outcome"] != "skipped" or _name_of(r) not in had]
    replaced = {_name_of(record) for record in new}
    return [*(r for r in kept if _name_of(r) not in replaced), *new]


def _read(file: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return a report's versions and results, each with its commit and GPU."""
    data = json.loads(file.read_text())
    versions = data["environment"]
    own = {name: versions[name] for name in _OWN}
    return versions, [{**own, **record} for record in data["tests"]]


# What each result says for itself, as it may differ between them.
_OWN = ("commit", "GPU")


def _write(out: Path, records: list[dict[str, Any]], versions: dict[str, str]) -> None:
    for name in _OWN:
        counts = collections.Counter(record[name] for record in records)
        shares = [f"{value} ({count} tests)" for value, count in counts.items()]
        versions[name] = ", ".join(shares) if len(counts) > 1 else next(iter(counts))
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu-report.json").write_text(as_json(records, versions))
    (out / "gpu-report.md").write_text(markdown(records, versions))


def main() -> int:
    """Run, write, and return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--again", nargs="+", metavar="TEST", help="run these alone")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", default=())
    options, rest = parser.parse_known_args()
    file = options.out / "gpu-report.json"
    is_kept = file.exists() and (options.again or options.merge)
    versions, records = _read(file) if is_kept else ({}, [])
    for other in options.merge:
        versions, found = _read(other)
        records = merged(records, [r for r in found if not _has_failed(r)])
    if not options.merge:
        versions = environment()
        own = {name: versions[name] for name in _OWN}
        found = run_tests(options.again or FOLDERS, rest)
        records = merged(records, [{**record, **own} for record in found])
    _write(options.out, records, versions)
    return int(any(map(_has_failed, records)))


def _has_failed(record: dict[str, Any]) -> bool:
    return record["outcome"] in ("failure", "error")


if __name__ == "__main__":
    raise SystemExit(main())
