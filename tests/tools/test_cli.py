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
from jax_cudnn.cli import bench, explain, main
from jax_cudnn.cli.problems import Problem, add_problems
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.tuning.candidate_times import Timed
from jax_cudnn.tuning.stopwatch import Measurement
from tests.common.planner import H200, PIN, made_plan

pytestmark = pytest.mark.once


def _problem(text: str) -> Problem:
    parser = argparse.ArgumentParser()
    add_problems(parser)
    arguments = parser.parse_args(text.split())
    problem = arguments.make(arguments)
    return problem.gradient() if arguments.gradient else problem


def _kinds(text: str) -> list[str]:
    problem = _problem(text)
    found = traced_graphs(problem.function, *problem.operands)
    return [
        getattr(node.attributes, "mode", node.kind)
        for graph, _, _ in found
        for node in graph.nodes
    ]


# --- problems -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("matmul 7x5x3", [(7, 3), (3, 5), (7, 5)]),
        ("matmul 2x7x5x3 --bias", [(2, 7, 3), (2, 3, 5), (5,), (2, 7, 5)]),
        ("sdpa 2x7x6x8", [*[(2, 7, 6, 8)] * 3, (2, 7, 6, 8)]),
        (
            "sdpa 2x7x6x8 --key-length 5 --key-heads 3 --causal",
            [(2, 7, 6, 8), (2, 5, 3, 8), (2, 5, 3, 8), (2, 7, 6, 8)],
        ),
        ("conv 2x9x7x4 3x5x6", [(2, 9, 7, 4), (3, 5, 4, 6), (2, 9, 7, 6)]),
        (
            "conv 2x9x7x4 3x5x6 --stride 2 --padding VALID --groups 2 --bias",
            [(2, 9, 7, 4), (3, 5, 2, 6), (6,), (2, 4, 2, 6)],
        ),
        ("conv 2x7x4 5x6", [(2, 7, 4), (5, 4, 6), (2, 7, 6)]),
        ("conv 2x3x9x7x4 3x3x5x6", [(2, 3, 9, 7, 4), (3, 3, 5, 4, 6), (2, 3, 9, 7, 6)]),
        (
            "sdpa 2x7x6x8 --key-length 5 --bias",
            [(2, 7, 6, 8), *[(2, 5, 6, 8)] * 2, (1, 6, 7, 5), (2, 7, 6, 8)],
        ),
    ],
)
def test_sizes_become_operands(text: str, shapes: list[tuple[int, ...]]) -> None:
    names = {
        **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
        **dict.fromkeys(("f16", "fp16", "half", "float16"), "float16"),
        **dict.fromkeys(("f32", "fp32", "float32"), "float32"),
    }
    for dtype, name in names.items():
        problem = _problem(f"{text} --dtype {dtype}")
        result = jax.eval_shape(problem.function, *problem.operands)
        found = (*problem.operands, result)
        assert [each.shape for each in found] == shapes
        assert {str(each.dtype) for each in found} == {name}


@pytest.mark.parametrize("weights", ["i8", "u8", "f8_e4m3fn", "f8_e5m2"])
def test_weights_of_8_bits_have_a_scale_for_each_column(weights: str) -> None:
    text = f"matmul 7x5x3 --weights {weights} --bias"
    ((graph, _, _),) = traced_graphs(_problem(text).function, *_problem(text).operands)
    found = [(t.dtype, t.dims) for t in graph.input_tensors]
    assert found == [
        ("bf16", (1, 7, 3)),
        (weights, (1, 3, 5)),
        ("f32", (1, 1, 5)),
        ("bf16", (1, 1, 5)),
    ]
    assert _kinds(text) == ["identity", "matmul", "mul", "add"]
    # Of x and of the bias; weights and scale are given.
    problem = _problem(f"{text} --gradient")
    gradients = jax.eval_shape(problem.function, *problem.operands)
    assert [each.shape for each in gradients] == [(7, 3), (5,)]


def test_what_follows_and_gradients_are_in_the_graphs() -> None:
    fused = ["matmul", "add", "relu"]
    assert _kinds("matmul 7x5x3 --bias --activation relu") == fused
    kinds = _kinds("conv 2x9x7x8 3x5x6 --gradient")
    assert kinds == ["conv_fprop", "conv_wgrad", "conv_dgrad"]
    assert _kinds("sdpa 2x7x6x8 --gradient") == ["sdpa", "sdpa_backward"]
    problem = _problem("sdpa 2x7x6x8 --causal")
    ((graph, _, _),) = traced_graphs(problem.function, *problem.operands)
    assert getattr(graph.nodes[0].attributes, "is_causal") is True  # noqa: B009


def test_what_hides_keys_is_no_operand_to_train() -> None:
    text = "sdpa 2x7x6x8 --bias --mask --lengths --window 3 --gradient"
    problem = _problem(text)
    types = [(each.shape, str(each.dtype)) for each in problem.operands[3:]]
    assert types == [
        ((1, 6, 7, 7), "bfloat16"),
        ((1, 1, 7, 7), "bool"),
        *[((2,), "int32")] * 2,
    ]
    gradients = jax.eval_shape(problem.function, *problem.operands)
    assert [each.shape for each in gradients] == [*[(2, 7, 6, 8)] * 3, (1, 6, 7, 7)]
    graphs = traced_graphs(problem.function, *problem.operands)
    assert all(g.nodes[0].attributes.window == (3, 3) for g, _, _ in graphs)


