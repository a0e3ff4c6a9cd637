# SPDX-License-Identifier: Apache-2.0
"""Tests of sharded operands under transformations, in other processes and in plans.

Everything runs on eight devices of the CPU.
"""

import functools
import os
import socket
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
from jax_cudnn import moe, parallel, plans
from jax_cudnn.lowering import partitioned
from tests.common.devices import Spec, collectives, gradient, mesh_of, placed
from tests.sharding.cases import (
    OPERANDS,
    assert_equal,
    check_same,
    contraction,
    draw,
    matmul,
    sdpa,
)

pytestmark = pytest.mark.sampled


def _check(
    function: Callable[..., Any], specs: list[Spec], *operands: jax.Array
) -> Any:
    sharded = placed(mesh_of(x=4, y=2), operands, specs)
    check_same(function, sharded, operands)
    return sharded


def test_examples_of_a_vmap_are_not_gathered_with_the_batch() -> None:
    q, k = draw(3, 8, 10, 4, 4), draw(3, 8, 12, 4, 4)

    def run(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.vmap(jax_cudnn.sdpa)(q, k, k)

    sharded = _check(run, [(None, "x"), (None, "x")], q, k)
    assert collectives(run, *sharded) == {}
    assert collectives(gradient(run), *sharded) == {}


@pytest.mark.parametrize("spmd_axis_name", [None, "x"])
def test_examples_of_a_vmap_may_be_sharded(spmd_axis_name: str | None) -> None:
    x, w = draw(8, 6, 16), draw(16, 24)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.vmap(
            jax_cudnn.matmul, in_axes=(0, None), spmd_axis_name=spmd_axis_name
        )(x, w)

    sharded = _check(run, [("x", "y"), ()], x, w)
    assert collectives(run, *sharded) == {}


def test_a_scan_with_remat_stays_sharded() -> None:
    x, w = draw(8, 6, 16), draw(3, 16, 16) / 4

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            q = jax_cudnn.matmul(x, w).reshape(8, 6, 4, 4)
            return x + jax_cudnn.sdpa(q, q, q, is_causal=True).reshape(8, 6, 16), None

        return jax.lax.scan(layer, x, w)[0]

    sharded = _check(run, [("x",), ()], x, w)
    assert collectives(run, *sharded) == {}
    derivative = gradient(run)
    check_same(derivative, sharded, (x, w))
    assert [*collectives(derivative, *sharded)] == ["all-reduce"]


def test_forward_mode_gives_the_same() -> None:
    def run(*operands: jax.Array) -> Any:
        return jax.jvp(matmul, operands, operands)

    _check(run, [("x",), (None, "y"), ("y",)], *OPERANDS[matmul])


def _conv(*numbers: str, **options: Any) -> Callable[..., jax.Array]:
    return functools.partial(
        jax_cudnn.conv, padding="SAME", dimension_numbers=numbers, **options
    )


_of_each_channel = functools.partial(_conv, feature_group_count=8)
_LONG = functools.partial(jax_cudnn.causal_conv1d, activation=None)
_LAST, _FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
_ONE, _TWO = {"x": 8}, {"x": 2, "y": 4}


# Of plain JAX's convolutions, some have wrong gradients of the filters here: see
# lowering/undivided.py.
@pytest.mark.parametrize(
    ("function", "images", "filters", "sizes"),
    [
        (_of_each_channel(*_LAST), (2, 6, 5, 8), (3, 3, 1, 8), _ONE),
        (_of_each_channel(*_FIRST), (2, 8, 6, 5), (8, 1, 3, 3), _ONE),
        (_of_each_channel("NHWC", "OIHW", "NCHW"), (2, 6, 5, 8), (8, 1, 3, 3), _ONE),
        (_LONG, (2, 40, 8), (34, 8), _ONE),
        (_conv(*_LAST, feature_group_count=4), (8, 6, 5, 4), (3, 3, 1, 4), _ONE),
        (_conv(*_LAST, rhs_dilation=(2, 1)), (6, 8, 5, 2), (3, 2, 2, 4), _TWO),
        (_conv(*_FIRST, rhs_dilation=(1, 2)), (6, 2, 5, 8), (4, 2, 2, 3), _TWO),
        (_conv(*_LAST, rhs_dilation=(1, 2)), (6, 7, 8, 2), (7, 5, 2, 4), _TWO),
    ],
    ids=[
        *("last", "first", "mixed", "causal", "images"),
        *("holes last", "holes first", "many holes"),
    ],
)
def test_second_derivatives_give_the_same_with_an_axis_of_8_divided(
    function: Callable[..., jax.Array],
    images: tuple[int, ...],
    filters: tuple[int, ...],
    sizes: dict[str, int],
) -> None:
    x, w = draw(*images), draw(*filters)

    def run(x: jax.Array, w: jax.Array, moved: jax.Array) -> Any:
        def forward(*operands: jax.Array) -> jax.Array:
            return jax.jvp(function, operands, (x, w))[1]

        def reverse(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return jax.vjp(function, *operands)[1](moved)

        return (
            jax.vjp(forward, x, w)[1](moved),
            jax.vjp(reverse, x, w)[1]((x, w)),
            jax.jvp(reverse, (x, w), (x, w))[1],
        )

    operands = (x, w, function(x, w))
    specs = [tuple("x" if n == 8 else None for n in x.shape) for x in operands]
    specs[1] = ()
    sharded = placed(mesh_of(**sizes), operands, specs)
    check_same(run, sharded, operands)


def test_donated_operands_are_used_again() -> None:
    (x,) = placed(mesh_of(x=4, y=2), [draw(8, 6, 16)], [("x",)])
    w = draw(16, 16)
    want = jax_cudnn.matmul(x, w)
    assert_equal(jax.jit(jax_cudnn.matmul, donate_argnums=0)(x, w), want)
    assert x.is_deleted()


def test_some_axes_of_the_mesh_may_be_manual() -> None:
    mesh = mesh_of(x=4, y=2)
    operands = OPERANDS[matmul]
    sharded = placed(mesh, operands, [("x",), (None, "y"), ("y",)])
    run = jax.shard_map(
        matmul,
        mesh=mesh,
        in_specs=(P("x"), P(), P()),
        out_specs=P("x"),
        axis_names={"x"},
    )
    for ours, plain in ((run, matmul), (gradient(run), gradient(matmul))):
        assert_equal(jax.jit(ours)(*sharded), jax.jit(plain)(*operands))
    assert collectives(run, *sharded) == {}


def _experts(x: jax.Array, w: jax.Array, **axes: str) -> jax.Array:
    return moe.layer(x, w[0, :, :4], None, w, w.swapaxes(1, 2), top_k=2, **axes)[0]


def _attention(x: jax.Array, w: jax.Array, **axes: str) -> jax.Array:
    q = jnp.einsum("bd,sde->bse", x, w)[:, :, None]
    sharded = functools.partial(parallel.sharded_sdpa, **axes)
    return (sharded if axes else jax_cudnn.sdpa)(q, q, q)


@pytest.mark.parametrize(
    ("function", "axes"),
    [(_experts, {"expert_axis": "y"}), (_attention, {"axis": "y"})],
)
def test_a_shard_map_of_our_own_may_be_inside_of_another_one(
    function: Callable[..., jax.Array], axes: dict[str, str]
) -> None:
    operands, specs = (draw(8, 6), draw(4, 6, 6)), (P("x"), P())
    inside = jax.shard_map(
        gradient(functools.partial(function, **axes)),
        mesh=mesh_of(x=2, y=2),
        in_specs=specs,
        out_specs=specs,
        axis_names={"x"},
    )
    want = jax.jit(gradient(function))(*operands)
    assert_equal(jax.jit(inside)(*operands), want)


def test_examples_that_are_sharded_in_their_types_have_gradients() -> None:
    # The gradient graph of one example has a kernel for each product.
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    x, w, scale = draw(4, 6, 8), draw(8, 10), draw(4, 10)

    def run(x: Any, w: Any, scale: Any) -> jax.Array:
        return jax_cudnn.matmul(x, w, activation="silu", scale_out=scale)

    for axes, operands, specs in (
        ((0, None, 0), (x, w, scale), [("x",), ("y",), ("x",)]),
        # The product that the gradient reads is the same for all examples.
        ((None, None, 0), (x[0], w, scale), [(), (), ("x",)]),
    ):
        sharded = placed(mesh, operands, specs)
        for function in (
            jax.vmap(gradient(run), in_axes=axes),
            gradient(jax.vmap(run, in_axes=axes)),
        ):
            check_same(function, sharded, operands)


def test_a_constraint_within_the_program_is_enough() -> None:
    mesh = mesh_of(x=4, y=2)
    x, w, bias = OPERANDS[matmul]

    def run(x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("x")))
        return matmul(x, w, bias)

    result = jax.jit(run)(x)
    assert_equal(result, matmul(x, w, bias))
    assert result.sharding.spec == P("x")


# --- other partitioners, processes and caches -----------------------------------------


def test_the_older_partitioner_gives_the_same_and_gathers_no_batch() -> None:
    function, operands = sdpa, OPERANDS[sdpa]
    sharded = placed(mesh_of(x=4, y=2), operands, [("x", None, "y")] * 3)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for each in (function, gradient(function)):
                check_same(each, sharded, operands)
                assert collectives(each, *sharded) == {}
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def _start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def _printed(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def test_an_exported_program_is_divided_in_the_process_that_loads_it(
    tmp_path: Path,
) -> None:
    operands = OPERANDS[matmul]
    sharded = placed(mesh_of(x=4, y=2), operands, [("x",), (None, "y"), ("y",)])
    exported = jax.export.export(
        jax.jit(matmul), disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS
    )(*sharded)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "operands", *operands)
    # It traces no call of its own before.
    program = """
        import sys
        import jax, numpy as np
        jax.config.update("jax_num_cpu_devices", 8)
        import jax_cudnn
        folder = sys.argv[1]
        with open(f"{folder}/program", "rb") as file:
            loaded = jax.export.deserialize(bytearray(file.read()))
        devices = np.array(jax.devices()).reshape(4, 2)
        mesh = jax.sharding.Mesh(devices, ("x", "y"))
        arrays = np.load(f"{folder}/operands.npz").values()
        operands = [
            jax.device_put(x, s)
            for x, s in zip(arrays, loaded.in_shardings_jax(mesh), strict=True)
        ]
        np.save(f"{folder}/result", jax.jit(loaded.call)(*operands))
    """
    _printed(_start(program, str(tmp_path)))
    assert_equal(np.load(tmp_path / "result.npy"), matmul(*operands))


@pytest.mark.once
def test_xlas_cache_knows_programs_by_all_that_they_compute(tmp_path: Path) -> None:
    program = """
        import sys
        import jax, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        jax.config.update("jax_num_cpu_devices", 8)
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        import jax_cudnn
        from jax import monitoring
        hits = []
        monitoring.register_event_listener(
            lambda name, **_: hits.append(name) if "cache_hits" in name else None
        )
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        x = np.linspace(-2, 2, 8 * 3 * 16, dtype=np.float32).reshape(8, 3, 16)
        w = np.eye(16, dtype=np.float32)
        sharded = jax.device_put(x, NamedSharding(mesh, P("x")))
        for activation in ("relu", "silu"):
            hits.clear()
            run = lambda x: jax_cudnn.matmul(x, w, activation=activation)
            result = jax.jit(run)(sharded)
            print(activation, len(hits))
            want = getattr(jax.nn, activation)(x)
            np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-5)
    """
    printed = [_printed(_start(program, str(tmp_path))).split() for _ in range(2)]
    assert printed == [["relu", "0", "silu", "0"], ["relu", "1", "silu", "1"]]


@pytest.mark.once
def test_processes_divide_a_program_alike() -> None:
    program = """
        import sys
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        jax.config.update("jax_num_cpu_devices", 4)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
        import jax_cudnn
        devices = np.array(jax.devices()).reshape(4, 2)
        mesh = jax.sharding.Mesh(devices, ("x", "y"))
        numbers = np.random.default_rng(0)
        draw = lambda *shape: numbers.standard_normal(shape).astype(np.float32)

        def check(function, operands, specs):
            sharded = [
                jax.make_array_from_callback(
                    x.shape, NamedSharding(mesh, P(*spec)), x.__getitem__
                )
                for x, spec in zip(operands, specs, strict=True)
            ]
            with jax.default_device(jax.local_devices()[0]):
                want = jax.jit(function)(*operands)
            got = jax.jit(function)(*sharded)
            for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                for shard in x.addressable_shards:
                    np.testing.assert_allclose(
                        shard.data, np.asarray(y)[shard.index], rtol=2e-5, atol=2e-5
                    )

        def loss(q, k, v):
            return jnp.sum(jnp.sin(jax_cudnn.sdpa(q, k, v, is_causal=True)))

        attention = draw(8, 6, 4, 8), draw(8, 10, 2, 8), draw(8, 10, 2, 6)
        check(jax.grad(loss, (0, 1, 2)), attention, [("x", None, "y")] * 3)
        product = draw(6, 16), draw(16, 12)
        run = lambda x, w: jax_cudnn.matmul(x, w, activation="gelu")
        check(run, product, [(None, ("y", "x")), (("y", "x"),)])
        print(len(jax.devices()))
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [_start(program, port, str(i)) for i in range(2)]
    ends = [_printed(process).split()[-1] for process in processes]
    assert ends == ["8", "8"]


# --- what runs ------------------------------------------------------------------------


def test_inspect_tells_the_calls_of_one_device() -> None:
    operands = OPERANDS[sdpa]
    sharded = placed(mesh_of(x=4, y=2), operands, [("x", None, "y")] * 3)
    for arguments, batch, heads in ((operands, 8, 16), (sharded, 2, 8)):
        for function in (sdpa, jax.jit(sdpa)):
            (call,) = plans.inspect(function, *arguments).calls
            assert call.shapes.startswith(f"f32[{batch},10,{heads},4]"), call.shapes
        ops = [call.op for call in plans.inspect(gradient(sdpa), *arguments).calls]
        assert ops == ["sdpa", "sdpa_backward"]


def test_inspect_of_a_divided_contraction_tells_its_part() -> None:
    x, w = placed(mesh_of(x=4, y=2), OPERANDS[contraction], [("x", None, "y"), ("y",)])
    (call,) = plans.inspect(jax.jit(contraction).trace(x, w)).calls
    assert call.shapes == "f32[1,12,8], f32[1,8,24]"


def test_a_refusal_while_xla_divides_a_call_keeps_its_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(graph: Any, options: Any) -> Any:
        del graph, options
        raise jax_cudnn.UnsupportedError("no plan here:", ["too long", "too wide"])

    monkeypatch.setitem(partitioned._PROGRAMS, "cpu", refuse)
    (x,) = placed(mesh_of(x=4, y=2), [draw(4, 16)], [("x",)])
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(lambda x: jax_cudnn.matmul(x, x.T))(x)
    for text in ("UnsupportedError: no plan here:", "too long", "too wide"):
        assert text in str(caught.value)
