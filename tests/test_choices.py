# SPDX-License-Identifier: Apache-2.0
"""Do choices files read back what was written, and refuse what is not one?"""

import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import pytest

from jax_cudnn import GraphError, LibraryError, choices, matmul, plans
from jax_cudnn.choices import Choice, ChoiceTable, Key, key_of
from jax_cudnn.graph import Target
from jax_cudnn.lowering import traced_graphs

_TIMES = st.none() | st.floats(0.01, 1e6)
_CHOICES = st.builds(
    Choice,
    op=st.text(),
    operands=st.text(),
    implementation=st.sampled_from(["cudnn", "xla"]),
    candidate=st.integers(0, 9),
    plan=st.text(),
    cudnn_us=_TIMES,
    first_ratio=_TIMES,
    xla_us=_TIMES,
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a choices file"),
        ("[]", "is not a choices file"),
        ('{"schema": 2, "choices": []}', r"schema 2 is not 1"),
        ('{"schema": 1, "choices": [{"device": "x"}]}', "is not a choices file"),
        (
            '{"schema": 1, "choices": [{"device": "x", "cudnn": 1, "graph": "g",'
            ' "op": "", "operands": "", "implementation": "torch"}]}',
            "implementation 'torch'",
        ),
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
