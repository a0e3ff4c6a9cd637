# SPDX-License-Identifier: Apache-2.0
"""Lists what "auto" decides on a measured GPU for many parts: answers.json.

    python -m tests.policy.answers

writes the file anew. It is to change only with what was measured, and then says how.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from jax_cudnn.graph import Graph, Target
from jax_cudnn.lowering import traced_program
from jax_cudnn.policy import Ranked, ranked
from tests.products.shared import fusion_cases
from tests.products.shared.grouped_layers import GroupedLayer

FILE = Path(__file__).with_name("answers.json")
H100 = Target(
    name="NVIDIA H100 80GB HBM3", sm_version=90, sm_count=132, cudnn_version=91900
)
# Of the cases of convolutions and products, each one in so many.
_STEP = 6
_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}


@functools.cache
def parts() -> Mapping[str, Graph]:
    """Return parts of graphs by name."""
    return dict(_parts())


def _parts() -> Iterator[tuple[str, Graph]]:
    for case in fusion_cases.ALL[::_STEP]:
        for part in fusion_cases.parts(case):
            yield part.key, part.graph
    for name, layer in _layers():
        for short, dtype in _DTYPES.items():
            for kind, part in layer.parts(dtype).items():
                yield f"{name}/{short}/{kind}", part
    for name, function, operands in _calls():
        run, given = _with_gradients(function, operands)
        for graph in traced_program(run, *given).graphs:
            for place, part in enumerate(graph.parts):
                yield f"{name}/{part.nodes[0].kind}/{place}", part


def answer(ways: tuple[Ranked, ...]) -> list[str]:
    """Return what is said of each way, in a line."""
    return [
        ", ".join(
            filter(
                None,
                (
                    " ".join(way.rewrite.names) or "one way",
                    "xla" if way.slower else "cudnn",
                    f"not by {list(way.slow_engines)}" if way.slow_engines else "",
                    f"only by {list(way.fast_engines)}" if way.fast_engines else "",
                    _told(way.preference),
                ),
            )
        )
        for way in ways
    ]


def _told(preference: str) -> str:
    """Return which engines, with the numbers of their kernels, go before which."""
    if not preference:
        return ""
    orders = (
        f"{' '.join(map(_engine, each['wanted']))} before {each['first_engine']}"
        for each in json.loads(preference)["preferred"]
    )
    return "; ".join(orders)


def _engine(wanted: dict[str, Any]) -> str:
    knobs = wanted.get("knobs", {}).values()
    return "/".join(map(str, (wanted["engine"], *knobs)))


def answers() -> dict[str, list[str]]:
    """Return what is said of each part."""
    return {name: answer(ranked(part, H100)) for name, part in parts().items()}


def _layers() -> Iterator[tuple[str, GroupedLayer]]:
    for window in (1, 3, 4, 7, 9):
        yield f"depthwise {window}", GroupedLayer((14, 15), (window, window))
        yield f"depthwise, one axis, {window}", GroupedLayer((33,), (window,))
    yield "depthwise, holes", GroupedLayer((9, 8), (3, 3), hole=2)
    yield "depthwise, steps", GroupedLayer((9, 8), (3, 3), step=2)
    yield "depthwise, silu", GroupedLayer((9, 8), (3, 3), activation="silu")
    for groups, width in ((32, 2), (32, 8), (7, 4), (16, 64), (5, 24), (21, 48)):
        name = f"{groups} groups of {width}"
        sizes: dict[str, Any] = {"groups": groups, "width": width, "each": width}
        yield name, GroupedLayer((8, 8), (3, 3), **sizes)
        yield f"{name}, silu", GroupedLayer((8, 8), (3, 3), activation="silu", **sizes)


def _calls() -> Iterator[tuple[str, Callable[..., Any], list[Any]]]:
    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    for shape in ((1, 512, 8, 64), (8, 512, 1, 64), (1, 1448, 1, 64), (2, 2048, 4, 64)):
        for name, dtype in _DTYPES.items():
            operands = [array(*shape, dtype=dtype)] * 3
            yield f"sdpa {shape} {name}", jax_cudnn.sdpa, operands
    for rows, features in ((16384, 4096), (16384, 1000), (512, 1024), (16384, 128)):
        given = [array(rows, features), array(features)]
        yield f"layer_norm {rows} {features}", _layer_norm, given
        yield f"rms_norm {rows} {features}", _rms_norm, given
    for rows, k, n, groups in ((16384, 4096, 4096, 8), (16384, 2048, 2048, 64)):
        sizes = array(groups, dtype=jnp.int32)
        given = [array(rows, k), array(groups, k, n), sizes]
        yield f"ragged_dot {rows} {groups}", jax_cudnn.ragged_dot, given
    yield "avg_pool", lambda x: jax_cudnn.avg_pool(x, (3, 3)), [array(4, 28, 28, 64)]


def _layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jax_cudnn.layer_norm(x, scale=scale)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jax_cudnn.rms_norm(x, scale=scale)


def _with_gradients(
    function: Callable[..., Any], operands: list[Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of the operands and a cotangent, and these."""

    def run(cotangent: Any, *given: Any) -> Any:
        result, pullback = jax.vjp(function, *given)
        return result, pullback(cotangent)

    return run, [jax.eval_shape(function, *operands), *operands]


def main() -> None:
    """Write the file, a part on each line."""
    lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
