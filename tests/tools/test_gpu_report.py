# SPDX-License-Identifier: Apache-2.0
"""Tests that the GPU report keeps the results of each pair of versions."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once

# Last on the path, so that the package is the installed one.
sys.path.append(str(Path(__file__).parents[2]))
gpu_page = importlib.import_module("scripts.gpu_page")
gpu_report = importlib.import_module("scripts.gpu_report")

_XML = """<testsuites><testsuite name="pytest">
<testcase classname="tests.norms.gpu.test_norms" name="test_a[f16]"><properties>
<property name="error ratio of output" value="0.75"/><property name="finished"
value="yes"/></properties></testcase>
<testcase classname="tests.norms.gpu.test_norms" name="test_cut_short" time="1"/>
<testcase classname="tests.norms.gpu.test_norms" name="test_b" time="1"><failure
message="AssertionError: error 3 &gt; 2">text</failure></testcase>
<testcase classname="" name="tests.tuning.gpu.test_tokamax" time="0"><skipped
message="collection skipped">text</skipped></testcase>
</testsuite></testsuites>
"""


def _run(cudnn: str, commit: str = "abc", **outcomes: str) -> dict[str, Any]:
    return {
        "environment": {"cuDNN": cudnn, "JAX": "0.12.0", "commit": commit, "GPU": "1"},
        "tests": [
            {"module": "test_norms", "test": name, "outcome": outcome, "message": "why"}
            for name, outcome in outcomes.items()
        ],
    }


def test_results_are_read_from_xml(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(_XML)
    passed, failed = gpu_report.records_of(tmp_path / "a.xml")
    assert passed["outcome"] == "passed"
    assert passed["error_ratios"] == {"output": 0.75}
    assert failed["message"] == "AssertionError: error 3 > 2"


def test_a_run_replaces_the_results_of_its_own_pair() -> None:
    runs = [_run("9.19.0", a="passed", b="failure", c="passed")]
    runs = gpu_report.with_run(runs, _run("9.28.1", a="passed", b="passed"))
    runs = gpu_report.with_run(runs, _run("9.19.0", "def", b="passed", c="skipped"))
    told = [
        (
            run["environment"]["commit"],
            [(x["test"], x["outcome"]) for x in run["tests"]],
        )
        for run in runs
    ]
    assert told == [
        ("abc", [("a", "passed"), ("c", "passed")]),  # A skip keeps what there was.
        ("abc", [("a", "passed"), ("b", "passed")]),
        ("def", [("b", "passed")]),
    ]
    assert json.loads(gpu_report.as_json(runs)) == {"runs": runs}


def test_versions_are_columns_and_failures_have_reasons() -> None:
    runs = [_run("9.28.1", a="passed", b="failure"), _run("9.9.0", a="skipped")]
    page = gpu_page.markdown(runs, [])
    assert "| file | 9.9.0, JAX 0.12.0 | 9.28.1, JAX 0.12.0 |" in page
    assert "| test_norms | 0, 1 skipped, 1 not run | 1, 1 failed |" in page
    assert "- 9.9.0: skipped: `test_norms::a`. why" in page
    assert "Unexplained:\n\n- 9.28.1: test_norms::b: why" in page
    assert gpu_page.has_unexplained(runs[0], [])
    for version, is_explained in (("9.28.1", True), ("9.19.0", False)):
        reason = {"test": "norms::b", "cuDNN": version, "reason": "a bug"}
        page = gpu_page.markdown(runs, [reason])
        assert ("- 9.28.1: failed: `test_norms::b`. a bug" in page) == is_explained
        assert ("Unexplained:\n\n- none" in page) == is_explained
        assert gpu_page.has_unexplained(runs[0], [reason]) != is_explained


def test_the_committed_report_is_what_the_script_writes() -> None:
    runs = json.loads((gpu_report.ROOT / "docs/gpu-report.json").read_text())["runs"]
    reasons = json.loads(
        (gpu_report.ROOT / "tests/common/gpu/explained.json").read_text()
    )
    page = (gpu_report.ROOT / "docs/gpu-report.md").read_text()
    assert page == gpu_page.markdown(runs, reasons)
    assert not any(gpu_page.has_unexplained(run, reasons) for run in runs)
