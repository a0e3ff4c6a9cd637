# SPDX-License-Identifier: Apache-2.0
"""Tests that a choices file is read back as written, and others are refused."""

import copy
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import pytest

from jax_cudnn import GraphError, LibraryError, cache, choices, matmul, plans
from jax_cudnn.choices import Choice, ChoiceTable, Key, key_of
from jax_cudnn.graph import Target
from jax_cudnn.lowering import traced_graphs
from tests.common import forked

pytestmark = pytest.mark.once

_TIMES = st.none() | st.floats(0.01, 1e6)
_CHOICES = st.builds(
    Choice,
    op=st.text(),
    operands=st.text(),
    implementation=st.sampled_from(["cudnn", "xla"]),
    plan=st.text(),
    rewritten=st.text(),
    cudnn_us=_TIMES,
    first_ratio=_TIMES,
    xla_us=_TIMES,
    contenders_us=st.dictionaries(st.text(), st.floats(0.01, 1e6), max_size=2).map(
        lambda times: tuple(sorted(times.items()))
    ),
)
_KEYS = st.builds(Key, st.text(), st.integers(0, 10**6), st.text())


@hypothesis.given(st.dictionaries(_KEYS, _CHOICES, max_size=5), st.text())
def test_a_file_reads_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[Key, Choice], made: str
) -> None:
    path = tmp_path_factory.mktemp("choices") / "choices.json"
    choices.write(path, entries, made)
    assert choices.read(path) == entries
    assert json.loads(path.read_text())["made"] == made


def test_a_file_has_one_sorted_line_an_entry(tmp_path: Path) -> None:
    choice = Choice(op="matmul", operands="bf16[2,3]", implementation="xla", xla_us=2.5)
    entries = {Key("H200", 91900, digest): choice for digest in ("b", "a")}
    choices.write(tmp_path / "choices.json", entries, "by hand")
    lines = (tmp_path / "choices.json").read_text().splitlines()
    assert len(lines) == 4
    assert ['"graph": "a"' in line for line in lines[1:3]] == [True, False]


