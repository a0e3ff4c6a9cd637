# SPDX-License-Identifier: Apache-2.0
"""Lowers a training step on one machine for the GPU of another, and runs it there.

    python examples/export_for_another_gpu.py --write step.bin --device H200
    python examples/export_for_another_gpu.py --run step.bin      # on that GPU

Writing needs no GPU: the installed cuDNN plans for the named GPU (without a GPU here:
pip install ".[gpuless]"). The plans and their workspaces are part of the file,
so the machine that runs the program needs the same version of cuDNN; the program
refuses any other. Running compares the results with those of XLA's own code.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jax_cudnn
from jax_cudnn import plans

Implementation = Literal["auto", "cudnn", "xla"]
Parameters = dict[str, jax.Array]

IMAGES, SIZE, CHANNELS, HEADS, CLASSES = 16, 16, 128, 4, 40
# How far two bf16 results may differ, in norm. The reference's results differ from f32
# by up to 9e-3.
ALLOWED = 3e-2


def loss(
    parameters: Parameters,
    images: jax.Array,
    labels: jax.Array,
    implementation: Implementation,
) -> jax.Array:
    """Return the cross-entropy of convolution, attention over pixels, and classes."""
    x = jax_cudnn.conv(
        *(images, parameters["filters"], (1, 1), "SAME"),
        bias=parameters["bias"],
        activation="relu",
        dimension_numbers="NHWC",
        implementation=implementation,
    )
    tokens = x.reshape(IMAGES, SIZE * SIZE, HEADS, CHANNELS // HEADS)
    mixed = jax_cudnn.sdpa(tokens, tokens, tokens, implementation=implementation)
    pooled = jnp.mean(mixed.reshape(IMAGES, SIZE * SIZE, CHANNELS), axis=1)
    logits = jax_cudnn.matmul(
        pooled, parameters["classes"], implementation=implementation
    )
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(chances, labels[:, None], axis=1))


def step(parameters: Parameters, images: jax.Array, labels: jax.Array) -> Any:
    """Return the loss and its gradients, by cuDNN."""
    return jax.value_and_grad(loss, (0, 1))(parameters, images, labels, "cudnn")


def xla_step(parameters: Parameters, images: jax.Array, labels: jax.Array) -> Any:
    """Return the same by XLA's own code, for comparison."""
    return jax.value_and_grad(loss, (0, 1))(parameters, images, labels, "xla")


def operands() -> tuple[Parameters, jax.Array, jax.Array]:
    """Return the same random parameters and images on every machine."""
    keys = jax.random.split(jax.random.key(0), 4)

    def normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
        return (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)

    parameters = {
        "filters": normal(keys[0], (3, 3, CHANNELS, CHANNELS), (9 * CHANNELS) ** -0.5),
        "bias": normal(keys[1], (CHANNELS,), 0.1),
        "classes": normal(keys[2], (CHANNELS, CLASSES), 1.0),
    }
    images = normal(keys[3], (IMAGES, SIZE, SIZE, CHANNELS), 1.0)
    return parameters, images, jnp.arange(IMAGES) % CLASSES


def write(path: Path, device: str) -> None:
    """Plan the step for a GPU by its name, and write the exported program."""
    shapes = jax.eval_shape(operands)
    with plans.using(device=device):
        exported = jax.export.export(
            jax.jit(step),
            platforms=["cuda"],
            disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
        )(*shapes)
        print(plans.inspect(step, *shapes))
    path.write_bytes(exported.serialize())
    print(f"wrote {path}, {path.stat().st_size:,} bytes")


def run(path: Path) -> bool:
    """Run an exported step, and return whether its results are XLA's."""
    try:
        exported = jax.export.deserialize(bytearray(path.read_bytes()))
    except OSError as error:
        sys.exit(f"{path} cannot be read: {error.strerror}")
    except ImportError as error:  # of flatbuffers
        sys.exit(f"{error}: pip install flatbuffers")
    except Exception as error:  # of flatbuffers or JAX, which do not say which
        sys.exit(f"{path} is not a program that --write wrote: {error}")
    here = jax.devices()[0]
    if here.platform != "gpu":
        sys.exit(
            f"{path} is a program for an NVIDIA GPU; JAX has {here.platform} here."
        )
    found = jax.jit(exported.call)(*operands())
    expected = jax.jit(xla_step)(*operands())
    print(f"on {here.device_kind}, against XLA (allowed: {ALLOWED:.0e} in norm)")
    is_right = True
    for (name, x), y in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        error = float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))
        is_right &= error < ALLOWED
        word = "ok" if error < ALLOWED else "WRONG"
        print(f"  {jax.tree_util.keystr(name):16} {error:.1e} {word}")
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="lower and write")
    what.add_argument("--run", type=Path, metavar="FILE", help="run and compare")
    parser.add_argument("--device", default="H200", help="the GPU to write for (H200)")
    given = parser.parse_args()
    if given.run:
        return 0 if run(given.run) else 1
    try:
        write(given.write, given.device)
    except ValueError as error:
        parser.error(str(error))
    except (jax_cudnn.LibraryError, ImportError) as error:
        sys.exit(f"cannot plan here for a GPU that is elsewhere: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
