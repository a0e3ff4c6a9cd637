# SPDX-License-Identifier: Apache-2.0
"""Tests the arguments of the command line, and how it prints times."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import jax_cudnn
from jax_cudnn.choices import Choice
from jax_cudnn.cli import bench, calls, main
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.tuning.candidate_times import TimedCandidate
from jax_cudnn.tuning.stopwatch import Measurement
from tests.common.planner import H200, PIN, made_plan

pytestmark = pytest.mark.once


def _call(text: str) -> calls.WrittenCall:
    parser = argparse.ArgumentParser()
    calls.add_call(parser)
    return calls.call_of(parser.parse_args(text.split()))


def _kinds(text: str) -> list[str]:
    function, operands = _call(text)
    return [
        getattr(node.attributes, "mode", node.kind)
        for graph, _, _ in traced_graphs(function, *operands)
        for node in graph.nodes
    ]


# --- calls ----------------------------------------------------------------------------

_MATMUL = "jax_cudnn:matmul --args bf16[7,3] bf16[3,5]"
_SDPA = "jax_cudnn:sdpa --args bf16[2,7,6,8] bf16[2,5,3,8] bf16[2,5,3,8]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("bf16[4,128]", ("", ((4, 128), "bfloat16"))),
        (" half[ 3 , 5 ] ", ("", ((3, 5), "float16"))),
        ("f32[]", ("", ((), "float32"))),
        ("bias=float32[5]", ("bias", ((5,), "float32"))),
        ("mask=bool[1,1,7,5]", ("mask", ((1, 1, 7, 5), "bool"))),
        ("w=f8_e4m3fn[3]", ("w", ((3,), "float8_e4m3fn"))),
        ("is_causal=True", ("is_causal", True)),
        ("local_window_size=(3,None)", ("local_window_size", (3, None))),
        ("scale=-0.5", ("scale", -0.5)),
        ("activation=gelu", ("activation", "gelu")),
        ("activation='gelu'", ("activation", "gelu")),
        ("bias=None", ("bias", None)),
    ],
)
def test_arguments_are_arrays_literals_or_words(text: str, told: Any) -> None:
    name, value = calls.argument(text)
    if isinstance(value, jax.ShapeDtypeStruct):
        value = value.shape, str(value.dtype)
    assert (name, value) == told


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (_MATMUL, [(7, 3), (3, 5), (7, 5)]),
        (f"{_MATMUL} bias=bf16[5] activation=relu", [(7, 3), (3, 5), (5,), (7, 5)]),
        (
            f"{_SDPA} is_causal=True",
            [(2, 7, 6, 8), *[(2, 5, 3, 8)] * 2, (2, 7, 6, 8)],
        ),
        (
            "jax_cudnn:conv --args bf16[2,9,7,4] bf16[3,5,2,6] padding=VALID "
            "window_strides=2,2 feature_group_count=2 "
            "dimension_numbers=('NHWC','HWIO','NHWC')",
            [(2, 9, 7, 4), (3, 5, 2, 6), (2, 4, 2, 6)],
        ),
    ],
)
def test_arrays_become_operands(text: str, shapes: list[tuple[int, ...]]) -> None:
    function, operands = _call(text)
    found = (*operands, jax.eval_shape(function, *operands))
    assert [each.shape for each in found] == shapes
    assert {str(each.dtype) for each in found} == {"bfloat16"}


def test_weights_of_8_bits_have_a_scale_for_each_column() -> None:
    text = "jax_cudnn:matmul --args bf16[7,3] int8[3,5] scale_b=f32[5] bias=bf16[5]"
    function, operands = _call(text)
    ((graph, _, _),) = traced_graphs(function, *operands)
    found = [(t.dtype, t.dims) for t in graph.input_tensors]
    assert found == [
        ("bf16", (1, 7, 3)),
        ("i8", (1, 3, 5)),
        ("f32", (1, 1, 5)),
        ("bf16", (1, 1, 5)),
    ]
    assert _kinds(text) == ["identity", "matmul", "mul", "add"]


def test_what_follows_and_gradients_are_in_the_graphs() -> None:
    fused = ["matmul", "add", "relu"]
    assert _kinds(f"{_MATMUL} bias=bf16[5] activation=relu") == fused
    kinds = _kinds(f"{_MATMUL} --gradient")
    assert kinds == ["matmul"] * 3
    assert _kinds(f"{_SDPA} --gradient") == ["sdpa", "sdpa_backward"]
    function, operands = _call(f"{_SDPA} is_causal=True local_window_size=3")
    ((graph, _, _),) = traced_graphs(function, *operands)
    attributes: Any = graph.nodes[0].attributes
    assert (attributes.is_causal, attributes.window) == (True, (3, 3))
    norm = "jax_cudnn:group_norm --args bf16[2,5,6] f32[6] f32[6] groups=3 --gradient"
    assert _kinds(norm) == ["group_norm", "group_norm_backward"]


def test_gradients_are_those_of_arrays_of_floats() -> None:
    more = "mask=bool[1,1,7,5] bias=bf16[1,6,7,5] query_seq_lengths=i32[2]"
    function, operands = _call(f"{_SDPA} {more} --gradient")
    assert [str(each.dtype) for each in operands[3:]] == ["bool", "bfloat16", "int32"]
    gradients = jax.eval_shape(function, *operands)
    assert [each.shape for each in gradients] == [
        (2, 7, 6, 8),
        *[(2, 5, 3, 8)] * 2,
        (1, 6, 7, 5),
    ]


@pytest.mark.parametrize("command", ["bench", "explain"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("matmul 8x9x5", "'matmul' is not MODULE:FUNCTION, such as jax_cudnn:matmul"),
        ("jax_cudnn:nope", "'jax_cudnn:nope' is not there: "),
        ("jax_cudnn:__version__", "'jax_cudnn:__version__' is not a function"),
        ("jax_cudnn:matmul --args 8x9", "'8x9' is not a dtype with sizes, such as"),
        (
            "jax_cudnn:matmul --args i4[8]",
            "'i4[8]' is not a dtype with sizes, such as \"bf16[4,128,8,64]\"",
        ),
        ("jax_cudnn:matmul --args x=bf61[8]", "'bf61[8]' is not a dtype with sizes"),
    ],
)
def test_arguments_that_are_wrong_are_named(
    command: str, arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main([command, *arguments.split()])
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "explain"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "jax_cudnn:matmul",
            "--args has 0 arguments, which do not fit the function: missing a required",
        ),
        ("jax_cudnn:matmul --args f32[2,3]", "--args has 1 arguments, which"),
        (f"{_MATMUL} biass=f32[5]", "unexpected keyword argument 'biass'"),
        (
            "jax_cudnn:matmul --args i8[2,3] i8[3,5] --gradient",
            "--gradient: none of the operands is of a float dtype",
        ),
        (f"{_MATMUL} activation=nope", "activation='nope' is not one of"),
    ],
)
def test_what_no_machine_can_do_is_said_without_a_gpu(
    command: str, arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *arguments.split()]) == 2
    assert told in capsys.readouterr().err


def test_bench_refuses_a_function_without_kernels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "jax.numpy:sin", "--args", "f32[3]"]) == 2
    told = capsys.readouterr().err
    assert "bench: the function calls none of jax_cudnn's operations" in told
    assert "Name one that does, such as jax_cudnn:sdpa." in told


def _help(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as raised:
        main([*command, "--help"])
    assert raised.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["doctor", "explain", "calibrate", "bench"])
def test_help_is_sentences_with_the_defaults_of_all_options(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    told = _help(command, capsys=capsys)
    # A long name has its words in the next line.
    options = re.findall(r"^  --\S+.*?  +(\S.*)$|^  --.*\n +(\S.*)$", told, re.M)
    assert len(options) == len(re.findall("^  --", told, re.M)) > 1
    for words in map("".join, options):
        assert words[0].isupper(), words
        assert words.endswith("."), words
        assert "default" in words, words


def test_help_begins_with_what_a_command_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    for command, told in {
        "bench": "Times each kernel of a function's calls on this machine's GPU, ",
        "calibrate": "Times kernels of the sizes that models have by cuDNN ",
        "doctor": "Looks at this machine's GPUs, driver, JAX and cuDNN, ",
        "explain": "Asks cuDNN for a plan of each call that a function makes. ",
    }.items():
        assert f"\n\n{told}" in _help(command, capsys=capsys)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return what an installation writes for the entry of pyproject.toml."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "jax-cudnn"
    path.write_text(
        "import sys\nfrom jax_cudnn.__main__ import main\nsys.exit(main())\n"
    )
    return path


def test_explain_imports_from_the_current_folder(script: Path, tmp_path: Path) -> None:
    here = tmp_path / "mine"
    here.mkdir()
    (here / "beside.py").write_text("SIZE = 3")
    (here / "mymod.py").write_text(
        "import jax_cudnn, beside\n"
        "def f(x):\n"
        "    print('traced', x.shape, beside.SIZE)\n"
        "    return jax_cudnn.matmul(x, x.T)\n"
    )
    for command in ((str(script),), ("-m", "jax_cudnn")):
        arguments = ["explain", "mymod:f", "--device", "H200", "--args", "f32[3,5]"]
        told = subprocess.run(
            [sys.executable, *command, *arguments],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "traced (3, 5) 3\n" in told.stdout, told.stderr


def test_the_current_folder_comes_last_once_the_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_mine.py").write_text("import sys\nFIRST = sys.path[0]\n")
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    first = calls._imported("module_of_mine").FIRST
    assert first == str(tmp_path)
    assert sys.path == [*before, str(tmp_path)]


def test_a_module_that_fails_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module_that_fails.py").write_text("int('three')")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["explain", "module_that_fails:f"])
    told = "'module_that_fails:f' cannot be imported: ValueError: invalid literal"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "buffered"),
    [
        ("doctor", True),
        ("doctor --json", False),
        ("explain --help", True),
        ("bench --help", False),
    ],
)
def test_a_reader_that_goes_away_is_no_error(command: str, buffered: bool) -> None:
    arguments = command.split()
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_cudnn", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate()
    assert errors == ""
    # argparse does not look whether its help can be written.
    is_help = "--help" in arguments and not buffered
    assert process.returncode == (0 if is_help else 128 + signal.SIGPIPE)


_BENCH = ("bench", "jax_cudnn:matmul", "--args", "bf16[8,5]", "bf16[5,9]")


def test_bench_needs_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "local_target", lambda: None)
    assert main([*_BENCH]) == 1
    assert "bench needs an NVIDIA GPU; JAX sees none here." in capsys.readouterr().err


# --- times ----------------------------------------------------------------------------


def _timed(name: str, us: float | None, failure: str = "") -> TimedCandidate:
    candidate = replace(made_plan(PIN), name=name)
    time = us and Measurement(median_us=us, low_us=us - 1, high_us=us + 2)
    return TimedCandidate(candidate=candidate, time=time or None, failure=failure)


_CHOICE = Choice(
    op="matmul",
    operands="bf16[1,8,5]",
    implementation="cudnn",
    plan=PIN,
    cudnn_us=33.3,
    xla_us=44.4,
    first_ratio=1.5,
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Bench with made-up times; returns the parts that were measured."""
    parts: list[Graph] = []

    def measure(part: Graph, options: Any, target: Any) -> Choice:
        assert target == H200
        parts.append(part)
        return _CHOICE

    timed = [
        _timed("eng1", None, "no kernel\nat all"),
        _timed("eng2", 30),
        _timed("eng3", 20),
    ]
    monkeypatch.setattr(bench, "local_target", lambda: (0, H200))
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "time_candidates", lambda part, target: timed)
    return parts


