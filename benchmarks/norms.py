# SPDX-License-Identifier: Apache-2.0
"""Times norms beside XLA's code and PyTorch's, forward and with gradients, on one GPU.

Run from the repository's root: `python -m benchmarks.norms`. Writes norms.json and
norms.md into the folder --out. `--small` tries the script on a CPU.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks import torch_side
from benchmarks.records import write_records
from benchmarks.report import environment, versions_text
from benchmarks.timing import Contender, Timing, compare
from benchmarks.torch_side import torch
from jax_cudnn import plans

_DATA, _PAGE = "norms.json", "norms.md"
_BASELINE = "xla"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A norm of an array: which, of what shape, and whether with a residual."""

    kind: str
    shape: tuple[int, ...]
    has_residual: bool = False
    groups: int = 32

    @property
    def name(self) -> str:
        """What the norm is."""
        return f"{self.kind}{' + residual' if self.has_residual else ''}"

    @property
    def size(self) -> str:
        """The shape, in words."""
        return " x ".join(map(str, self.shape))


_ROWS = ((16384, 4096), (8192, 8192), (32768, 1024), (32768, 768))
WORKLOADS = (
    *(
        Workload(kind=kind, shape=shape, has_residual=has_residual)
        for kind in ("layer_norm", "rms_norm")
        for shape in _ROWS
        for has_residual in (False, True)
    ),
    Workload(kind="adaptive_layer_norm", shape=(32, 1024, 1152)),
    Workload(kind="batch_norm", shape=(64, 56, 56, 256)),
    Workload(kind="group_norm", shape=(16, 64, 64, 320)),
    Workload(kind="instance_norm", shape=(16, 128, 128, 64)),
)

_Arrays = Sequence[jax.Array]


def _norm(work: Workload, implementation: Any) -> Callable[..., jax.Array]:
    """Return the norm of x, scale, bias and a residual; with one, the sum as well."""
    function = getattr(jax_cudnn, work.kind)
    options: dict[str, Any] = {"implementation": implementation}
    if work.kind == "group_norm":
        options["groups"] = work.groups

    def run(x: Any, scale: Any, bias: Any, residual: Any = None) -> Any:
        own = None if work.kind == "rms_norm" else bias
        return function(x, scale, own, residual=residual, **options)

    return run


def _with_gradients(function: Callable[..., Any], cotangent: jax.Array) -> Any:
    def run(*arrays: Any) -> Any:
        results, pull = jax.vjp(function, *arrays)
        return results, pull(jax.tree.map(lambda _: cotangent, results))

    return run


def _operands(work: Workload) -> tuple[list[jax.Array], jax.Array]:
    factor = (work.shape[-1],)
    if work.kind == "adaptive_layer_norm":
        factor = (work.shape[0], work.shape[-1])
    shapes = [work.shape, factor, factor]
    shapes += [work.shape] if work.has_residual else []
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    arrays = [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, (*shapes, work.shape), strict=True)
    ]
    return arrays[:-1], arrays[-1]


def _jax_contender(function: Callable[..., Any], arrays: _Arrays) -> Contender:
    compiled = jax.jit(function).lower(*arrays).compile()
    return Contender(call=lambda: compiled(*arrays), wait=jax.block_until_ready)


def _tuned(function: Callable[..., Any], arrays: _Arrays) -> Callable[..., Any]:
    """Return the function, with the best of all its plans and XLA's code chosen."""
    plans.autotune(function, *arrays)
    return function


def _torch_contenders(
    work: Workload, arrays: _Arrays, cotangent: jax.Array, *, is_training: bool
) -> dict[str, Contender]:
    if torch is None or work.kind == "adaptive_layer_norm":
        return {}
    functional = torch.nn.functional
    x, scale, bias, *residual = map(torch_side.from_jax, arrays)
    moved = torch_side.from_jax(cotangent)
    if x.ndim == 4:  # PyTorch names channels first and stores them last.
        x, moved = (each.permute(0, 3, 1, 2) for each in (x, moved))
    leaves = [x, scale, *([] if work.kind == "rms_norm" else [bias]), *residual]
    for leaf in leaves:
        leaf.requires_grad_(is_training)

    def norm() -> Any:
        total = x + residual[0] if residual else x
        sizes = (work.shape[-1],)
        if work.kind == "layer_norm":
            output = functional.layer_norm(total, sizes, scale, bias, 1e-6)
        elif work.kind == "rms_norm":
            output = functional.rms_norm(total, sizes, scale, 1e-6)
        elif work.kind == "batch_norm":
            output = functional.batch_norm(
                total, None, None, scale, bias, training=True
            )
        elif work.kind == "group_norm":
            output = functional.group_norm(total, work.groups, scale, bias, 1e-6)
        else:
            output = functional.instance_norm(total, weight=scale, bias=bias)
        return (output, total) if residual else (output,)

    def of(function: Callable[[], Any]) -> Contender:
        def run() -> Any:
            results = function()
            if not is_training:
                return results
            return torch.autograd.grad(results, leaves, [moved] * len(results))

        return torch_side.contender(run)

    return torch_side.usable(
        {"torch eager": of(norm), "torch compiled": of(torch.compile(norm))}
    )


