# SPDX-License-Identifier: Apache-2.0
"""Tests that the outputs in the guides of docs/ are true without a GPU.

tests/tools/gpu/test_docs.py runs the same snippets on a GPU, but for those that need
several devices. test_examples.py runs those of README.md and docs/index.md,
test_cache.py those of docs/plan_files.md, and `make docs` the notebooks.
"""

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import jax_cudnn
from jax_cudnn import cli, config, offline, startup
from jax_cudnn.ops.attention import layouts, qkv
from jax_cudnn.ops.common import activations
from jax_cudnn.parallel import problem, schedule
from tests.tools.script import load_script
from tests.tools.snippets import DOCS, GUIDES, OFF_GPU, run, snippets

PAGES = (*GUIDES, *OFF_GPU)


# Once, since all pages together take 157 s of CPU (with JAX 0.10).
@pytest.mark.once
@pytest.mark.parametrize("name", PAGES)
def test_snippets_do_what_the_page_shows(name: str, tmp_path: Path) -> None:
    page = DOCS / name
    found, outcomes = snippets(page), run(page, tmp_path, "cpu")
    obstacle = offline.obstacle()
    assert len(found) == page.read_text().count("```python\n") == len(outcomes)
    assert found
    for snippet, outcome in zip(found, outcomes, strict=True):
        where = f"{name}, line {snippet.line}"
        if snippet.needs_gpu:
            assert outcome.kind == "LibraryError", (where, outcome)
            assert "JAX sees none" in outcome.error, where
            continue
        if snippet.needs_cudnn:
            if obstacle is None:
                assert not outcome.error, f"{where}\n{outcome.error}"
            else:
                assert outcome.kind == "LibraryError", (where, outcome)
                assert obstacle in outcome.error, where
            continue
        assert not outcome.error, f"{where}\n{outcome.error}"
        assert outcome.output == (snippet.output or ""), where


@pytest.mark.parametrize("name", PAGES)
def test_every_text_block_is_a_snippet_s_output(name: str) -> None:
    found = [each for each in snippets(DOCS / name) if each.output is not None]
    assert len(found) == (DOCS / name).read_text().count("```text\n")
    assert not any(each.needs_gpu or each.needs_cudnn for each in found)


def _commands(name: str) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def test_commands_are_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax_cudnn.cli.bench.local_target", lambda: None)
    commands = [command for name in PAGES for command in _commands(name)]
    assert len(commands) == 12
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == startup.COMMAND
        if arguments[0] in ("doctor", "calibrate"):
            continue  # test_cli.py and tests/calibration run them
        # 2 would be for arguments that are wrong on every machine.
        assert cli.main(arguments) == 1, command
        told = capsys.readouterr()
        if arguments[0] == "bench":
            assert "bench needs an NVIDIA GPU" in told.err
        elif offline.obstacle() is None:
            assert "what would work: cast the operands" in told.out
        else:
            assert 'pip install ".[gpuless]"' in told.err


def test_every_page_with_snippets_is_run() -> None:
    elsewhere = {"index.md", "plan_files.md"}  # see the docstring
    pages = {page.name for page in DOCS.glob("*.md") if snippets(page)}
    assert pages == {*PAGES, *elsewhere}


@pytest.mark.once
def test_how_to_cite_names_the_version() -> None:
    text = (DOCS / "cite.md").read_text()
    assert re.findall(r"version = \{(.*)\}", text) == [jax_cudnn.__version__]


def test_links_lead_somewhere() -> None:
    root = DOCS.parent
    pages = [*DOCS.rglob("*.md"), *root.glob("*.md")]
    assert len(pages) > 60
    for page in pages:
        for link in re.findall(r"\]\(((?!https:)[^)\s]+)\)", page.read_text()):
            target, _, anchor = link.partition("#")
            path = page.parent / target if target else page
            assert path.exists(), (page, link)
            if anchor:
                # Sphinx includes these where they are to be read.
                source = _INCLUDED.get(path.name, path)
                headings = re.findall(r"^#+ (.*)$", source.read_text(), re.M)
                assert anchor in map(_anchor, headings), (page, link)


_INCLUDED = {
    "contributing.md": DOCS.parent / "CONTRIBUTING.md",
    "changelog.md": DOCS.parent / "CHANGELOG.md",
}


