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

import json
import re
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.harness.records import renewed, write_records
from benchmarks.models.cudnn_kit import CudnnKit
from benchmarks.models.every import every
from benchmarks.models.jax_steps import drawn, operations, program
from benchmarks.models.plain_kit import PlainKit
from benchmarks.models.zoo import Model
from benchmarks.xla.xla_code import Compiler, Kernel, start

# From NVIDIA's data sheet: bytes and dense bf16 operations a second.
_RATE, _PEAK = 4.8e12, 989e12
_DATA, _PAGE = "model_bytes.json", "model_bytes.md"
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


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Written by benchmarks/models/model_bytes.py: bytes that models move. -->",
        "",
        "# What training steps move",
        "",
        f"Printed by `{data['command']}`; do not edit. The programs of",
        f"[whole models](../../benchmarks/models.md), compiled for an "
        f"{data['GPU']} with JAX {data['JAX']}. No time was measured here.",
        "",
        "A kernel reads each operand and writes each result once. `in calls` is what",
        "cuDNN's and cuBLAS's kernels move. XLA's own code moves the rest. The last",
        f"two columns are the bytes at {_RATE / 1e12:g} TB/s and the operations at "
        f"{_PEAK / 1e12:g} TFLOP/s,",
        "the rates of NVIDIA's data sheet. A call with workspace moves more.",
        "",
        "| model | batch | program | GB | in calls | kernels | bytes, ms "
        "| operations, ms |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in data["rows"]:
        lines.append(
            f"| {row['model']} | {row['size']} | {row['contender']} "
            f"| {row['bytes'] / 1e9:.1f} | {row['bytes_in_calls'] / 1e9:.1f} "
            f"| {row['kernels']} | {row['bytes'] / _RATE * 1e3:.2f} "
            f"| {row['operations'] / _PEAK * 1e3:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compile the models and write the page, after each."""
    options, compiler, data = start("model_bytes", __doc__)
    file = options.out / _DATA
    if file.exists():
        data["rows"] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    trained = [model for model in every() if model.trains]
    order = [model.name for model in trained]
    for model in trained:
        if not re.search(options.only, model.name):
            continue
        print(model.name, flush=True)
        found = list(measure(compiler, model))
        data["rows"] = renewed(data["rows"], found, ["model"], order)
        write_records(file, data)
        (options.out / _PAGE).write_text(markdown(data), encoding="utf-8")


if __name__ == "__main__":
    main()
