# SPDX-License-Identifier: Apache-2.0
"""Checks of `jax_cudnn.parallel` that need 8 devices: programs of their own.

    python -m tests.parallel.checks NAME

runs one of CHECKS on 8 CPU devices; tests/parallel/test_parallel.py runs them all.
Truth is the loop over rows in float64 NumPy of tests/attention/shared/oracle.py, or
attention without devices.
"""

import functools
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
from jax_cudnn import parallel
from tests.attention.shared.small import count_kinds
from tests.parallel.cases import (
    CASES,
    TOKENS,
    Case,
    assert_close,
    draw_case,
    mesh_of_all,
    results_of,
    truth_of,
)

# --- values and gradients -------------------------------------------------------------


def values(method: str) -> None:
    """Output, log-sum-exp and gradients are NumPy's, in f64."""
    for case in CASES[method]:
        given = draw_case(case)
        for got, want in zip(
            results_of(case, given, method), truth_of(case, given), strict=True
        ):
            np.testing.assert_allclose(
                got, want, rtol=1e-9, atol=1e-9, err_msg=f"{method} {case}"
            )


# --- whole arrays ---------------------------------------------------------------------


def whole_arrays() -> None:
    """One call on arrays sharded over several axes is jax.nn's attention."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(np.asarray(rng.standard_normal(shape), jnp.float32))

    q, k, v = draw(4, 8, 8, 5), draw(4, 8, 4, 5), draw(4, 8, 4, 5)
    bias, mask = draw(1, 8, 8, 8), jnp.asarray(rng.random((4, 1, 1, 8)) < 0.8)
    mask = mask.at[..., 0].set(True)

    def loss(function: Any, *operands: jax.Array, **options: Any) -> Any:
        output = function(*operands, mask, is_causal=True, **options)
        return jnp.sum(jnp.sin(output)), output

    def run(function: Any, **options: Any) -> Any:
        gradient = jax.value_and_grad(
            functools.partial(loss, function, **options), (0, 1, 2, 3), has_aux=True
        )
        return gradient(q, k, v, bias)

    want = run(jax.nn.dot_product_attention)
    devices = np.array(jax.devices())
    for shape, names, axes, methods in (
        ((2, 4), ("data", "seq"), {"batch_axis": "data"}, ("ring", "all_gather")),
        ((2, 2, 2), ("data", "seq", "model"), {"head_axis": "model"}, ("all_to_all",)),
        ((2, 2, 2), ("data", "seq", "model"), {"axis": ("data", "seq")}, ("ring",)),
    ):
        auto = (AxisType.Auto,) * len(names)
        mesh = Mesh(devices.reshape(shape), names, axis_types=auto)
        for method in methods:
            options = {"axis": "seq", **axes, "mesh": mesh, "method": method}
            assert_close(run(parallel.sharded_sdpa, **options), want, 2e-5)

    mesh = Mesh(devices.reshape(2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    placed = [
        jax.device_put(x, NamedSharding(mesh, P("data", "seq"))) for x in (q, k, v)
    ]
    # With the axes in the arrays' types, as jax.make_mesh has them by default.
    explicit = jax.make_mesh(
        (4, 2), ("seq", "data"), axis_types=(AxisType.Explicit,) * 2
    )
    options = {"mesh": explicit, "axis": "seq", "batch_axis": "data"}
    with jax.set_mesh(explicit):
        assert_close(run(parallel.sharded_sdpa, **options), want, 2e-5)
    # The mesh of the surroundings, an operand without batch, zigzag order.
    with jax.set_mesh(mesh):
        call = functools.partial(parallel.sharded_sdpa, axis="seq", batch_axis="data")
        output, stats = jax.jit(functools.partial(call, return_residual=True))(*placed)
        want, want_stats = jax_cudnn.sdpa(q, k, v, return_residual=True)
        assert_close((output, stats), (want, want_stats), 2e-5)
        assert output.sharding.is_equivalent_to(placed[0].sharding, 4)
        single = parallel.sharded_sdpa(
            *(parallel.to_zigzag(x[0], 4, axis=0) for x in (q, k, v)),
            axis="seq",
            order="zigzag",
            is_causal=True,
        )
    want = jax_cudnn.sdpa(q[0], k[0], v[0], is_causal=True)
    assert_close(parallel.from_zigzag(single, 4, axis=0), want, 2e-5)


# --- transformations ------------------------------------------------------------------


def _small() -> tuple[list[jax.Array], Any, Any]:
    """Return operands, causal attention on two devices by a method, and on one."""
    rng = np.random.default_rng(2)
    shapes = ((2, 8, 4, 5), (2, 8, 2, 5), (2, 8, 2, 5))
    operands = [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]

    def on_two(method: Any) -> Any:
        return jax.shard_map(
            lambda *x: parallel.sdpa(
                *x, axis_name="seq", method=method, is_causal=True
            ),
            mesh=mesh_of_all(2),
            in_specs=TOKENS,
            out_specs=TOKENS,
        )

    def on_one(*operands: jax.Array) -> jax.Array:
        return jax_cudnn.sdpa(*operands, is_causal=True)

    return operands, on_two, on_one


def transformations(method: str) -> None:
    """Forward mode, second order, vmap, scan, remat, and calls outside of jit."""
    operands, on_two, on_one = _small()
    q, k, v = operands

    def loss(function: Any) -> Callable[..., jax.Array]:
        return lambda *x: jnp.sum(jnp.sin(function(*x)))

    def gradient(function: Any) -> Any:
        return jax.grad(loss(function), (0, 1, 2))

    def forward(function: Any) -> Any:
        return jax.jvp(function, operands, operands)

    def forward_of_reverse(function: Any) -> Any:
        return jax.jvp(gradient(function), operands, operands)

    def reverse_of_reverse(function: Any) -> Any:
        def slope(*x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.cos(jax.grad(loss(function))(*x)))

        return jax.grad(slope, (0, 1, 2))(*operands)

    def vmapped(function: Any) -> Any:
        queries = jnp.stack([q, 2 * q, -q])
        return jax.vmap(gradient(function), (0, None, None))(queries, k, v)

    def scanned(function: Any) -> Any:
        def total(q: jax.Array) -> jax.Array:
            body = jax.checkpoint(lambda q, _: (function(q, k, v), None))
            return jnp.sum(jax.lax.scan(body, q, None, length=3)[0] ** 2)

        return jax.grad(total)(q)

    ways = [forward, forward_of_reverse, vmapped, scanned]
    if method == "ring":
        ways.append(reverse_of_reverse)
        # Outside of jit.
        assert_close(on_two(method)(*operands), on_one(*operands))
    for way in ways:
        got = jax.jit(functools.partial(way, on_two(method)))()
        assert_close(got, jax.jit(functools.partial(way, on_one))())


def remat() -> None:
    """A policy that keeps attention's results by name keeps those of a ring."""
    operands, on_two, _ = _small()
    names = ("cudnn_sdpa_output", "cudnn_sdpa_stats")
    kept = jax.checkpoint_policies.save_only_these_names(*names)
    for policy, forward_count in ((None, 4), (kept, 2)):
        block = jax.checkpoint(
            lambda *x: jnp.sum(jnp.sin(on_two("ring")(*x))), policy=policy
        )
        kinds = count_kinds(jax.grad(block, (0, 1, 2)), *operands)
        # Two steps; in the second one only the later device has work.
        assert kinds == {"sdpa": forward_count, "sdpa_backward": 2}, kinds


