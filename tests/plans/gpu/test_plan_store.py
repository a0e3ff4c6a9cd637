# SPDX-License-Identifier: Apache-2.0
"""Tests that plans from disk and from files run in place of new ones."""

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import GraphError, LibraryError, choices, native, plans
from jax_cudnn.choices import Choice
from jax_cudnn.graph import to_json
from jax_cudnn.lowering import decide, traced_graphs
from jax_cudnn.lowering.devices import local_target
from jax_cudnn.offline.builders import plan_builders
from tests.native.processes import run_python

pytestmark = pytest.mark.gpu

_ROOT = Path(__file__).parents[3]

Function = Callable[..., jax.Array]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Keep plans in a new folder, and none in the process to begin with."""
    path = tmp_path / "cache"
    plans.set_cache(path)
    plans.clear_cache()
    yield path
    plans.set_cache(None)
    plans.clear_cache()


def _normal(seed: int, *shape: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def _sdpa(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, is_causal=True, implementation="cudnn")


def _conv(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    return jax_cudnn.conv(
        x, w, (1, 1), "SAME", bias=bias, activation="relu", implementation="cudnn",
    )  # fmt: skip


def _matmul(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
    return jax_cudnn.matmul(a, b, bias=bias, activation="gelu", implementation="cudnn")


_OPS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "sdpa": (_sdpa, ((3, 257, 6, 64), (3, 193, 6, 64), (3, 193, 6, 64))),
    "conv": (_conv, ((5, 32, 28, 20), (64, 32, 3, 3), (64,))),
    "matmul": (_matmul, ((200, 136), (136, 88), (88,))),
}
each_op = pytest.mark.parametrize("op", _OPS)
# All but the first one find on disk what was built for it.
_GPUS = len(jax.devices())


def _case(op: str) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """Return a new function, which nothing was compiled for, and operands."""
    function, shapes = _OPS[op]
    operands = tuple(_normal(i, *shape) for i, shape in enumerate(shapes))

    def value_and_grads(*operands: jax.Array) -> Any:
        out, pull = jax.vjp(function, *operands)
        return out, pull(jnp.sin(out))

    return value_and_grads, operands


def _bits(tree: object) -> list[np.ndarray]:
    return [np.asarray(leaf).view(np.uint16) for leaf in jax.tree.leaves(tree)]


def _run(op: str) -> list[np.ndarray]:
    function, operands = _case(op)
    return _bits(jax.jit(function)(*operands))


def _expect_same(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(results) == len(expected) > 1
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, wanted)


def _count(op: str) -> int:
    """Return how many plans a case takes."""
    function, operands = _case(op)
    found = set()
    for graph, options, _ in traced_graphs(function, *operands):
        for step in decide(graph, options).steps:
            if step.rewrite is not None:
                found.add((step.rewrite.graph, step.request))
    return len(found)


@each_op
def test_plans_from_disk_give_the_same_bits(op: str, folder: Path) -> None:
    start = native.cache_stats()
    expected = _run(op)
    built = native.cache_stats()
    count = _count(op)
    assert count >= 2
    assert built.builds - start.builds >= count
    assert built.disk_writes - start.disk_writes == count
    assert built.disk_failures == start.disk_failures, built.disk_last_failure
    assert plans.cache_info().plans == count
    plans.clear_cache()
    _expect_same(_run(op), expected)
    loaded = native.cache_stats()
    assert loaded.builds == built.builds
    assert loaded.disk_hits - built.disk_hits == count
    assert loaded.disk_writes == built.disk_writes


def test_what_a_stored_plan_says_of_itself_is_what_it_said(folder: Path) -> None:
    function, operands = _case("matmul")
    graphs = traced_graphs(function, *operands)

    def answers() -> list[object]:
        decisions = [decide(graph, options) for graph, options, _ in graphs]
        return [step.plan for decision in decisions for step in decision.steps]

    built = answers()
    assert any(built)
    plans.clear_cache()
    before = native.cache_stats()
    assert answers() == built
    assert native.cache_stats().builds == before.builds


@each_op
def test_damaged_plans_are_built_again(op: str, folder: Path) -> None:
    expected = _run(op)
    files = sorted((folder / "plans").glob("*.plan"))
    for i, file in enumerate(files):
        data = bytearray(file.read_bytes())
        data[(i + 1) * len(data) // (len(files) + 1)] ^= 4
        file.write_bytes(data)
    plans.clear_cache()
    before = native.cache_stats()
    _expect_same(_run(op), expected)
    after = native.cache_stats()
    assert after.disk_hits == before.disk_hits
    assert after.disk_failures - before.disk_failures == len(files)
    assert after.disk_writes - before.disk_writes == len(files)


_PROGRAM = """
import json, sys
sys.path.append({root!r})
import numpy as np
from jax_cudnn import native, plans
from tests.plans.gpu import test_plan_store as case
function, operands = case._case({op!r})
report = plans.warmup(function, *operands)
np.savez({out!r}, *case._run({op!r}))
builds = native.cache_stats().builds
print(json.dumps([report.plans, report.built, report.from_disk, builds]))
"""


@each_op
def test_a_new_process_is_warm_from_disk(op: str, tmp_path: Path) -> None:
    """Also the handler's: warmup and the run ask the same store."""

    def run(out: str) -> list[int]:
        answer = run_python(
            _PROGRAM.format(root=str(_ROOT), op=op, out=str(tmp_path / out)),
            JAX_CUDNN_CACHE_DIR=str(tmp_path / "cache"),
            XLA_PYTHON_CLIENT_PREALLOCATE="false",
        )
        return json.loads(answer.splitlines()[-1])

    count, built, from_disk, builds = run("cold.npz")
    assert (from_disk, builds) == ((_GPUS - 1) * built, built)
    assert built >= count >= 2
    assert run("warm.npz") == [count, 0, _GPUS * count, 0]
    with np.load(tmp_path / "cold.npz") as cold, np.load(tmp_path / "warm.npz") as warm:
        _expect_same([warm[name] for name in cold], [cold[name] for name in cold])