def test_bench_tells_xla_first_best_and_every_candidate(
    measured: list[Graph], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_BENCH]) == 0
    assert [part.nodes[0].kind for part in measured] == ["matmul"]
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "On NVIDIA H200, medians:",
        "matmul  bf16[1,8,5]",
        "44.4 µs  XLA",
        "33.3 µs  cuDNN's best plan, with its array work",
        "30.0 µs  cuDNN's first plan, its kernels only: 1.50 times the best one's "
        "20.0 µs",
        "-  eng1: no kernel",
        "30.0 µs  eng2, 29.0 to 32.0, 4,096 B, RUNTIME_COMPILATION TENSOR_CORE",
        "20.0 µs  eng3, 19.0 to 22.0, 4,096 B, RUNTIME_COMPILATION TENSOR_CORE  (best)",
    ]


def test_bench_prints_data(
    measured: list[Graph], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_BENCH, "--gradient", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["device"]["name"]) == (1, "NVIDIA H200")
    assert len(data["parts"]) == len(measured) == 3
    part = data["parts"][0]
    assert (part["xla_us"], part["cudnn_us"]) == (44.4, 33.3)
    assert [each["failure"] for each in part["candidates"]] == [
        "no kernel\nat all",
        "",
        "",
    ]
    assert part["candidates"][1]["kernel_us"]["median_us"] == 30
    assert part["candidates"][1]["knobs"] == {"SPLIT_K": 2}


@pytest.mark.usefixtures("measured")
def test_bench_says_where_cudnn_has_no_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "time_candidates", lambda part, target: [])
    none = replace(_CHOICE, cudnn_us=None)
    monkeypatch.setattr(bench, "measure", lambda *_: none)
    assert main([*_BENCH]) == 0
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert told[-2:] == [
        "-  cuDNN's best plan, with its array work",
        "cuDNN has no plan",
    ]


def test_the_package_runs_as_a_program(script: Path) -> None:
    for command, name in (
        (("-m", "jax_cudnn"), "python -m jax_cudnn"),
        ((str(script),), "jax-cudnn"),
    ):
        told = [
            subprocess.run(
                [sys.executable, *command, argument],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for argument in ("--help", "--version")
        ]
        assert f"usage: {name} " in told[0]
        assert "doctor" in told[0]
        assert told[1] == f"jax-cudnn {jax_cudnn.__version__}\n"
