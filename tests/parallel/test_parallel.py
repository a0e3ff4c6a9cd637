# SPDX-License-Identifier: Apache-2.0
"""Tests attention over several devices: results, errors, and programs for a GPU.

What needs several devices is in tests/parallel/checks.py, run here in processes of
their own.
"""

import functools
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_cudnn import UnsupportedError, parallel
from jax_cudnn.lowering import devices
from tests.common import forked
from tests.conftest import Draw
from tests.parallel.checks import CHECKS

pytestmark = pytest.mark.sampled

_TOKENS = PartitionSpec(None, "seq")
_SHAPE = (2, 8, 4, 16)


def _mesh(*shape: int) -> AbstractMesh:
    """Return a mesh of devices that need not be there."""
    names = ("seq", "model")[: len(shape)]
    return AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


@pytest.mark.once
@pytest.mark.parametrize("name", CHECKS)
def test_on_8_devices(name: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = forked.run(
        "tests.parallel.checks", name, environment=environment, warnings_are="default"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_check_has_a_name() -> None:
    assert len(CHECKS) == 9


# --- one device -----------------------------------------------------------------------


def test_one_device_is_a_ring_of_its_own(draw: Draw) -> None:
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,))
    q = draw("bshd")

    def attend(q: jax.Array) -> jax.Array:
        return parallel.sharded_sdpa(q, q, q, mesh=mesh, axis="seq", is_causal=True)

    text = jax.jit(jax.grad(lambda q: attend(q).sum())).lower(q).as_text()
    assert "collective" not in text
    assert "stablehlo.case" not in text


# --- programs for CUDA ----------------------------------------------------------------


def _sharded(count: int, **options: Any) -> Any:
    """Return attention on the shares of a mesh of devices."""
    return jax.shard_map(
        functools.partial(parallel.sdpa, axis_name="seq", **options),
        mesh=_mesh(count),
        in_specs=_TOKENS,
        out_specs=_TOKENS,
    )


def _loss(function: Any, *operands: jax.Array) -> jax.Array:
    return jnp.sum(function(*operands).astype(jnp.float32))


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [("ring", 3, 3), ("all_gather", 3, 3), ("all_to_all", 1, 1)],
)
def test_cudnn_computes_each_block_and_its_gradient(
    method: str, forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "local_target", lambda: None)
    function = _sharded(
        2, method=method, order="zigzag", is_causal=True, implementation="cudnn"
    )
    gradient = jax.jit(jax.grad(functools.partial(_loss, function), (0, 1, 2)))
    x = jax.ShapeDtypeStruct(_SHAPE, jnp.bfloat16)
    text = gradient.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r'@jax_cudnn\.\w+\(.*?graph = "(.*?)", op = "(\w+)"', text)
    ops = [op for _, op in calls]
    # In zigzag order two devices have one block of the diagonal, and one of two others.
    assert (ops.count("sdpa"), ops.count("sdpa_backward")) == (forward, backward)
    assert not any("is_partial" in graph for graph, _ in calls), (
        "cuDNN has no such thing"
    )
    # Without a cotangent of the log-sum-exp, no columns are spent on it.
    assert all("16,24" not in graph for graph, _ in calls)


def test_cudnn_refuses_a_block_as_it_refuses_a_call() -> None:
    function = _sharded(2, implementation="cudnn")
    x = jax.ShapeDtypeStruct(_SHAPE, jnp.float64)
    with (
        jax.enable_x64(True),
        pytest.raises(UnsupportedError, match="cuDNN's sdpa takes bf16, f16, f32"),
    ):
        jax.jit(function).trace(x, x, x).lower(lowering_platforms=("cuda",))


# --- errors ---------------------------------------------------------------------------


def _shapes(**changes: tuple[int, ...]) -> list[Any]:
    shapes = {"query": _SHAPE, "key": _SHAPE, "value": _SHAPE, **changes}
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"axis_name": "sequence"},
            ValueError,
            "axis_name='sequence' is not an axis that is sharded here (those are "
            "'seq'). Call it inside jax.shard_map over that axis, or use",
        ),
        ({"axis_name": 3}, TypeError, "axis_name=3 is not the name of a mesh axis"),
        ({"axis_name": ()}, TypeError, "axis_name=() is not the name of a mesh axis"),
        (
            {"method": "star"},
            ValueError,
            "method='star' is not one of 'ring', 'all_gather', 'all_to_all'.",
        ),
        (
            {"order": "spiral"},
            ValueError,
            "order='spiral' is not one of 'contiguous', 'zigzag', 'striped'.",
        ),
        (
            {"order": "striped", "method": "all_gather"},
            ValueError,
            "order='striped' with method='all_gather'. The queries of a device are no "
            "neighbours then, and no kernel has causality between them and the keys of "
            "the whole sequence. Use method='ring' or 'all_to_all', or order='zigzag'.",
        ),
        (
            {"order": "zigzag"},
            ValueError,
            "each device holds 1 tokens of query. In zigzag order it holds two chunks "
            "of equal length. Pad the sequence to a multiple of 2 * 8 tokens",
        ),
        (
            {"method": "all_to_all"},
            ValueError,
            "4 query heads and 4 key heads cannot be shared out among 8 devices.",
        ),
        (
            {"mask": jnp.ones((1, 4), bool)},
            ValueError,
            "mask is bool[1,4], which does not broadcast to (batch, heads, query "
            "length, key length) = [2, 4, 1, 8].",
        ),
        ({"scale": "1"}, TypeError, "scale is str. It must be a number known when"),
        (
            {"implementation": "fast"},
            ValueError,
            "implementation='fast' is not one of",
        ),
        ({"is_causal": 1}, TypeError, "is_causal is int. It must be True or False"),
    ],
)
def test_wrong_shares_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"axis_name": "seq", **options}
    function = jax.shard_map(
        functools.partial(parallel.sdpa, **given),
        mesh=_mesh(8),
        in_specs=_TOKENS,
        out_specs=_TOKENS,
    )
    with pytest.raises(error, match=rf"^parallel\.sdpa: {re.escape(message)}"):
        jax.eval_shape(function, *_shapes())