def _check(found: Any, want: Any) -> None:
    """Raise unless two contenders compute the same, up to bf16's rounding."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        x32, y32 = (each.astype(jnp.float32).ravel() for each in (x, y))
        error = float(jnp.linalg.norm(x32 - y32))
        if not error <= 2e-2 * float(jnp.linalg.norm(y32)) + 1e-6:
            raise RuntimeError(f"results differ by {error:.3e}")


def run_workload(work: Workload, *, with_torch: bool) -> list[dict[str, Any]]:
    """Time a norm, forward and with gradients, beside the others."""
    arrays, cotangent = _operands(work)
    rows: list[dict[str, Any]] = []
    on_gpu = jax.default_backend() == "gpu"
    for what in ("forward", "with gradients"):
        is_training = what != "forward"
        functions: dict[str, Any] = {}
        for name, implementation in (("xla", "xla"), ("cudnn", "cudnn")):
            function = _norm(work, implementation)
            if is_training:
                function = _with_gradients(function, cotangent)
            functions[name] = function
        want = jax.jit(functions["xla"])(*arrays)
        _check(jax.jit(functions["cudnn"])(*arrays), want)
        if on_gpu:
            best = _norm(work, "auto")
            best = _with_gradients(best, cotangent) if is_training else best
            functions["tuned"] = _tuned(best, arrays)
        contenders = {
            name: _jax_contender(function, arrays)
            for name, function in functions.items()
        }
        if with_torch:
            contenders |= _torch_contenders(
                work, arrays, cotangent, is_training=is_training
            )
        for name, timing in compare(contenders, baseline=_BASELINE).items():
            rows.append(_row(work, what, name, timing))
            print(work.name, work.size, what, name, f"{timing.median_us:.1f} µs")
        if torch is not None:
            torch_side.release_memory()
    return rows


def _row(work: Workload, what: str, name: str, timing: Timing) -> dict[str, Any]:
    facts = {"norm": work.name, "size": work.size, "what": what, "contender": name}
    return {**facts, **dataclasses.asdict(timing)}


def markdown(rows: list[dict[str, Any]], versions: dict[str, str], command: str) -> str:
    """Return the report as a table, a line a contender."""
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- What norms take on a GPU, beside XLA's code and PyTorch. -->",
        "",
        "# Norms",
        "",
        f"Printed by `{command}`; do not edit. {versions_text(versions)}.",
        "",
        "bf16, scale and bias too. Times are medians a call. The ratio is to `xla`,",
        "round by round in the same run (median, lowest and highest): below 1 is",
        "faster. `cudnn` is cuDNN's first plan, `tuned` what `plans.autotune` found.",
        "",
        "| norm | size | | contender | µs | ratio | range |",
        "| --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    lines += [
        f"| {row['norm']} | {row['size']} | {row['what']} | {row['contender']} "
        f"| {row['median_us']:.1f} | {row['ratio']:.3f} "
        f"| {row['ratio_low']:.3f}-{row['ratio_high']:.3f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _small(work: Workload) -> Workload:
    shape = tuple(min(size, 8) for size in work.shape)
    return dataclasses.replace(work, shape=shape, groups=4)


def main() -> None:
    """Run the workloads and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--small", action="store_true", help="try the script on a CPU")
    options = parser.parse_args()
    command = "python -m benchmarks.norms"
    if options.only:
        command += f" --only '{options.only}'"
    if options.no_torch:
        command += " --no-torch"
    options.out.mkdir(parents=True, exist_ok=True)
    versions = environment()
    rows: list[dict[str, Any]] = []
    for work in WORKLOADS:
        if not re.search(options.only, f"{work.name} {work.size}"):
            continue
        work = _small(work) if options.small else work
        rows += run_workload(work, with_torch=not options.no_torch)
        # Each time, so that a run that is cut off leaves what it measured.
        data = {"environment": versions, "command": command, "rows": rows}
        write_records(options.out / _DATA, data)
        (options.out / _PAGE).write_text(markdown(rows, versions, command))


if __name__ == "__main__":
    main()
