# SPDX-License-Identifier: Apache-2.0
"""Tests that benchmarks and scripts import, and that their contenders agree.

Benchmarks run on a GPU, so nothing else here says that what they import is still there.
"""

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.tools.benchmarks.running import run_module
from tests.tools.sources import ROOT

_MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "__init__.py"
)

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", _MODULES)
def test_it_imports(name: str) -> None:
    for package in ("flax", "optax", "matplotlib"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    importlib.import_module(name)


def test_programs_are_found_by_their_short_names() -> None:
    """And nothing imports a module by one, which would load it twice."""
    folder = ROOT / "benchmarks"
    programs = [path for path in folder.glob("*/*.py") if path.name[0] != "_"]
    short = {path.stem for path in programs}
    assert len(short) == len(programs) > 40
    assert not short & {path.name for path in folder.iterdir()}
    for path in programs:
        found = importlib.util.find_spec(f"benchmarks.{path.stem}")
        assert found is not None
        assert found.origin == str(path)
    pattern = re.compile(
        r"benchmarks\.(\w+)\s+import|import_module\(.benchmarks\.(\w+).\)"
    )
    named = {
        name
        for top in ("benchmarks", "scripts", "tests", "examples")
        for path in (ROOT / top).rglob("*.py")
        for match in pattern.findall(path.read_text(encoding="utf-8"))
        for name in match
    }
    assert not short & named


@pytest.mark.thorough
def test_models_compute_the_same_by_each_kit(tmp_path: Path) -> None:
    pytest.importorskip("optax", reason="optax is not installed")
    flags = ("--small", "--no-torch", "--out", str(tmp_path))
    only = "GPT|Llama|decode|ViT|ConvNeXt|ResNet|3-D|Mixtral|per-example"
    done = run_module("benchmarks.models", "--only", only, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "models.json").read_text())["rows"]
    found = {(row["model"], row["what"], row["contender"]) for row in rows}
    assert len(found) == len(rows) == 32
    contenders = {contender for *_, contender in found}
    others = {"untuned", "untuned, f8"}
    assert contenders == {"plain JAX", "plain JAX, all experts", *others}
    page = (tmp_path / "models.md").read_text()
    assert all(f"| {model} |" in page for model, *_ in found)


# Those that are trained beside plain JAX alone, by the names of every.py.
_UNTUNED = (
    "BERT-base", "Gemma-2-like", "Mixtral-like", "T5-like", "Swin-like",
    "DiT-XL/2 blocks", "EfficientNet-B0", "MLP-Mixer-B/16", "per-example gradients",
    "diffusion U-Net", "Whisper-like", "WaveNet",
)  # fmt: skip


def test_models_without_a_test_are_none() -> None:
    pytest.importorskip("optax", reason="optax is not installed")
    every = importlib.import_module("benchmarks.models.every").every
    for small in (True, False):
        found = [model.name for model in every(small=small) if model.untuned_only]
        assert tuple(found) == _UNTUNED


@pytest.mark.thorough
@pytest.mark.parametrize("name", _UNTUNED)
def test_a_model_has_the_loss_and_gradients_of_plain_jax(name: str) -> None:
    """In f32, where both are the same up to the order of sums."""
    pytest.importorskip("optax", reason="optax is not installed")
    every, jax_steps, plain_kit, cudnn_kit = (
        importlib.import_module(f"benchmarks.models.{module}")
        for module in ("every", "jax_steps", "plain_kit", "cudnn_kit")
    )
    model = next(x for x in every.every(small=True) if x.name == name)
    kits = [plain_kit.PlainKit(), cudnn_kit.CudnnKit()]
    if name == "Mixtral-like":
        kits.append(plain_kit.AllExpertsKit())
    found: list[Any] = []
    # As benchmarks are run, without the strictness of these tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for kit in kits:
            kit.dtype = jnp.float32
            weights, _, batch = jax_steps.drawn(model)
            given = {key: kit.operand(x) for key, x in batch.items()}
            ask = jax_steps.with_gradients(model, kit)
            found.append(jax.jit(ask)(list(map(jnp.asarray, weights)), given))
    (loss, gradients), *others = found
    whole = float(jnp.linalg.norm(jnp.stack([*map(jnp.linalg.norm, gradients)])))
    for other, its_gradients in others:
        assert float(other) == pytest.approx(float(loss), rel=1e-5)
        assert len(its_gradients) == len(gradients) > 5
        for own, its in zip(gradients, its_gradients, strict=True):
            # A bias that the next norm takes away has a gradient of rounding alone.
            least = max(float(jnp.linalg.norm(own)), 1e-3 * whole)
            assert float(jnp.linalg.norm(own - its)) <= 1e-4 * least