def test_shares_outside_of_shard_map_are_refused() -> None:
    message = r"axis_name='seq' is not an axis that is sharded here \(there is none\)"
    with pytest.raises(ValueError, match=rf"^parallel\.sdpa: {message}"):
        parallel.sdpa(*(jnp.zeros(_SHAPE),) * 3, axis_name="seq")
    with pytest.raises(ValueError, match=r"^token_positions: axis_name='seq' is not"):
        parallel.token_positions(4, axis_name="seq")


def test_positions_of_half_chunks_are_refused() -> None:
    function = jax.shard_map(
        lambda: parallel.token_positions(5, axis_name="seq", order="zigzag"),
        mesh=_mesh(2),
        in_specs=(),
        out_specs=PartitionSpec("seq"),
    )
    with pytest.raises(ValueError, match=r"^token_positions: length=5 is odd"):
        jax.eval_shape(function)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (
            (2, 6, 4, 16),
            {},
            "query is f32[2,6,4,16]. Its axis 1 of size 6 is sharded over 'seq', which "
            "has 4 devices, and must be a multiple of that. Pad the sequence, and pass",
        ),
        (
            (2, 8, 3, 16),
            {"head_axis": "model"},
            "query is f32[2,8,3,16]. Its axis 2 of size 3 is sharded over 'model', "
            "which has 2 devices, and must be a multiple of that. Use an axis of fewer",
        ),
        (
            _SHAPE,
            {"batch_axis": "data"},
            "batch_axis='data' is not an axis of the mesh, whose axes are 'seq', "
            "'model'.",
        ),
        (
            _SHAPE,
            {"head_axis": "seq"},
            "head_axis='seq' is used for another axis as well. Each mesh axis can",
        ),
        ((8, 4), {}, "query is f32[8,4]. It must be (batch, length, heads, head size)"),
        (_SHAPE, {"mesh": None}, "there is no mesh. Pass one as mesh, for example"),
        (_SHAPE, {"method": "star"}, "method='star' is not one of"),
        (_SHAPE, {"order": "any"}, "order='any' is not one of"),
        (_SHAPE, {"scale": float("inf")}, "scale=inf is not finite."),
        (
            _SHAPE,
            {"mask": jnp.ones((1, 1, 1, 7), bool)},
            "mask is bool[1,1,1,7], which does not broadcast",
        ),
        (
            _SHAPE,
            {"bias": jnp.ones((1, 1, 6, 8))},
            "bias is f32[1,1,6,8]. Its axis 2 of size 6 is sharded over 'seq', which",
        ),
        (
            _SHAPE,
            {"bias": jnp.ones((1, 1, 1, 8, 8))},
            "bias is f32[1,1,1,8,8]. It must broadcast to (batch, heads, query length",
        ),
    ],
)
def test_wrong_whole_arrays_are_refused(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    given = {"mesh": _mesh(4, 2), "axis": "seq", **options}
    shapes = _shapes(query=shape, key=shape, value=shape)
    function = functools.partial(parallel.sharded_sdpa, **given)
    message = f"^parallel.sharded_sdpa: {re.escape(message)}"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(function, *shapes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": None}, "axis=None is not the name of a mesh axis, nor a tuple of"),
        ({"axis": 2}, "axis=2 is not the name of a mesh axis, nor a tuple of names."),
        ({"head_axis": 2}, "head_axis=2 is not the name of a mesh axis, nor a tuple"),
        ({"mesh": (4, 2)}, "mesh is tuple. It must be a jax.sharding.Mesh, as"),
    ],
)
def test_what_is_no_mesh_or_axis_is_refused(
    options: dict[str, Any], message: str
) -> None:
    function = functools.partial(
        parallel.sharded_sdpa, **{"mesh": _mesh(4, 2), "axis": "seq", **options}
    )
    with pytest.raises(
        TypeError, match=rf"^parallel\.sharded_sdpa: {re.escape(message)}"
    ):
        jax.eval_shape(function, *_shapes())