# --- compiled programs ----------------------------------------------------------------

_COLLECTIVES = ("collective-permute", "all-gather", "all-to-all", "reduce-scatter")


def _lowered(count: int, tokens: int, *, gradient: bool, **options: Any) -> Any:
    mesh = mesh_of_all(count)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS)
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return parallel.sdpa(q, k, v, axis_name="seq", **options)

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(attend(*operands).astype(jnp.float32) ** 2)

    function = jax.grad(loss, (0, 1, 2)) if gradient else attend
    x = jax.ShapeDtypeStruct(
        (1, tokens * count, 8, 16), jnp.float32, sharding=NamedSharding(mesh, TOKENS)
    )
    return jax.jit(function).lower(x, x, x)


def _compiled(count: int, tokens: int, **options: Any) -> Any:
    return _lowered(count, tokens, **options).compile()


def _count(compiled: Any) -> dict[str, int]:
    """Return how many arrays each kind of collective moves."""
    text = compiled.as_text()
    found = {}
    for name in _COLLECTIVES:
        lines = re.findall(rf"^.* {name}(?:-start)?\((.*?)\),", text, re.M)
        if lines:
            found[name] = sum(line.count("%") for line in lines)
    return found


def collectives() -> None:
    """Programs communicate as the documentation says, and no more."""
    n, moved = 4, {"method": "ring", "order": "zigzag", "is_causal": True}
    forward = _count(_compiled(n, 8, gradient=False, **moved))
    assert forward == {"collective-permute": 2 * (n - 1)}, forward
    # Keys and values twice; their gradients once around.
    backward = _lowered(n, 8, gradient=True, **moved).as_text()
    assert backward.count("stablehlo.collective_permute") == 4 * (n - 1) + 2 * n
    window = {"is_causal": True, "local_window_size": (5, 0)}
    early = _compiled(8, 8, gradient=False, method="ring", **window)
    assert _count(early) == {"collective-permute": 2}
    gathered = {"method": "all_gather", "is_causal": True}
    assert _count(_compiled(4, 8, gradient=False, **gathered)) == {"all-gather": 2}
    backward = _lowered(4, 8, gradient=True, **gathered).as_text()
    assert backward.count("stablehlo.all_gather") == 4
    assert backward.count("stablehlo.reduce_scatter") == 2
    exchanged = _lowered(4, 8, gradient=False, method="all_to_all").as_text()
    assert exchanged.count("stablehlo.all_to_all") == 4