def _anchor(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.replace(" ", "-")


def test_internals_name_the_page_of_every_file() -> None:
    root = DOCS.parent
    homes = (root / "jax_cudnn", root)
    page = (DOCS / "internals" / "index.md").read_text()
    table = page.partition("## Which page explains a file")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*\]\(.*) \|$", table, re.M)
    explained: set[Path] = set()
    for names, _ in rows:
        for name in re.findall(r"`([^`]+)`", names):
            found = next((x for x in (list(h.glob(name)) for h in homes) if x), None)
            assert found, f"{name} is not there"
            explained.update(found)
    sources = [*(root / "jax_cudnn").rglob("*.py"), *(root / "ffi").rglob("*.[ch]*")]
    assert len(sources) > 300
    for file in sources:
        if file.name != "__init__.py":
            assert explained & {file, *file.parents}, f"no page explains {file}"


def test_users_find_few_pages_of_benchmarks() -> None:
    assert len(list((DOCS / "benchmarks").glob("*.md"))) <= 9


# --- tables ---------------------------------------------------------------------------


def test_files_that_the_page_of_bugs_names_are_there() -> None:
    root = DOCS.parent
    text = (DOCS / "known_bugs.md").read_text()
    names = re.findall(r"`([^` ]+\.(?:py|cc))`", text)
    assert len(names) > 30
    homes = (root, root / "jax_cudnn" / "legalize")
    assert not [x for x in names if not any((home / x).is_file() for home in homes)]


def test_the_tables_of_plans_are_what_the_data_say() -> None:
    tables = load_script("plan_tables")
    advice = "run python -m scripts.plan_tables"
    assert (DOCS / "benchmarks" / "plans.md").read_text() == tables.written(), advice
    text = (DOCS / "plans.md").read_text()
    assert tables.guide(text) == text, advice


# --- site -----------------------------------------------------------------------------


@pytest.mark.once
def test_every_public_name_is_in_the_reference() -> None:
    pytest.importorskip("flax", reason="Flax is not installed")
    shown = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    packages = ("f8", "flax", "flax.linen", "flax.nnx", "kv_cache", "masks", "parallel")
    adapters = ("adapters.equinox", "adapters.keras", "adapters.maxtext")
    for name in (
        "",
        "checkpoint_policies",
        *packages,
        "plans",
        "score_mods",
        *adapters,
    ):
        module = importlib.import_module(f"jax_cudnn.{name}".removesuffix("."))
        for public in module.__all__:
            full = f"{module.__name__}.{public}"
            is_entry = re.search(rf":: {re.escape(full)}$", shown, re.M)
            assert is_entry or inspect.ismodule(getattr(module, public)), full


def test_pages_of_the_reference_open_with_a_table_of_their_entries() -> None:
    pages = set((DOCS / "api").glob("*.md")) - {DOCS / "api" / "types.md"}
    assert len(pages) > 13
    for page in pages:
        text = page.read_text()
        entries = re.findall(
            r"^\.\. auto(?:function|class|exception):: (\S+)$", text, re.M
        )
        table = text.partition("autosummary::")[2].partition("```")[0]
        opening = {name.split(".")[-1] for name in table.split()}
        # A class that others inherit from, and that is not public.
        hidden = {"jax_cudnn.plans.calls.CallSummary"}
        for entry in {*entries} - hidden:
            assert entry.split(".")[-1] in opening, (page, entry)


def test_the_page_of_types_names_every_value() -> None:
    sections = re.split(r"^## ", (DOCS / "api" / "types.md").read_text(), flags=re.M)
    # The function of that name hides its module.
    causal = importlib.import_module("jax_cudnn.ops.products.causal_conv1d")
    kinds = {
        "Implementation": config.Implementation,
        "Activation": activations.ActivationName,
        "Layout": layouts.Layout,
        "PageLayout": layouts.PageLayout,
        "QkvLayout": qkv.QkvLayout,
        "Order": schedule.Order,
        "Method": problem.Method,
        "CausalLayout": causal.CausalLayout,
    }
    for name, kind in kinds.items():
        (section,) = (each for each in sections if each.startswith(f"{name}\n"))
        assert set(re.findall(r'`"(\w+)"`', section)) == set(get_args(kind)), name


