# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that the kernels of a training step move, without a GPU.

    pip install "jax[cuda13]" flax optax
    python -m benchmarks.model_bytes --out docs/internals/measured

compiles the training steps of benchmarks/models for an H200, as plain JAX and with
jax_cudnn untuned, and writes model_bytes.json and model_bytes.md there. Neither the
programs nor the driver run. `--only REGEX` chooses models; those of others that the
file in the folder has are kept. (A step that only updates caches in place would be
counted as if it wrote them whole.)
"""

from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.harness.page import Data, Page, table
from benchmarks.models.cudnn_kit import CudnnKit
from benchmarks.models.every import every
from benchmarks.models.jax_steps import drawn, operations, program
from benchmarks.models.plain_kit import PlainKit
from benchmarks.models.zoo import Model
from benchmarks.xla.xla_code import Compiler, Kernel, measured

# From NVIDIA's data sheet: bytes and dense bf16 operations a second.
_RATE, _PEAK = 4.8e12, 989e12
_KITS = {"plain JAX, attention by XLA": PlainKit, "jax_cudnn": CudnnKit}


def measure(compiler: Compiler, model: Model) -> Iterator[dict[str, Any]]:
    """Yield what each program of a model's training step moves."""
    flops = operations(model, is_training=True)
    for name, kit in _KITS.items():
        found = _kernels(compiler, model, kit())
        called = [each for each in found if each.op == "custom-call"]
        yield {
            "model": model.name,
            "size": model.size,
            "contender": name,
            "bytes": _total(found),
            "bytes_in_calls": _total(called),
            "kernels": len(found),
            "operations": flops,
        }


def _kernels(compiler: Compiler, model: Model, kit: PlainKit) -> list[Kernel]:
    step, *operands = program(model, kit, *drawn(model), rate=1e-3, is_training=True)
    flat, tree = jax.tree.flatten(operands)
    return compiler.kernels(
        lambda *arrays: step(*jax.tree.unflatten(tree, arrays)),
        flat,
        "auto",
        # Untuned, XLA cannot compile every product as code of its own.
        xla_gpu_enable_triton_gemm=False,
    )


def _total(found: list[Kernel]) -> int:
    return sum(each.read + each.written for each in found)


def _lines(data: Data) -> list[str]:
    return [
        "The training steps of [whole models](../../benchmarks/models.md), compiled",
        "for that GPU. No time was measured here.",
        "",
        "A kernel reads each operand and writes each result once. `in calls` is what",
        "cuDNN's and cuBLAS's kernels move. XLA's own code moves the rest. The last",
        f"two columns are the bytes at {_RATE / 1e12:g} TB/s and the operations at "
        f"{_PEAK / 1e12:g} TFLOP/s,",
        "the rates of NVIDIA's data sheet. A call with workspace moves more.",
        "",
        *table(
            "model | batch | program | >GB | >in calls | >kernels | >bytes, ms "
            "| >operations, ms",
            map(_cells, data["rows"]),
        ),
    ]


def _cells(row: dict[str, Any]) -> list[Any]:
    return [
        *(row["model"], row["size"], row["contender"]),
        *(f"{row[name] / 1e9:.1f}" for name in ("bytes", "bytes_in_calls")),
        row["kernels"],
        f"{row['bytes'] / _RATE * 1e3:.2f}",
        f"{row['operations'] / _PEAK * 1e3:.2f}",
    ]


markdown = Page(
    name="model_bytes",
    title="What training steps move",
    comment="The bytes that the training steps of models move.",
    lines=_lines,
)


def _cases(*, small: bool) -> list[Model]:
    return [model for model in every(small=small) if model.trains]


if __name__ == "__main__":
    measured(__doc__, _cases, measure, markdown)