def memory() -> None:
    """A ring's memory does not grow with the devices, as long as each has its share."""
    options: dict[str, Any] = {"order": "zigzag", "is_causal": True, "gradient": True}
    if _count(_compiled(4, 8, **options))["collective-permute"] != 20:
        # XLA for the CPU drops barriers there, and sends all keys at once.
        assert jax.__version_info__ < (0, 12), jax.__version__
        return
    sizes = [
        _compiled(n, 128, **options).memory_analysis().temp_size_in_bytes
        for n in (2, 8)
    ]
    assert sizes[1] < 1.02 * sizes[0], sizes


# --- numbers --------------------------------------------------------------------------


def precision() -> None:
    """16-bit results are about as exact as those of one device."""
    rng = np.random.default_rng(3)
    shape, order = (2, 64, 4, 16), "zigzag"
    wide = [
        jnp.asarray(np.asarray(rng.standard_normal(shape), jnp.float32))
        for _ in range(4)
    ]
    *operands, pull = (x.astype(jnp.bfloat16) for x in wide)

    def run(function: Any, dtype: Any) -> list[np.ndarray]:
        values = [x.astype(dtype) for x in operands]
        output, transpose = jax.vjp(function, *values)
        results = [output, *transpose(pull.astype(dtype))]
        assert all(x.dtype == dtype for x in results)
        return [np.asarray(x, np.float64) for x in results]

    one = jax.jit(functools.partial(jax_cudnn.sdpa, is_causal=True))
    truth = run(one, jnp.float64)
    allowed = run(one, jnp.bfloat16)
    for method in ("ring", "all_gather", "all_to_all"):

        def several(*values: jax.Array, method: Any = method) -> jax.Array:
            output = parallel.sharded_sdpa(
                *(parallel.to_zigzag(x, 4) for x in values),
                mesh=mesh_of_all(4),
                axis="seq",
                order=order,
                method=method,
                is_causal=True,
            )
            return parallel.from_zigzag(output, 4)

        for got, single, true in zip(
            run(jax.jit(several), jnp.bfloat16), allowed, truth, strict=True
        ):
            error, usual = (np.linalg.norm(x - true) for x in (got, single))
            assert error < 1.5 * usual, (method, error, usual)


def far_rows() -> None:
    """Rows that a bias moves far from 0 are exact, with their gradients, in f32."""
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    q, k, v, pull = (draw(1, 16, 2, 4) for _ in range(4))
    rows = draw(1, 2, 16, 16)
    rows[:, :, 3::4] -= np.float32(1e9)
    rows[:, :, 5] = -3e10
    rows[:, 0, 7, 8:] = 0
    left = np.where(np.arange(16) < 7, -1e9, 0.0)[None, None, None, :]
    for bias in (rows, left.astype(np.float32)):
        given = {"query": q, "key": k, "value": v, "bias": bias}
        case = Case(n=4, b=1, h=2, k=2, d=4, e=4, causal=True)
        pulls = {"grad_output": pull, "grad_stats": pull[..., 0]}
        want = truth_of(case, {**given, **pulls})
        for method in ("ring", "all_gather") if bias is rows else ("ring",):
            got = results_of(case, {**given, **pulls}, method)
            for x, y in zip(got, want, strict=True):
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5, err_msg=method)


def nan_in_padding() -> None:
    """What queries and keys hold past their lengths does not come out."""
    rng = np.random.default_rng(5)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 16, 2, 3))) for _ in range(3))
    lengths = {
        "query_seq_lengths": jnp.array([5, 16]),
        "key_value_seq_lengths": jnp.array([3, 11]),
    }
    want = jax_cudnn.sdpa(q, k, v, **lengths)
    q, k = q.at[0, 5:].set(jnp.nan), k.at[0, 3:].set(jnp.nan).at[1, 11:].set(jnp.nan)
    for method in ("ring", "all_gather"):
        got = parallel.sharded_sdpa(
            q, k, v, mesh=mesh_of_all(4), axis="seq", method=method, **lengths
        )
        assert_close(got, want)


def positions() -> None:
    """Each device's tokens are where `to_zigzag` and `to_striped` put them."""
    for order, put in (
        ("contiguous", lambda x, *_: x),
        ("zigzag", parallel.to_zigzag),
        ("striped", parallel.to_striped),
    ):
        found = jax.shard_map(
            functools.partial(
                parallel.token_positions, 6, axis_name="seq", order=order
            ),
            mesh=mesh_of_all(4),
            in_specs=(),
            out_specs=P("seq"),
        )()
        np.testing.assert_array_equal(found, put(np.arange(24), 4, 0))


CHECKS: dict[str, Callable[[], None]] = {
    **{f"values-{x}": functools.partial(values, x) for x in CASES},
    **{f"transformations-{x}": functools.partial(transformations, x) for x in CASES},
    "whole_arrays": whole_arrays,
    "programs": lambda: [f() for f in (collectives, memory, remat)] and None,
    "numbers": lambda: (
        [f() for f in (precision, far_rows, nan_in_padding, positions)] and None
    ),
}


def main() -> None:
    """Run the check that is named."""
    warnings.simplefilter("error")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # As tests/conftest.py has it: compiling is what takes the time.
    jax.config.update("jax_disable_most_optimizations", sys.argv[1] != "programs")
    CHECKS[sys.argv[1]]()


if __name__ == "__main__":
    main()
