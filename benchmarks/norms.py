# SPDX-License-Identifier: Apache-2.0
"""Times norms beside XLA's code and PyTorch's, forward and with gradients, on one GPU.

Run from the repository's root: `python -m benchmarks.norms`. Writes norms.json and
norms.md into the folder --out. `--random 60` draws workloads, `--no-tuning` and
`--no-torch` leave contenders out, and `--small` tries the script on a CPU.
"""

import argparse
import dataclasses
import math
import random
import re
import shlex
import sys
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
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """What the norm is."""
        dtype = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"{self.kind}{dtype}{' + residual' if self.has_residual else ''}"

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


def _drawn(count: int) -> list[Workload]:
    """Return random workloads of a million to 128 million elements."""
    rng = random.Random(0)
    kinds = (*("layer_norm", "rms_norm") * 2, "batch_norm", "adaptive_layer_norm")
    kinds += ("group_norm", "instance_norm")
    works: list[Workload] = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        elements = round(2 ** rng.uniform(20, 27))
        is_image = kind in ("group_norm", "instance_norm", "batch_norm")
        groups = rng.choice((8, 32))
        unit = groups if kind == "group_norm" else rng.choice((1, 8, 64, 64))
        most = 11 if is_image else 14
        features = unit * max(1, round(2 ** rng.uniform(6, most) / unit))
        if is_image:
            side = round(2 ** rng.uniform(2.5, 7))
            batch = max(1, round(elements / features / side**2))
            shape: tuple[int, ...] = (batch, side, side, features)
        elif kind == "adaptive_layer_norm":
            batch = round(2 ** rng.uniform(0, 6))
            tokens = max(1, round(elements / features / batch))
            shape = (batch, tokens, features)
        else:
            shape = (max(1, round(elements / features)), features)
        dtype = rng.choice(("bfloat16", "bfloat16", "float32"))
        works.append(Workload(kind=kind, shape=shape, groups=groups, dtype=dtype))
    assert all(math.prod(work.shape) > 0 for work in works)
    return works


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
        jax.random.normal(key, shape, work.dtype)
        for key, shape in zip(keys, (*shapes, work.shape), strict=True)
    ]
    return arrays[:-1], arrays[-1]


def _jax_contender(function: Callable[..., Any], arrays: _Arrays) -> Contender:
    compiled = jax.jit(function).lower(*arrays).compile()
    return Contender(call=lambda: compiled(*arrays), wait=jax.block_until_ready)


def _tuned(function: Callable[..., Any], arrays: _Arrays) -> Callable[..., Any]:
    """Return the function, with the best of all its plans and XLA's code chosen."""
    print(plans.autotune(function, *arrays))
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


def run_workload(
    work: Workload, *, with_tuning: bool, with_torch: bool
) -> list[dict[str, Any]]:
    """Time a norm, forward and with gradients, beside the others."""
    arrays, cotangent = _operands(work)
    rows: list[dict[str, Any]] = []
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
        if with_tuning:
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
        "bf16 where no dtype is named, scale and bias too. Times are medians a call.",
        "The ratio is to `xla`, round by round in the same run (median, lowest and",
        "highest): below 1 is faster. `cudnn` is cuDNN's first plan, `tuned` what",
        "`plans.autotune` found.",
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
    parser.add_argument("--random", type=int, metavar="N", help="draw N workloads")
    parser.add_argument("--no-tuning", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--small", action="store_true", help="try the script on a CPU")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.norms", *sys.argv[1:]])
    options.out.mkdir(parents=True, exist_ok=True)
    versions = environment()
    rows: list[dict[str, Any]] = []
    for work in _drawn(options.random) if options.random else WORKLOADS:
        if not re.search(options.only, f"{work.name} {work.size}"):
            continue
        work = _small(work) if options.small else work
        rows += run_workload(
            work,
            with_tuning=not options.no_tuning and jax.default_backend() == "gpu",
            with_torch=not options.no_torch,
        )
        # Each time, so that a run that is cut off leaves what it measured.
        data = {"environment": versions, "command": command, "rows": rows}
        write_records(options.out / _DATA, data)
        (options.out / _PAGE).write_text(markdown(rows, versions, command))


if __name__ == "__main__":
    main()