def test_the_handler_loads_from_disk_with_no_planning_in_python(folder: Path) -> None:
    """An executable outlives the plans that were made when it was lowered."""
    function, operands = _case("matmul")
    expected = _bits(jax.jit(function)(*operands))
    compiled = jax.jit(lambda *x: function(*x)).lower(*operands).compile()
    plans.clear_cache()
    before = native.cache_stats()
    _expect_same(_bits(compiled(*operands)), expected)
    after = native.cache_stats()
    assert after.builds == before.builds
    assert after.disk_hits > before.disk_hits


def test_warmup_leaves_nothing_to_build(folder: Path) -> None:
    function, operands = _case("sdpa")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    cold = plans.warmup(function, *shapes)
    assert cold.built >= cold.plans >= 2
    assert cold.from_disk == (_GPUS - 1) * cold.built
    before = native.cache_stats()
    jax.block_until_ready(jax.jit(function)(*operands))
    assert native.cache_stats().builds == before.builds
    plans.clear_cache()
    warm = plans.warmup(function, *shapes)
    assert (warm.plans, warm.built) == (cold.plans, 0)
    assert warm.from_disk == _GPUS * cold.plans


# --- files ----------------------------------------------------------------------------


@each_op
def test_saved_plans_are_loaded_and_give_the_same_bits(op: str, tmp_path: Path) -> None:
    function, operands = _case(op)
    expected = _bits(jax.jit(function)(*operands))
    saved = plans.save(tmp_path / "plans", function, *operands)
    assert saved.plans == _count(op)
    assert not saved.left_out
    plans.clear_cache()
    assert plans.load(tmp_path / "plans") == saved
    before = native.cache_stats()
    _expect_same(_run(op), expected)
    assert native.cache_stats().builds == before.builds


