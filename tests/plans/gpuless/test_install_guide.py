# SPDX-License-Identifier: Apache-2.0
"""The guide to installing says of GPUs by their names what cuDNN plans for them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import plans

_GUIDE = Path(__file__).parents[3] / "docs" / "install.md"
_S = jax.ShapeDtypeStruct


def _told() -> dict[str, list[str]]:
    """Return what the table's columns say of each GPU."""
    text = _GUIDE.read_text(encoding="utf-8").partition("| GPU | attention and")[2]
    table = text.partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    return {name: said for names, *said in rows for name in names.split(", ")}


def _attend(x: jax.Array) -> jax.Array:
    def loss(x: jax.Array) -> jax.Array:
        y = jax_cudnn.sdpa(x, x, x, is_causal=True, implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    return jax.grad(loss)(x)


def _products(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array) -> Any:
    image = jax_cudnn.conv(
        x, w, dimension_numbers="NHWC", activation="relu", implementation="cudnn"
    )
    return image, jax_cudnn.matmul(a, b, activation="gelu", implementation="cudnn")


def _in_f8(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax_cudnn.matmul(
        a, b, preferred_element_type=jnp.bfloat16, implementation="cudnn"
    )


def _who(device: str, function: Any, *operands: Any) -> str:
    told = plans.explain(function, *operands, device=device)
    runs = {not call.is_refused for call in told.calls}
    assert len(runs) == 1, (device, function)
    return "cuDNN" if runs.pop() else "XLA"


# One GPU of each architecture: cuDNN plans for the architecture.
@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["T4", "A100", "RTX 3090", "L4", "H200", "B200", "RTX 5090"]
)
def test_gpus_run_what_the_guide_says(name: str) -> None:
    bf16, f8 = jnp.bfloat16, jnp.float8_e4m3fn
    images = (_S((4, 16, 16, 64), bf16), _S((3, 3, 64, 64), bf16))
    matrices = [(_S((512, 256), dtype), _S((256, 1024), dtype)) for dtype in (bf16, f8)]
    found = [
        _who(name, _attend, _S((2, 256, 8, 64), bf16)),
        _who(name, _products, *images, *matrices[0]),
        _who(name, _in_f8, *matrices[1]),
    ]
    assert found == _told()[name]
