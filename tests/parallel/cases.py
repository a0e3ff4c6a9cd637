# SPDX-License-Identifier: Apache-2.0
"""Cases of attention over several devices, with their truth on whole arrays."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_cudnn import parallel
from jax_cudnn.parallel.order import natural, ordered
from tests.attention.shared.oracle import numpy_attention, numpy_gradients

TOKENS = P(None, "seq")


def mesh_of_all(count: int) -> Mesh:
    devices = np.array(jax.devices()[:count])
    return Mesh(devices, ("seq",), axis_types=(AxisType.Auto,))


def assert_close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    def compare(x: Any, y: Any) -> None:
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)

    jax.tree.map(compare, got, want)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call; letters as in `sdpa`, s and t of the whole sequence.

    ``bias`` and ``mask`` name their axes, "1" for 1. ``hidden`` says whether some rows
    of them hide all keys.
    """

    n: int = 4
    order: Any = "contiguous"
    b: int = 2
    s: int = 16
    t: int = 16
    h: int = 4
    k: int = 2
    d: int = 5
    e: int = 3
    causal: bool = False
    window: Any = None
    lengths: bool = False
    bias: str = ""
    mask: str = ""
    hidden: bool = False


CASES = {
    "ring": [
        Case(n=1, causal=True, bias="bhs1", hidden=True),
        Case(n=2, s=6, t=10, h=6, k=3),
        Case(n=8, order="zigzag", causal=True, h=3, k=1),
        Case(n=4, order="striped", causal=True, lengths=True, bias="b1st"),
        Case(n=3, order="striped", s=9, t=15, window=(4, 2)),
        Case(n=4, causal=True, t=24, window=(9, 5), lengths=True),
        Case(n=4, order="zigzag", causal=True, window=5, mask="b1st", hidden=True),
        Case(n=4, lengths=True, bias="b11t", mask="1hs1", hidden=True),
        Case(n=2, order="zigzag", causal=True, h=3, k=1, bias="1hst", hidden=True),
    ],
    "all_gather": [
        Case(n=1, window=3, bias="b1s1"),
        Case(n=2, s=6, t=10, causal=True, h=6, k=3, bias="bhst", hidden=True),
        Case(n=8, order="zigzag", causal=True, h=3, k=1),
        Case(n=4, window=(4, 1), lengths=True, mask="1h1t", hidden=True),
        Case(n=4, order="zigzag", lengths=True, bias="bh1t", mask="b1s1", hidden=True),
    ],
    "all_to_all": [
        Case(n=1, causal=True),
        Case(n=2, s=6, t=10, causal=True, h=4, k=4, bias="bhst"),
        Case(n=4, order="zigzag", causal=True, lengths=True, mask="11st", hidden=True),
        Case(n=8, order="zigzag", h=8, k=8, bias="1h1t", mask="b1s1", hidden=True),
    ],
}


def draw_case(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng([case.n, case.s, case.t, *case.bias.encode()])
    sizes = {**{x: getattr(case, x) for x in "bsthkde"}, "1": 1}

    def normal(axes: str) -> np.ndarray:
        return rng.standard_normal([sizes[axis] for axis in axes])

    found: dict[str, Any] = {
        "query": normal("bshd"),
        "key": normal("btkd"),
        "value": normal("btke"),
    }
    if case.bias:
        found["bias"] = normal(case.bias)
        if case.hidden:
            found["bias"][..., 1::4, :] = -np.inf
    if case.mask:
        found["mask"] = normal(case.mask) < 0.3
        if case.hidden and found["mask"].shape[2] > 1:
            found["mask"][:, :, 2::5] = False
    if case.lengths:
        found["query_lengths"] = np.array([case.s - 3, case.s // 2])
        found["key_lengths"] = np.array([case.t // 2 + 1, 0])
    found["grad_output"], found["grad_stats"] = normal("bshe"), normal("bsh")
    return found


def truth_of(case: Case, given: dict[str, Any]) -> list[np.ndarray]:
    """Return output, log-sum-exp and gradients as NumPy's loops have them."""
    logical = {
        name: np.swapaxes(x, 1, 2) if name in ("query", "key", "value") else x
        for name, x in given.items()
        if not name.startswith("grad")
    }
    for name in ("query_lengths", "key_lengths"):
        if name in logical:
            logical[name] = logical[name].reshape(-1, 1, 1, 1)
    window = case.window or ()
    options: dict[str, Any] = {
        "scale": 1 / np.sqrt(case.d),
        "is_causal": case.causal,
        "window": (window, window) if isinstance(window, int) else window,
    }
    results = numpy_attention(logical, **options)
    gradients = numpy_gradients(
        logical,
        np.swapaxes(given["grad_output"], 1, 2),
        np.swapaxes(given["grad_stats"], 1, 2)[..., None],
        **options,
    )
    found = [
        np.swapaxes(results["output"], 1, 2),
        np.swapaxes(results["stats"][..., 0], 1, 2),
    ]
    for name in ("query", "key", "value", "bias"):
        if name in gradients:
            x = gradients[name]
            found.append(x if name == "bias" else np.swapaxes(x, 1, 2))
    return found


def in_order(case: Case, name: str, x: Any, helper: Any) -> Any:
    """Return an array with its token axes put in the case's order, or back."""
    axes = {"bias": (2, 3), "mask": (2, 3), "query_lengths": (), "key_lengths": ()}
    for axis in axes.get(name, (1,)):
        x = x if x.shape[axis] == 1 else helper(x, case.n, case.order, axis)
    return x


def results_of(case: Case, given: dict[str, Any], method: Any) -> list[Any]:
    """Return what `truth_of` does, computed on the case's devices."""
    arrays = {name: x for name, x in given.items() if not name.startswith("grad")}
    specs = {
        name: P(None, None, None if x.shape[2] == 1 else "seq")
        if name in ("bias", "mask")
        else P()
        if name.endswith("lengths")
        else TOKENS
        for name, x in arrays.items()
    }

    def share(*values: jax.Array) -> Any:
        named = dict(zip(arrays, values, strict=True))
        return parallel.sdpa(
            *(named.get(x) for x in ("query", "key", "value", "bias", "mask")),
            axis_name="seq",
            method=method,
            order=case.order,
            is_causal=case.causal,
            query_seq_lengths=named.get("query_lengths"),
            key_value_seq_lengths=named.get("key_lengths"),
            local_window_size=case.window,
            return_residual=True,
        )

    sharded = jax.shard_map(
        share,
        mesh=mesh_of_all(case.n),
        in_specs=tuple(specs.values()),
        out_specs=TOKENS,
    )
    wanted = [name for name in ("query", "key", "value", "bias") if name in arrays]

    def run(moving: dict[str, jax.Array]) -> Any:
        named = {**arrays, **moving}
        values = [in_order(case, x, named[x], ordered) for x in named]
        found = sharded(*values)
        return [in_order(case, "", x, natural) for x in found]

    @jax.jit
    def both(moving: dict[str, jax.Array]) -> Any:
        found, transpose = jax.vjp(run, moving)
        (gradients,) = transpose([given["grad_output"], given["grad_stats"]])
        return [*found, *(gradients[name] for name in wanted)]

    return both({name: jnp.asarray(arrays[name]) for name in wanted})