def test_loaded_choices_decide(tmp_path: Path, table: choices.ChoiceTable) -> None:
    _, operands = _case("matmul")
    local = local_target()
    assert local is not None
    graph, options, _ = traced_graphs(_matmul, *operands)[0]
    (step,) = decide(graph, options).steps
    assert step.plan is not None
    pin = Choice(
        op="matmul", operands="", implementation="cudnn", plan=step.plan.request
    )
    table.add({choices.key_of(step.part, local[1]): pin})
    assert plans.save(tmp_path / "plans", _matmul, *operands).choices == 1
    table.clear()
    plans.clear_cache()
    assert plans.load(tmp_path / "plans").choices == 1
    before = native.cache_stats()
    (step,) = decide(graph, options).steps
    assert step.request == pin.plan
    assert native.cache_stats().builds == before.builds


def test_a_file_whose_manifest_was_altered_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    function, operands = _case("matmul")
    plans.save(path, function, *operands)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(contents["manifest.json"])
    manifest["made_for"]["GPU"] = "NVIDIA A100"
    contents["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    with pytest.raises(GraphError, match="its manifest was changed"):
        plans.load(path)


def test_a_plan_for_another_gpu_is_refused_by_name() -> None:
    local = local_target()
    assert local is not None
    ordinal, target = local
    function, operands = _case("matmul")
    graph, options, _ = traced_graphs(function, *operands)[0]
    step = next(s for s in decide(graph, options).steps if s.rewrite is not None)
    assert step.rewrite is not None
    text = to_json(step.rewrite.graph)
    data = native.export_plan(text, request=step.request, device=ordinal)
    properties = native.device_properties(ordinal)
    other = type(target)(
        name="NVIDIA A100", sm_version=target.sm_version, sm_count=target.sm_count,
        cudnn_version=target.cudnn_version,
    )  # fmt: skip
    foreign = native.export_plan_offline(text, other, properties)
    with pytest.raises(LibraryError) as caught:
        native.import_plan(foreign, device=ordinal)
    assert str(caught.value) == (
        "this plan cannot be used here.\n"
        f"  - GPU: made for NVIDIA A100, this is {target.name}"
    )
    with pytest.raises(GraphError, match="not a whole plan file"):
        native.import_plan(data[:-1], device=ordinal)
    plans.clear_cache()
    imported = native.import_plan(data, device=ordinal)
    assert imported.graph_json == text
    assert imported.plan == step.plan


def _kernels(name: str) -> list[tuple[str, str]]:
    """Return graph and request of what cuDNN runs of a case."""
    function, operands = _case(name)
    return [
        (to_json(step.rewrite.graph), step.request)
        for graph, options, _ in traced_graphs(function, *operands)
        for step in decide(graph, options).steps
        if step.rewrite is not None
    ]


def test_plans_that_other_processes_build_run_here_and_are_kept(tmp_path: Path) -> None:
    local = local_target()
    assert local is not None
    ordinal, target = local
    expected = _run("matmul")
    wanted = _kernels("matmul")
    plans.clear_cache()
    native.set_plan_store(tmp_path, 1 << 30)
    try:
        before = native.cache_stats()
        with plan_builders(target, ordinal, 2) as builders:
            for text, request in wanted:
                assert builders.plan(text, request)
        after = native.cache_stats()
        assert after.builds == before.builds
        assert native.plan_store_files()[0] == len(wanted)
        _expect_same(_run("matmul"), expected)
        assert native.cache_stats().builds == before.builds
    finally:
        native.set_plan_store(None, 0)


def test_a_plan_that_was_made_without_its_gpu_runs_on_it(tmp_path: Path) -> None:
    """Planned from a description of the device, as a machine without one would."""
    local = local_target()
    assert local is not None
    ordinal, target = local
    expected = _run("matmul")
    properties = native.device_properties(ordinal)
    files = [
        native.export_plan_offline(text, target, properties, request=request)
        for text, request in _kernels("matmul")
    ]
    plans.clear_cache()
    for data in files:
        native.import_plan(data, device=ordinal)
    before = native.cache_stats()
    _expect_same(_run("matmul"), expected)
    assert native.cache_stats().builds == before.builds