@pytest.mark.once
def test_pictures_show_what_the_data_say() -> None:
    pictures, advice = load_script("pictures"), "run python -m scripts.pictures"
    for name, shown in pictures.contents().items():
        text = (pictures.FOLDER / f"{name}.svg").read_text()
        assert pictures.digest(shown) in text, (name, advice)
    for page in pictures.PAGES:
        assert pictures.with_gain(page.read_text()) == page.read_text(), advice


def test_what_models_gain_is_told_by_the_faster_plain_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pictures = load_script("pictures")

    def row(
        model: str,
        contender: str,
        ms: float,
        mib: int,
        ratio: float,
        what: str = "train",
    ) -> dict[str, object]:
        bounds = {"ratio": ratio, "ratio_low": ratio - 0.01, "ratio_high": ratio + 0.01}
        about = {"model": model, "what": what, "contender": contender}
        return {**about, "ms": ms, "mib": mib, "GPU": "NVIDIA H200", **bounds}

    rows = [
        row("even", "plain JAX", 1.0, 100, 1.0),
        row("even", "untuned", 1.0, 100, 1.004),
        row("experts", "plain JAX", 9.0, 70, 1.8),
        row("experts", "plain JAX, all experts", 5.0, 90, 1.0),
        row("experts", "untuned", 4.0, 45, 0.8),
        row("experts", "tuned", 2.0, 45, 0.4),
        row("experts", "untuned", 1.0, 1, 0.1, "infer"),
        row("worse", "plain JAX", 1.0, 100, 1.0),
        row("worse", "untuned", 1.2, 130, 1.2),
        row("wide", "plain JAX", 1.0, 100, 1.0),
        row("wide", "untuned", 1.1, 100, 1.1),
    ]
    monkeypatch.setattr(pictures, "_read", {"models": {"rows": rows}}.__getitem__)
    told = pictures.gain()
    assert "cuDNN attention, on H200s:\n\n- experts: 20 % less time and half of" in told
    assert told.count("\n- ") == 1
    assert told.endswith(
        "Of 4 models, 1 takes at least 5 % less time, and 1 needs at least 5 % less "
        "memory. But wide takes 10 % more time, worse takes 20 % more time and worse "
        "needs 30 % more memory."
    )
    (panel,) = pictures.panels_of_steps()
    assert [name for name, _ in panel.rows] == ["experts", "even", "wide", "worse"]


def test_pictures_can_be_read_on_a_phone_and_in_the_dark() -> None:
    root = DOCS / "pictures"
    for file in root.glob("*.svg"):
        style, _, drawn = file.read_text().partition("</style>")
        assert "prefers-color-scheme: dark" in style, file
        # All colours are variables, of which no two look alike.
        assert not re.search(r"#[0-9a-f]{6}", drawn), file
        for scheme in re.findall(r":root {(.*)}", style):
            colours = re.findall(r"#\w+", scheme)
            assert len(colours) == len(set(colours)) > 6, file
        # A phone of 390 pixels gives a picture 358 of them.
        box = re.search(r'viewBox="0 0 ([\d.]+) ', style)
        assert box is not None
        sizes = [float(x) for x in re.findall(r"font-size: ([\d.]+)px", drawn)]
        assert min(sizes) * 358 / float(box[1]) > 10.5, file


def test_every_extra_for_users_is_in_the_guide_to_installing() -> None:
    root = DOCS.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    table = (DOCS / "install.md").read_text().partition("| extra | adds |")[2]
    told = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.M)))
    # What those need who change the package.
    assert set(told) == set(extras["optional-dependencies"]) - {"docs", "test"}


def test_jax_says_which_package_a_serialised_program_needs() -> None:
    program = """
import sys
sys.modules["flatbuffers"] = None
import jax, jax.numpy as jnp, jax_cudnn
checks = jax_cudnn.EXPORT_SAFETY_CHECKS
f = jax.jit(lambda x: jax_cudnn.matmul(x, x))
exported = jax.export.export(f, disabled_checks=checks)(jnp.ones((4, 4)))
try:
    exported.serialize()
except ImportError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert "Please install 'flatbuffers'" in result.stdout
