# SPDX-License-Identifier: Apache-2.0
"""Compiles a training step of Llama for GPUs that are not here.

    pip install "jax[cuda13]" flax optax
    python -m benchmarks.llama_offline --gpus 8 --out docs/internals/measured

adds to llama_offline.json and llama_offline.md there what each GPU holds and receives.
No array is made, and neither the programs nor a driver run. Without the package's
extra, or with `--cpu`, the step is compiled for as many devices of the CPU, where bf16
is f32 and f8 is f16.

Plain JAX has XLA's attention here, since JAX asks a GPU for its cuDNN. So its memory is
not told.
"""

import argparse
import shlex
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
from language.training import Trainer
from llama.layout import POLICIES, choose_layout
from llama.settings import SIZES
from llama.task import llama_task

from benchmarks.harness.page import Data, Page, Row, table
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from benchmarks.sharding.llama import ROWS, WAYS, Way
from benchmarks.sharding.several_gpus import cudnn_calls
from benchmarks.sharding.steps import PLAIN
from benchmarks.xla.traffic import moved, told_of, told_of_moved
from benchmarks.xla.traffic import received as received_of
from benchmarks.xla.xla_code import described
from jax_cudnn import offline, plans

# What names a row of the table.
_NAMES = ("size", "GPU", "gpus", "mesh", "rows", "packed", "remat", "contender")
_COMPILED = [PLAIN, "jax_cudnn", "jax_cudnn, sums in f32", "jax_cudnn, f8"]
# XLA would time kernels to choose among them.
_OPTIONS = {"xla_gpu_autotune_level": 0}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The devices to compile for: those of GPUs by their name, or of the CPU."""

    gpu: str | None
    devices: list[Any]

    @classmethod
    def of(cls, gpu: str | None, count: int) -> "Target":
        """Return as many devices; None is for the CPU's."""
        if gpu is None:
            return cls(gpu=None, devices=jax.devices()[:count])
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x1x{count}",
            target_config=described(offline.find(gpu)),
        )
        return cls(gpu=gpu, devices=list(topology.devices))

    def compiled(self, traced: Any) -> Any:
        """Return a traced program, compiled for the devices."""
        if self.gpu is None:
            return traced.lower().compile()
        lowered = traced.lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options=_OPTIONS)


def measure(way: Way, options: argparse.Namespace, target: Target) -> Row:
    """Compile one contender's step, and count."""
    settings = replace(
        SIZES[options.size],
        batch=options.rows * options.gpus,
        dtype="bfloat16",
        packed=options.packed,
        baseline=way.is_plain,
        f8=way.f8,
        reduce_dtype=way.reduce_dtype,
    )
    layout = choose_layout(
        options.mesh, settings, remat=options.remat, devices=target.devices
    )
    trainer = Trainer(llama_task(settings, layout))
    start = time.process_time()
    with plans.using(device=target.gpu):
        traced = trainer.traced
        traced_s = time.process_time() - start
        program = target.compiled(traced)
    compiled_s = time.process_time() - start - traced_s
    memory, text = program.memory_analysis(), program.as_text()
    return {
        "contender": way.name,
        "state_mib": round(memory.argument_size_in_bytes / 2**20),
        "scratch_mib": round(memory.temp_size_in_bytes / 2**20),
        "cudnn_calls": len(cudnn_calls(text)),
        "trace_s": round(traced_s, 2),
        "compile_s": round(compiled_s, 1),
        "received": received_of(text),
        "moved": moved(text),
    }


def _head(data: Data) -> str:
    return (
        f"Printed by `{data['command']}` and others like it; do not edit. "
        f"JAX {data['environment']['JAX']}."
    )


def _lines(data: Data) -> list[str]:
    return [
        "A step of examples/train_llama.py, in bf16, with plans that are not tuned. "
        "State and scratch are what XLA allocates on each device. What a device "
        "receives in a step is by kind and dtype, the layers' loop counted as often as "
        "it runs: how many collectives, and MiB. On devices of the CPU, XLA sends bf16 "
        "as f32 and f8 as f16. Sums over devices are in bf16, but for a contender "
        "that says f32. Moved is what XLA's kernels read and write, without products, "
        "attention and collectives: how often the step and each of its loops run, and "
        "MiB. Plain JAX has XLA's attention here, whose scratch and kernels are "
        "not cuDNN's and are left out. Seconds are of one CPU, for tracing, and "
        "for lowering and compiling.",
        "",
        *table(
            "size | devices | mesh | >rows each | remat | contender | >state MiB "
            "| >scratch MiB | >received MiB | of them | moved | >trace s | >compile s",
            map(_cells, data["rows"]),
        ),
    ]


def _cells(row: Row) -> list[Any]:
    received = row["received"]
    return [
        f"{row['size']}{', packed' if row['packed'] else ''}",
        *(f"{row['gpus']} {row['GPU']}", row["mesh"], row["rows"], row["remat"]),
        *(row["contender"], f"{row['state_mib']:,}"),
        "" if row["contender"] == PLAIN else f"{row['scratch_mib']:,}",
        *(f"{sum(mib for *_, mib in received):,}", told_of(received)),
        "" if row["contender"] == PLAIN else told_of_moved(row.get("moved", [])),
        *(f"{row['trace_s']:.1f}", f"{row['compile_s']:.0f}"),
    ]


markdown = Page(
    name="llama_offline",
    title="Llama-2 compiled for GPUs that are not there",
    head=_head,
    lines=_lines,
)


def main() -> None:
    """Compile the contenders and add them to the report."""
    made = parser(__doc__)
    add = made.add_argument
    add("--size", choices=SIZES, default="7B")
    add("--gpus", type=int, default=8)
    add("--gpu", default="H100", help="by a name of jax_cudnn.offline; default: H100")
    add("--cpu", action="store_true", help="compile for devices of the CPU")
    add("--mesh", help="such as fsdp=4,tensor=2; default: all along fsdp")
    add("--rows", type=int, help="of the batch, for each GPU; default: by the size")
    add("--packed", action="store_true")
    add("--remat", choices=("none", *POLICIES), default="dots")
    add("--contenders", nargs="+", default=_COMPILED)
    options = made.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.gpus)
    plans.set_cache(None)  # no plans and choices of other runs, and none left behind
    options.rows = options.rows or ROWS[options.size]
    target = Target.of(None if options.cpu else options.gpu, options.gpus)
    about = {
        "size": options.size,
        "GPU": "CPU devices" if options.cpu else options.gpu,
        "gpus": options.gpus,
        "mesh": options.mesh or f"fsdp={options.gpus}",
        "rows": options.rows,
        "packed": options.packed,
        "remat": options.remat,
    }
    command = ["python", "-m", "benchmarks.llama_offline", "--size", options.size]
    command += ["--gpus", str(options.gpus), "--gpu", options.gpu]
    found = Table(
        folder=options.out,
        page=markdown,
        keys=_NAMES,
        order=tuple(SIZES),
        versions={"GPU": about["GPU"], "JAX": jax.__version__},
        about={"command": shlex.join(command)},
    )
    for way in WAYS:
        if way.name in options.contenders:
            row = {**about, **measure(way, options, target)}
            print(row, flush=True)
            found.add(row)


if __name__ == "__main__":
    main()