@pytest.mark.parametrize(
    "text",
    [
        "layer_norm 7x6",
        "rms_norm 7x6",
        "group_norm 2x5x3x6 --groups 3",
        "instance_norm 2x5x6",
        "batch_norm 2x3x5x3x6 --activation relu",
    ],
)
def test_norms_have_factors_in_f32(text: str) -> None:
    problem = _problem(f"{text} --gradient")
    assert [str(each.dtype) for each in problem.operands] == [
        "bfloat16",
        *["float32"] * 2,
    ]
    gradients = jax.eval_shape(problem.function, *problem.operands)
    assert [each.shape for each in gradients] == [
        each.shape for each in problem.operands
    ]
    name = text.split()[0].replace("instance", "group")
    assert _kinds(f"{text} --gradient") == [name, f"{name}_backward"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("matmul 8x9", "'8x9' is not MxNxR or BxMxNxR, sizes above 0"),
        ("matmul 8x9x0", "'8x9x0' is not MxNxR or BxMxNxR, sizes above 0"),
        ("sdpa 8x9x-3x4", "'8x9x-3x4' is not BxSxHxD"),
        ("conv 2x9x7x8 3", "'3' is not XxO or YxXxO or ZxYxXxO"),
        ("matmul 8x9x5 --dtype f64", "'f64' is not a dtype of bench: bf16, bfloat16,"),
        ("matmul 8x9x5 --weights i4", "invalid choice: 'i4'"),
        ("sdpa 8x9x3x4 --key-length -5", "'-5' is not a number above 0"),
        ("conv 2x9x7x8 3x3x4 --stride 0", "'0' is not a number above 0"),
    ],
)
def test_arguments_that_are_wrong_are_named(
    arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["bench", *arguments.split()])
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("matmul 8x9x5 --activation nope", "activation='nope' is not one of"),
        ("sdpa 2x7x6x8 --key-heads 4", "6 query heads are not a multiple of 4"),
        ("conv 2x9x7x8 3x6", "The images have 2 sizes and the filters 1."),
        ("conv 2x9x7x8 3x3x6 --groups 3", "8 channels do not divide into 3 groups."),
    ],
)
def test_what_no_machine_can_do_is_said_without_a_gpu(
    arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments.split()]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("operands", "told"),
    [
        (
            (),
            "--args has 0 operands, which do not fit the function: missing a required",
        ),
        (("f32[2,3]",), "--args has 1 operands"),
        (
            ("i8[2,3]", "i8[3,5]", "--gradient"),
            "--gradient: none of the operands is of a float dtype",
        ),
    ],
)
def test_operands_of_explain_that_do_not_fit_are_named(
    operands: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "jax_cudnn:matmul", "--args", *operands]) == 2
    assert told in capsys.readouterr().err


def test_weights_are_written_as_other_dtypes_are() -> None:
    graphs = [
        traced_graphs(problem.function, *problem.operands)
        for problem in map(_problem, [f"{_EIGHT} i8", f"{_EIGHT} int8"])
    ]
    assert graphs[0] == graphs[1]


_EIGHT = "matmul 7x5x3 --weights"


def _help(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as raised:
        main([*command, "--help"])
    assert raised.value.code == 0
    return capsys.readouterr().out


_OPERATIONS = (
    *("matmul", "sdpa", "conv", "layer_norm", "rms_norm"),
    *("group_norm", "instance_norm", "batch_norm"),
)


@pytest.mark.parametrize(
    "command",
    [
        ("doctor",),
        ("explain",),
        ("calibrate",),
        *(("bench", name) for name in _OPERATIONS),
    ],
    ids=" ".join,
)
def test_help_is_sentences_with_the_defaults_of_all_options(
    command: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    told = _help(*command, capsys=capsys)
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
        "bench": "Times one problem on this machine's GPU, with random operands in "
        "separate memory. ",
        "calibrate": "Times kernels of the sizes that models have by cuDNN ",
        "doctor": "Looks at this machine's GPUs, driver, JAX and cuDNN, ",
        "explain": "Asks cuDNN for a plan of each call that a function makes. ",
    }.items():
        assert f"\n\n{told}" in _help(command, capsys=capsys)
    assert "an instance norm of images" in _help("bench", capsys=capsys)
    told = _help("bench", "instance_norm", capsys=capsys)
    assert "\n\nTimes an instance norm of images.\n\n" in told


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
    first = explain._imported("module_of_mine").FIRST
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


def test_bench_needs_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "local_target", lambda: None)
    assert main(["bench", "matmul", "8x9x5"]) == 1
    assert "bench needs an NVIDIA GPU; JAX sees none here." in capsys.readouterr().err


# --- times ----------------------------------------------------------------------------


def _timed(name: str, us: float | None, failure: str = "") -> Timed:
    candidate = replace(made_plan(PIN), name=name)
    time = us and Measurement(median_us=us, low_us=us - 1, high_us=us + 2)
    return Timed(candidate=candidate, time=time or None, failure=failure)


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
    assert main(["bench", "matmul", "8x9x5"]) == 0
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
    assert main(["bench", "matmul", "8x9x5", "--gradient", "--json"]) == 0
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
    assert main(["bench", "matmul", "8x9x5"]) == 0
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