@pytest.mark.parametrize("text", ["4/4", "5/4", "2", "a/b", "-1/2"])
def test_a_part_that_there_is_not_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.harness import program

    made = program.parser("Parts.")
    program.add_cases(made)
    with pytest.raises(SystemExit):
        made.parse_args([f"--part={text}"])
    assert f"argument --part: invalid _part value: '{text}'" in capsys.readouterr().err


@pytest.mark.thorough
def test_compile_times_are_told_of_each_model(tmp_path: Path) -> None:
    pytest.importorskip("optax", reason="optax is not installed")
    flags = ("--small", "--only", "T5|GPT", "--out", str(tmp_path))
    done = run_module("benchmarks.compile_times", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "compile_times.json").read_text())["rows"]
    found = [(row["model"], row["contender"]) for row in rows]
    assert found == [
        (model, contender)
        for model in ("GPT-2 small", "T5-like")
        for contender in ("plain JAX", "jax_cudnn")
    ]
    assert all(row["compile_s"] > 0 and row["characters"] > 1000 for row in rows)
    page = (tmp_path / "compile_times.md").read_text()
    assert "| T5-like | 2 x 16 |" in page
    assert "Goal, at most 1.2 of plain JAX's time or 2 s more: " in page


@pytest.mark.parametrize(
    ("name", "cell", "other", "contenders"),
    [
        (
            "norms",
            ("rms_norm", "5 x 8"),
            ("layer_norm", "4 x 8"),
            {"xla", "jax_cudnn by xla", "untuned", "cudnn"},
        ),
        (
            "operations",
            ("average pool 2x2/2", "2 x 12 x 12 x 8"),
            ("max pool 3x3/2", "2 x 12 x 12 x 8"),
            {"xla", "untuned"},
        ),
        (
            "conv_reports",
            (
                "jax 29875, dilated 1-D convolutions; sizes of ours",
                "2 x 12 x 6, to 6, window 3, dilation 2, float32",
            ),
            (
                "jax 23713, a depthwise convolution of Flax",
                "1 x 12 x 12 x 4, to 4, window 3, 4 groups, float32",
            ),
            {"xla", "xla, channels first", "untuned"},
        ),
    ],
)
def test_a_contest_writes_rows_and_keeps_those_of_other_cells(
    name: str,
    cell: tuple[str, str],
    other: tuple[str, str],
    contenders: set[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / f"{name}.json"
    rows = [
        {
            "operation": operation,
            "size": other[1],
            "what": "forward",
            "contender": "xla",
            "failure": "old",
        }
        for operation in (other[0], "of an older script")
    ]
    file.write_text(json.dumps({"environment": {"GPU": "NVIDIA A7"}, "rows": rows}))
    only = "^" + " ".join(cell)
    flags = ("--small", "--no-torch", "--only", only, "--out", str(tmp_path))
    done = run_module(f"benchmarks.{name}", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    kept, *new = json.loads(file.read_text())["rows"]
    assert kept == {"GPU": "NVIDIA A7", **rows[0]}
    assert {(row["operation"], row["size"]) for row in new} == {cell}
    assert {row["what"] for row in new} == {"forward", "with gradients"}
    assert {row["contender"] for row in new} == contenders
    assert len(new) == 2 * len(contenders)
    page = (tmp_path / f"{name}.md").read_text()
    assert all(f"| {' | '.join(each)} |" in page for each in (cell, other))
    assert "of an older script" not in page


def test_fusion_keeps_the_cells_of_other_runs(tmp_path: Path) -> None:
    fusion = importlib.import_module("benchmarks.products.fusion")
    only = r"conv 1x1 .*silu|mlp: matmul \(64,4096"
    flags = ("--small", "--no-torch", "--only", only, "--out", str(tmp_path))
    done = run_module("benchmarks.fusion", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    file = tmp_path / "fusion.json"
    data = json.loads(file.read_text())
    conv, product = data["cells"]
    assert (conv["group"], product["group"]) == ("conv", "mlp")
    assert conv["results"].keys() == {"fwd", "fwd+bwd"}
    assert product["results"].keys() == {"fwd"}
    assert product["results"]["fwd"]["xla_form"].startswith("scaled ")
    for found in (*conv["results"].values(), *product["results"].values()):
        assert found["contenders"].keys() == {"XLA", "untuned"}
        assert found["contenders"]["XLA"]["ratio"] == 1
        assert {call["implementation"] for call in found["calls"]} == {"xla"}
    page = (tmp_path / "fusion.md").read_text()
    assert f"| {conv['name']} | " in page
    assert f"| {product['name']} | " in page

    # A later run fails with one of them, and another one measures it.
    first, later, last = data["runs"][0], {"date": "later"}, {"date": "last"}
    failure = {"cell": product["cell"], "error": "no memory"}
    failed = fusion.joined(file, first | later, {"cells": [], "failures": [failure]})
    assert failed == {**data, "runs": [first, first | later], "failures": [failure]}
    file.write_text(json.dumps(failed))
    again = fusion.joined(file, first | last, {"cells": [product], "failures": []})
    assert again["runs"] == [first, first | later, first | last]
    assert again["cells"] == [conv, {**product, "run": 2}]
    assert again["failures"] == []


def test_parts_have_all_cells_once(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.harness import contest_report
    from benchmarks.products import conv_report_cells

    cells = conv_report_cells.cells(small=True)
    report = contest_report.page_of((), name="reports", title="")
    found: list[str] = []
    for part in ("0/3", "1/3", "2/3"):
        options = contest_report.parser("Parts.").parse_args(["--list", "--part", part])
        contest_report.run(report, cells, options)
        listed = capsys.readouterr().out.splitlines()
        assert listed == [cell.name for cell in cells[int(part[0]) :: 3]]
        found += listed
    assert sorted(found) == sorted({cell.name for cell in cells})


def test_a_contender_that_fails_has_its_reason_and_others_go_on() -> None:
    from benchmarks.harness import contest, contest_report

    def refuses(x: Any) -> Any:
        raise NotImplementedError("not of this size\nand more")

    cell = contest.Cell(
        operation="sine",
        size="5 x 7",
        operands=(contest.Operand((5, 7)),),
        rivals={
            "xla": contest.Way(function=jnp.sin),
            "tokamax": contest.Way(function=refuses),
        },
        ours=lambda: lambda x: jnp.sin(x) * 1.5,
        first=lambda x: -jnp.sin(-x),
        has_gradients=False,
        goals={"forward": {"cudnn": 1e9}},
    )
    settings = contest.Settings(
        with_torch=False, with_tuning=False, most_sets=2, rounds=1, round_ms=0.1
    )
    rows = {row["contender"]: row for row in contest.measure(cell, settings, {})}
    assert list(rows) == ["xla", "tokamax", "untuned", "cudnn"]
    assert rows["tokamax"]["failure"] == "NotImplementedError: not of this size"
    assert rows["untuned"]["failure"].startswith(
        "WrongError: results are wrong by 5.0e-01"
    )
    assert rows["xla"]["ratio"] == 1
    assert rows["xla"]["errors"] < [1e-2]
    verdicts = [contest_report.verdict(row) for row in rows.values()]
    assert verdicts == ["", "", "≤ 1.05 failed", "≤ 1000000000.00 met"]

    report = contest_report.page_of((), name="sines", title="Sines")
    named = [{"GPU": "NVIDIA A7", **row} for row in rows.values()]
    data = {"environment": {"GPU": "NVIDIA A7"}, "rows": named}
    page = report(data)
    assert "- `untuned` meets 0 of 1 goals. Missed: sine 5 x 7 forward failed." in page
    assert "in the table: 2." in page
    assert "| sine | 5 x 7 | A7 | forward | xla |" in page
    assert "| failed: NotImplementedError: not of this size |  |  |" in page


@pytest.mark.parametrize(("ratio", "told"), [(0.554, "met"), (0.556, "missed")])
def test_a_goal_is_met_to_two_digits(ratio: float, told: str) -> None:
    from benchmarks.harness.contest_report import verdict

    assert verdict({"goal": 0.55, "ratio": ratio}) == f"≤ 0.55 {told}"


def test_pages_are_what_programs_print_of_their_data() -> None:
    for package in ("flax", "optax"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    pages = dict(importlib.import_module("benchmarks.harness.pages").printed())
    assert len(pages) > 20
    stale = [page.name for page, text in pages.items() if page.read_text() != text]
    assert stale == [], "run `python -m benchmarks.pages`"


def test_new_rows_replace_those_of_the_same_names() -> None:
    renewed = importlib.import_module("benchmarks.harness.records").renewed
    texts = ["b train 1", "a infer 1", "a train 1", "a train 2"]
    rows = [dict(zip(("model", "what", "us"), x.split(), strict=True)) for x in texts]
    new = [{"model": "a", "what": "train", "us": "3"}]
    found = renewed(rows, new, ["model", "what"], ["b", "a"])
    told = [" ".join(row.values()) for row in found]
    assert told == ["b train 1", "a infer 1", "a train 3"]
    assert renewed(rows, new, ["model"], ["a", "b"]) == [*new, rows[0]]
    # Others are dropped, and without an order rows stay where they are.
    assert renewed(rows, new, ["model"], ["a"]) == new
    told = [" ".join(row.values()) for row in renewed(rows, new, ["model", "what"])]
    assert told == ["b train 1", "a infer 1", "a train 3"]
    found = renewed(rows, new, ["model", "what"], "keys")
    told = [" ".join(row.values()) for row in found]
    assert told == ["a infer 1", "a train 3", "b train 1"]


def test_rows_that_are_kept_say_their_driver_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("benchmarks.harness.program")
    records = importlib.import_module("benchmarks.harness.records")
    page = importlib.import_module("benchmarks.harness.page")

    def run(us: int, *flags: str, **versions: str) -> dict[str, Any]:
        made = {"GPU": "H100", "driver": "580", "JAX": "0.11", "cuDNN": "9", **versions}
        monkeypatch.setattr(records, "environment", lambda: made)
        monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path), *flags])
        module.run_benchmark(
            "What it asks.",
            lambda small: ["a", "b"],
            lambda cases: ({"case": each, "us": {"us": us}} for each in cases),
            page.Page(name="data", title="Rows", lines=lambda found: ["page"]),
        )
        return json.loads((tmp_path / "data.json").read_text())

    run(1)
    run(2, "--only", "b", driver="590")
    found = run(3, "--only", "b")
    assert [row["us"]["us"] for row in found["rows"]] == [1, 3]
    assert found["environment"]["driver"] == "580 or 590"
    assert run(4, driver="600")["environment"]["driver"] == "600"
    with pytest.raises(SystemExit, match=r"measured with cuDNN 9, and this is 10\."):
        run(5, "--only", "b", cuDNN="10")
    assert len(run(6, "--part", "1/2")["rows"]) == 2
    (tmp_path / "data.json").unlink()
    assert [row["case"] for row in run(7, "--part", "1/2")["rows"]] == ["b"]
    assert [row["case"] for row in run(8, "--part", "0/2")["rows"]] == ["b", "a"]
    with pytest.raises(SystemExit, match=r"^no case has c in it$"):
        run(9, "--only", "c")
    run(9, "--name", "newer", cuDNN="10")
    written = (tmp_path / "newer.md").read_text()
    assert written.startswith("# Rows\n\nPrinted by `python -m benchmarks.data --out ")
    assert written.endswith("\n\npage\n")
