# SPDX-License-Identifier: Apache-2.0
"""Tests the mixture of experts over eight devices against one device."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jax_cudnn import moe
from jax_cudnn.lowering import exchange_slices, slices
from tests.common.devices import mesh_of
from tests.products.moe import truth
from tests.products.moe.truth import PLAIN

# In f64, so that devices may add in another order and still be told from errors.
pytestmark = [
    *(pytest.mark.once, pytest.mark.sampled),
    pytest.mark.usefixtures("x64"),
]

P = PartitionSpec
_SIZES = {"T": 16, "D": 6, "E": 8, "F": 12, "G": 4}
_MESH = {"data": 2, "expert": 2, "tensor": 2}


drawn = functools.partial(truth.drawn, dtype=np.float64)


def _total(options: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """Return a loss of all results, and the results."""
    y, auxiliary = moe.layer(**arrays, **options)
    losses = auxiliary.load_balance_loss + 0.1 * auxiliary.z_loss
    return jnp.sum(jnp.sin(y)) + losses, (y, auxiliary)


def _over_experts() -> dict[str, Any]:
    return {"top_k": 2, "expert_axis": "expert", "mesh": mesh_of(expert=4)}


def _gradient(options: dict[str, Any]) -> Any:
    return jax.value_and_grad(functools.partial(_total, options), has_aux=True)


def _assert_close(got: Any, want: Any) -> None:
    def check(x: jax.Array, y: jax.Array) -> None:
        scale = 1 + np.abs(y).max(initial=0)
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * scale)

    jax.tree.map(check, jax.device_get(got), jax.device_get(want))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("axes", "capacity_factor"),
    [
        (
            {"expert_axis": "expert", "batch_axis": "data", "tensor_axis": "tensor"},
            None,
        ),
        ({"expert_axis": ("data", "expert"), "tensor_axis": "tensor"}, 0.7),
        ({"expert_axis": "expert"}, 0.3),
        ({"batch_axis": ("data", "tensor")}, None),
        ({"tensor_axis": ("data", "expert")}, 1.0),
    ],
    ids=["all three", "two axes of experts", "experts", "batch", "tensor"],
)
def test_results_and_gradients_are_those_of_one_device(
    kind: AxisType, axes: dict[str, Any], capacity_factor: float | None
) -> None:
    arrays = drawn(0, **_SIZES)
    options: dict[str, Any] = {"top_k": 3, "capacity_factor": capacity_factor}
    want = jax.jit(_gradient(options))(arrays)
    if capacity_factor is not None and capacity_factor < 1:
        assert float(want[0][1][1].dropped) > 0.1
    with jax.set_mesh(mesh_of(kind, **_MESH)):
        got = jax.jit(_gradient(options | axes))(arrays)
    _assert_close(got, want)


def test_tokens_along_the_batch_have_capacities_of_their_own() -> None:
    arrays = drawn(1, **_SIZES)
    options: dict[str, Any] = {"top_k": 2, "capacity_factor": 0.5}
    x = arrays.pop("x")
    alone = jax.jit(functools.partial(moe.layer, **options))
    want = [alone(part, **arrays) for part in (x[:8], x[8:])]
    options |= {"expert_axis": "expert", "batch_axis": "data"}
    options["mesh"] = mesh_of(data=2, expert=4)
    y, auxiliary = jax.jit(functools.partial(moe.layer, **options))(x, **arrays)
    _assert_close(y, np.concatenate([each for each, _ in want]))
    dropped = np.mean([float(each.dropped) for _, each in want])
    assert float(auxiliary.dropped) == pytest.approx(dropped)


@pytest.mark.parametrize("expert", [0, 7])
def test_all_tokens_may_go_to_one_device(expert: int) -> None:
    arrays = drawn(2, PLAIN, **_SIZES)
    arrays["selection_bias"] = 9 * jnp.eye(8)[expert]
    want, _ = moe.layer(**arrays, top_k=1)
    mesh = mesh_of(expert=8)
    got, auxiliary = moe.layer(**arrays, top_k=1, expert_axis="expert", mesh=mesh)
    assert float(auxiliary.load[expert]) == 1
    _assert_close(got, want)


def test_a_call_inside_shard_map_has_a_device_s_arrays() -> None:
    arrays = drawn(3, **_SIZES)
    x = arrays.pop("x").reshape(2, 8, 6)
    want = jax.jit(functools.partial(moe.layer, top_k=2))(x, **arrays)
    by_expert = {
        name: P("expert") if value.ndim == 3 or name.endswith("_bias") else P()
        for name, value in arrays.items()
    }
    by_expert["selection_bias"] = P()
    tokens = P("data", "expert")

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(data=2, expert=4),
        in_specs=(tokens, by_expert),
        out_specs=(tokens, P()),
    )
    def run(x: jax.Array, arrays: dict[str, Any]) -> Any:
        return moe.layer(
            x,
            **arrays,
            top_k=2,
            expert_axis="expert",
            batch_axis="data",
        )

    _assert_close(jax.jit(run)(x, arrays), want)


@pytest.mark.parametrize("name", ["x", "down_w"])
def test_vmap_of_gradients(name: str) -> None:
    arrays = drawn(4, PLAIN, **_SIZES)
    axes = {each: 0 if each == name else None for each in arrays}
    stacked = arrays | {name: jnp.stack([arrays[name], -arrays[name]])}
    options: dict[str, Any] = {
        "top_k": 2,
        "expert_axis": "expert",
        "mesh": mesh_of(expert=4),
    }
    got = jax.jit(jax.vmap(_gradient(options), (axes,)))(stacked)
    want = jax.jit(jax.vmap(_gradient({"top_k": 2}), (axes,)))(stacked)
    _assert_close(got, want)


def test_a_spoilt_token_reaches_no_other_device_s_tokens() -> None:
    arrays = drawn(5, PLAIN, **_SIZES)
    options: dict[str, Any] = {
        "top_k": 2,
        "expert_axis": "expert",
        "mesh": mesh_of(expert=4),
    }
    want, _ = moe.layer(**arrays, **options)
    arrays["x"] = arrays["x"].at[5].set(jnp.nan)
    got, _ = moe.layer(**arrays, **options)
    others = np.arange(16) != 5
    np.testing.assert_array_equal(got[others], want[others])
    assert np.isnan(got[5]).all()


def test_gpus_send_slices_and_others_blocks() -> None:
    arrays = drawn(6, PLAIN, **_SIZES)
    options: dict[str, Any] = {
        "top_k": 2,
        "expert_axis": "expert",
        "mesh": mesh_of(expert=4),
    }
    traced = jax.jit(_gradient(options)).trace(arrays)
    for platform, count in (("cuda", 4), ("cpu", 0)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert len(re.findall("@ragged_all_to_all", text)) == count
        # In as many pieces as occupy a GPU.
        assert len(re.findall(r"@ragged_all_to_all.*tensor<1020xi32>", text)) == count


# --- the exchange ---------------------------------------------------------------------


def _exchange(lengths: np.ndarray, rows: int) -> Any:
    """Return a function of x (devices, m, d): what each device gets of the others."""

    def starts(sizes: jax.Array, axis: int) -> jax.Array:
        return jnp.cumsum(sizes, axis=axis) - sizes

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(expert=len(lengths)),
        in_specs=(P("expert"), P()),
        out_specs=P("expert"),
    )
    def run(x: jax.Array, between: jax.Array) -> jax.Array:
        i = jax.lax.axis_index("expert")
        numbers = (
            *(starts(between, 1)[i], between[i]),
            *(starts(between, 0)[i], between[:, i]),
        )
        return exchange_slices(x[0], *numbers, rows=rows, axes=("expert",))[None]

    return run


def test_slices_arrive_as_numpy_has_them_and_go_back() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 3, (4, 4)).astype(np.int32)
    lengths[1] = 0
    x = rng.standard_normal((4, lengths.sum(1).max(), 3)).astype(np.float32)
    rows = int(lengths.sum(0).max()) + 1
    want = np.zeros((4, rows, 3), np.float32)
    back = np.zeros_like(x)
    for i in range(4):
        end = 0
        for j in range(4):
            first = lengths[j, :i].sum()
            part = slice(first, first + lengths[j, i])
            want[i, end : end + lengths[j, i]] = x[j, part]
            back[j, part] = 2 * want[i, end : end + lengths[j, i]]
            end += lengths[j, i]
    run = _exchange(lengths, rows)

    @jax.jit
    def both(x: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
        y, vjp = jax.vjp(lambda x: run(x, lengths), x)
        return y, vjp(2 * y)[0]

    for got, value in zip(both(x, lengths), (want, back), strict=True):
        np.testing.assert_array_equal(got, value)
    # Examples of rows, of lengths, and of both.
    many, lots = np.stack([x, -x]), np.stack([lengths, lengths.T % 2])
    for axes, given in (
        ((0, None), (many, lengths)),
        ((None, 0), (x, lots)),
        ((0, 0), (many, lots)),
    ):
        found = jax.jit(jax.vmap(both, axes))(*given)
        for i in range(2):
            one = (
                a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True)
            )
            for part, alone in zip(found, both(*one), strict=True):
                np.testing.assert_array_equal(part[i], alone)


def _ragged_all_to_all(x: Any, room: Any, *numbers: Any, axis_name: Any) -> jax.Array:
    """What `jax.lax.ragged_all_to_all` documents, which XLA does not have on a CPU."""
    device, count = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    rows = jax.lax.all_gather(x, axis_name)
    mine = (
        jax.lax.all_gather(each, axis_name).reshape(count, count, -1)[:, device]
        for each in numbers[:3]
    )
    starts, sizes, places = (each.reshape(-1) for each in mine)
    number = jnp.arange(len(x), dtype=jnp.int32)
    for i in range(len(starts)):
        source = rows[i // (len(starts) // count)]
        where = jnp.where(number < sizes[i], places[i] + number, len(room))
        room = room.at[where].set(
            source.at[starts[i] + number].get(mode="fill", fill_value=jnp.nan),
            mode="drop",
        )
    # The receiver knows the same lengths.
    return jnp.where(jnp.array_equal(numbers[3], sizes), room, jnp.nan)


def test_pieces_of_slices_arrive_where_slices_do(monkeypatch) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", _ragged_all_to_all)
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 11, (4, 4, 2))  # (from, to, slice)
    lengths[1] = 0
    sent = lengths.reshape(4, -1)
    arriving = lengths.swapaxes(0, 1).reshape(4, -1)
    starts = np.cumsum(sent, 1) - sent
    places = (np.cumsum(arriving, 1) - arriving).reshape(4, 4, -1)
    places = places.swapaxes(0, 1).reshape(4, -1)
    rows, most = int(arriving.sum(1).max()) + 1, int(sent.sum(1).max()) + 1
    x = rng.standard_normal((4, most, 3)).astype(np.float32)

    def run(ours: Any) -> jax.Array:
        @functools.partial(
            jax.shard_map,
            mesh=mesh_of(expert=4),
            in_specs=P("expert"),
            out_specs=P("expert"),
        )
        def each(*arrays: jax.Array) -> jax.Array:
            arrays = tuple(array[0] for array in arrays)
            return ours(*arrays, rows=rows, axes=("expert",), longest=most)[None]

        numbers = (np.int32(each) for each in (starts, sent, places, arriving))
        return jax.jit(each)(x, *numbers)

    want = run(slices._by_blocks)
    for pieces in (1, 26):
        monkeypatch.setattr(slices, "_PIECES", pieces)
        np.testing.assert_array_equal(run(slices._ragged), want)


# --- errors ---------------------------------------------------------------------------

_ODD = {
    name: np.ones(shape)
    for name, shape in (
        ("gate_w", (8, 6, 13)),
        ("up_w", (8, 6, 13)),
        ("down_w", (8, 13, 6)),
    )
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": None}, "moe.layer: there is no mesh. Pass one as mesh"),
        (
            {"expert_axis": None},
            "moe.layer: mesh is given, and no axis of it. Name those that divide",
        ),
        (
            {"expert_axis": "seq"},
            "moe.layer: expert_axis=('seq',) is not an axis of the mesh, whose axes "
            "are 'data', 'expert'.",
        ),
        (
            {"tensor_axis": "expert"},
            "moe.layer: tensor_axis=('expert',) is used for another axis as well.",
        ),
        (
            {"x": np.ones((6, 6)), "batch_axis": "data"},
            "moe.layer: x is f64[6,6]. Its axis 0 of size 6 is divided over ('data', "
            "'expert'), which has 8 devices, and must be a multiple of that. Pad the "
            "array, or use an axis of fewer devices.",
        ),
        (
            {"x": np.ones(6)},
            "moe.layer: x is f64[6], one token. Devices divide the first of its axes",
        ),
        (
            {"expert_axis": None, "tensor_axis": "expert", **_ODD},
            "moe.layer: gate_w is f64[8,6,13]. Its axis 2 of size 13 is divided over "
            "'expert', which has 4 devices, and must be a multiple of that. Use an "
            "axis of fewer devices.",
        ),
    ],
)
def test_messages(changes: dict[str, Any], message: str) -> None:
    arrays = drawn(0, PLAIN, **_SIZES)
    options = {"expert_axis": "expert", "mesh": mesh_of(data=2, expert=4)}
    with pytest.raises(ValueError, match=re.escape(message)):
        moe.layer(**(arrays | options | changes), top_k=2)


def test_messages_inside_of_shard_map() -> None:
    arrays = drawn(0, PLAIN, **_SIZES)

    def run(options: dict[str, Any]) -> Any:
        def inside(x: jax.Array) -> jax.Array:
            return moe.layer(**(arrays | {"x": x}), top_k=2, **options)[0]

        tokens = P("expert")
        mesh = mesh_of(expert=8)
        return jax.shard_map(inside, mesh=mesh, in_specs=tokens, out_specs=tokens)(
            arrays["x"]
        )

    for options, message in (
        (
            {"expert_axis": "expert", "batch_axis": "data"},
            "moe.layer: the call is inside of jax.shard_map over 'expert', and outside "
            "over 'data'.",
        ),
        (
            {"expert_axis": "expert"},
            "moe.layer: gate_w is f64[8,6,12]. Its axes are (experts, width, hidden "
            "width), which on each of 8 devices must be [1, 6, 12]",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            run(options)


def test_arrays_whose_types_are_sharded_need_the_axes_by_name() -> None:
    mesh = mesh_of(AxisType.Explicit, data=8)
    arrays = drawn(0, PLAIN, **_SIZES)
    with jax.set_mesh(mesh):
        arrays["x"] = jax.sharding.reshard(arrays["x"], P("data"))
        with pytest.raises(
            ValueError, match=r"moe.layer: x is f64\[16,6\], by its type"
        ):
            moe.layer(**arrays, top_k=2)
        y, _ = moe.layer(**arrays, top_k=2, batch_axis="data")
    assert jax.typeof(y).sharding.spec[0] in ("data", ("data",))