def _entry_text(**changes: object) -> str:
    """Return a choices file of one entry, of which some fields are wrong."""
    entry = {"device": "x", "cudnn": 1, "graph": "g", "op": "", "operands": ""}
    right = {**entry, "implementation": "xla", "plan": ""}
    return json.dumps({"schema": 2, "choices": [{**right, **changes}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a choices file"),
        ("[]", "is not a choices file"),
        ('{"schema": 1, "choices": []}', r"schema 1 is not 2"),
        ('{"schema": 2, "choices": [{"device": "x"}]}', "is not a choices file"),
        (
            '{"schema": 2, "choices": [{"device": "x", "cudnn": 1, "graph": "g",'
            ' "op": "", "operands": "", "implementation": "torch"}]}',
            "implementation 'torch'",
        ),
        (_entry_text(plan=7), r"TypeError\(.* are strings"),
        (_entry_text(device=None), r"TypeError\(.* are strings"),
        (_entry_text(cudnn=-1), "-1 is not a version"),
        (_entry_text(cudnn=True), "True is not a version"),
        (_entry_text(rewritten=0), r"TypeError\(.* are strings"),
        (_entry_text(xla_us="fast"), "'fast' is not a time"),
        (_entry_text(xla_us=math.nan), "nan is not a time"),
        (_entry_text(contenders_us={"other": None}), "None is not a time"),
        (_entry_text(contenders_us=[]), r"contenders_us is \[\]"),
        (_entry_text(colour="blue"), "is not a choices file"),
        ("[" * 100_000, "is not a choices file: RecursionError"),
        ('{"schema": 2, "choices": [3]}', "is not a choices file"),
        ("\xff", "is not a choices file: UnicodeDecodeError"),
    ],
)
def test_what_is_not_a_choices_file_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "choices.json"
    path.write_text(text)
    with pytest.raises(GraphError, match=message):
        plans.load_choices(path)


def test_later_choices_go_before_earlier_ones() -> None:
    table = ChoiceTable()
    key = Key("GPU", 1, "graph")
    for implementation in ("cudnn", "xla"):
        version = table.version
        choice = Choice(op="", operands="", implementation=implementation)
        table.add({key: choice})
        assert table.all() == {key: choice}
        assert table.version > version
    table.clear()
    assert not table.all()


def test_the_key_is_the_graph_and_the_gpu_and_the_library() -> None:
    def key(rows: int, name: str = "H200", cudnn: int = 91900) -> Key:
        ((graph, _, _),) = traced_graphs(matmul, jnp.ones((rows, 4)), jnp.ones((4, 5)))
        target = Target(name=name, sm_version=90, sm_count=1, cudnn_version=cudnn)
        return key_of(graph, target)

    assert key(3) == key(3)
    assert len({key(3), key(2), key(3, "H100"), key(3, cudnn=92000)}) == 4


def test_shipped_choices_are_read() -> None:
    for path in (Path(choices.__file__).parent / "data").glob("*.json"):
        assert choices.read(path), path


def test_tuning_needs_a_gpu() -> None:
    with pytest.raises(LibraryError, match="needs an NVIDIA GPU; JAX sees none here"):
        plans.autotune(lambda x: matmul(x, x), jnp.ones((4, 4)))


_DAMAGEABLE = choices.to_text(
    {
        Key("H200", 91900, graph): Choice(
            op="matmul",
            operands="bf16[2,3]",
            implementation="xla",
            xla_us=2.5,
            contenders_us=(("other 1.0", 3.5),),
        )
        for graph in "ab"
    },
    "by hand",
)
_ODD = (
    *(None, True, 0, -1, 10**400, 1.5, math.inf, math.nan, "", "x"),
    *([], ["a"], [["a", 1]], {}, {"a": 1}, {"a": None}, {"a": {}}),
)


def _assert_refused_or_well_formed(data: bytes) -> None:
    try:
        found = choices.from_bytes(data, "here")
    except GraphError as error:
        assert str(error).startswith("here")  # noqa: PT017
        return
    again = choices.to_text(found, "").encode()
    assert choices.from_bytes(again, "here") == found
    for choice in found.values():
        assert choice.without_contenders().implementation in choices.OWN
        assert all(f"{us:.2f}" for us in choice.times_us.values())


def _with_odd_values(tree: Any) -> Iterator[Any]:
    """Yield a JSON tree again and again, each time with one other value in it."""
    yield from _ODD
    for place in tree if isinstance(tree, dict) else range(len(tree)):
        inner = tree[place]
        odd = _with_odd_values(inner) if isinstance(inner, dict | list) else _ODD
        for value in odd:
            changed = copy.copy(tree)
            changed[place] = value
            yield changed


def test_a_value_of_another_type_anywhere_is_refused_or_taken_for_good() -> None:
    for tree in _with_odd_values(json.loads(_DAMAGEABLE)):
        _assert_refused_or_well_formed(json.dumps(tree).encode())


def test_a_file_cut_short_anywhere_is_refused() -> None:
    whole = _DAMAGEABLE.strip().encode()
    for length in range(len(whole)):
        with pytest.raises(GraphError, match=r"^here is not a choices file"):
            choices.from_bytes(whole[:length], "here")


@hypothesis.given(st.binary(max_size=50), st.integers(0, 400), st.booleans())
def test_a_damaged_file_is_refused_or_well_formed(
    patch: bytes, place: int, cuts: bool
) -> None:
    text = _DAMAGEABLE.encode()
    damaged = text[:place] + patch + (b"" if cuts else text[place + len(patch) :])
    _assert_refused_or_well_formed(damaged)


# --- what is kept between processes ---------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Keep choices in a folder that does not exist yet."""
    path = tmp_path / "above" / "cache"
    plans.set_cache(path)
    yield path
    plans.set_cache(None)


@hypothesis.given(st.lists(st.dictionaries(_KEYS, _CHOICES, max_size=3), max_size=4))
def test_what_is_remembered_adds_up(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[dict[Key, Choice]]
) -> None:
    before = choices.table().all()
    plans.set_cache(tmp_path_factory.mktemp("cache"))
    try:
        expected: dict[Key, Choice] = {}
        for found in rounds:
            choices.remember(found)
            expected |= found
            assert choices.kept() == expected
        assert choices.table().all() == {**before, **expected}
    finally:
        plans.set_cache(None)
        choices.table().clear()
        choices.table().add(before)


_XLA = Choice(op="op", operands="", implementation="xla")


def _kept_in(folder: Path) -> Path:
    path = choices.kept_file()
    assert path is not None
    assert path.parent == folder
    return path


def test_choices_of_another_form_are_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    newer = folder / f"choices-{choices.SCHEMA + 1}.json"
    newer.write_text("of a later release")
    choices.remember({Key("GPU", 1, "g"): _XLA})
    assert newer.read_text() == "of a later release"
    assert choices.kept() == {Key("GPU", 1, "g"): _XLA}
    plans.clear_cache(disk=True)
    assert {path.name for path in folder.iterdir()} == {"lock"}


def test_what_is_kept_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_MOST_KEPT", 3)
    here = [Key("GPU", 2, graph) for graph in "abcde"]
    choices.remember({Key("A", 2, "x"): _XLA, Key("GPU", 1, "x"): _XLA})
    choices.remember({here[0]: _XLA})
    assert len(choices.kept()) == 3
    choices.remember({here[1]: _XLA, here[2]: _XLA})
    assert set(choices.kept()) == set(here[:3]), "those for another GPU or cuDNN went"
    choices.remember(dict.fromkeys(here[1:], _XLA))
    assert set(choices.kept()) == set(here[1:]), "what is new is kept, all of it"


def test_nothing_is_made_on_disk_without_anything_to_keep(folder: Path) -> None:
    choices.remember({})
    assert choices.kept() == {}
    assert plans.cache_info().choices == 0
    assert not folder.parent.exists()
    choices.remember({Key("GPU", 1, "g"): _XLA})
    assert plans.cache_info().choices == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert _kept_in(folder).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_set_brings_its_choices(folder: Path, tmp_path: Path) -> None:
    key = Key("GPU", 1, "g")
    choices.remember({key: _XLA})
    choices.table().clear()
    plans.set_cache(tmp_path / "another")
    assert key not in choices.table().all()
    plans.set_cache(folder)
    assert choices.table().all()[key] == _XLA
    plans.clear_cache(disk=True)
    assert choices.kept() == {}
    assert choices.table().all()[key] == _XLA, "the process keeps what it uses"


def test_a_bad_file_is_a_debug_line_and_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    _kept_in(folder).write_text("{]")
    with caplog.at_level("DEBUG", "jax_cudnn"):
        assert choices.kept() == {}
    (record,) = caplog.records
    assert record.levelname == "DEBUG"
    assert "kept on disk are ignored" in record.message
    assert f"{_kept_in(folder)} is not a choices file" in record.message
    choices.remember({Key("GPU", 1, "g"): _XLA})
    assert choices.kept() == {Key("GPU", 1, "g"): _XLA}


@pytest.mark.parametrize("obstacle", ["folder", "file"])
def test_a_disk_that_takes_nothing_is_a_debug_line(
    folder: Path, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    if obstacle == "folder":
        folder.parent.mkdir()
        folder.write_text("in the way")
    else:
        (_kept_in(folder) / "in the way").mkdir(parents=True)
    key = Key("GPU", 2, "g")
    with caplog.at_level("DEBUG", "jax_cudnn"):
        choices.remember({key: _XLA})
    assert "choices are not kept on disk: " in caplog.records[-1].message
    assert choices.table().all()[key] == _XLA
    if obstacle == "file":
        names = {path.name for path in folder.iterdir()}
        assert names == {"lock", _kept_in(folder).name}, "no temporary file is left"


def test_a_lock_that_is_held_is_waited_for_and_then_let_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.05)
    with cache.exclusive(folder), caplog.at_level("DEBUG", "jax_cudnn"):
        choices.remember({Key("GPU", 3, "g"): _XLA})
    assert "stays locked" in caplog.records[-1].message
    assert choices.kept() == {}


def test_processes_that_tune_at_once_lose_nothing(folder: Path) -> None:
    done = forked.run(
        "tests.tuning.remembering", str(folder), "4", "20", environment=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert set(choices.kept()) == {
        Key(str(number), i, "g") for number in range(4) for i in range(20)
    }
