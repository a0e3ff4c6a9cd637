# SPDX-License-Identifier: Apache-2.0
"""Runs random problems of norms, products, convolutions and others, for a page.

    python -m scripts.random_operations --out docs

writes docs/random_operations.md. Needs an NVIDIA GPU. Several processes share it, and
all GPUs that there are.
`--more` keeps what an earlier run left in the folder, and runs the problems that are
missing there, or failed. `--families groups experts` runs those two alone, and
`--part 2/4` the second quarter of the problems. `--only SEED` runs the problem of each
family with that number and prints its errors; `--platform cpu --most 2048` tries the
script without a GPU.
"""

import argparse
import collections
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from jax_cudnn import plans
from jax_cudnn.config import Implementation
from jax_cudnn.errors import UnsupportedError
from scripts import random_runs
from scripts.random_runs import Key, Record, Suite
from tests.lowering import random_operations
from tests.lowering.operation_problems import Problem

_AMOUNTS: dict[random_operations.Family, int] = {
    "norms": 300,
    "pooling": 200,
    "ragged_dot": 200,
    "groups": 400,
    "experts": 400,
    "fuse": 200,
    "convolutions": 300,
}


def run_problem(problem: Problem) -> Record:
    """Run a problem with cuDNN and compare all its results with the answers.

    What cuDNN refuses is run with "auto", too: it may not be wrong there.
    """
    try:
        return _run(problem, "cudnn")
    except UnsupportedError as error:
        reason = random_runs.why_refused(str(error))
    other = _run(problem, "auto")
    if other["outcome"] == "wrong":
        return {**other, "refusal": reason}
    return {"outcome": "refused", "reason": reason, "auto": other}


def _run(problem: Problem, implementation: Implementation) -> Record:
    arrays = {name: jnp.asarray(x) for name, x in problem.arrays.items()}
    run = jax.jit(lambda arrays: problem.call(arrays, implementation))
    traced = run.trace(arrays)
    ran = collections.Counter[str]()
    for call in plans.inspect(traced).calls:
        ran[call.implementation] += call.count
    compiled = traced.lower().compile()
    random_runs.poison()
    ratios = problem.worst_ratios(jax.block_until_ready(compiled(arrays)))
    is_right = max(ratios.values()) <= 1
    outcome = "right" if is_right else "wrong"
    return {"outcome": outcome, "calls": dict(ran), "ratios": ratios}


def _keys(arguments: argparse.Namespace) -> Iterator[Key]:
    """Return the families' problems mixed evenly, so that a cut-off run has all."""
    chosen = arguments.families or random_operations.FAMILIES
    amounts = {x: getattr(arguments, x) for x in chosen}
    places = [
        ((seed + 0.5) / amount, family, seed)
        for family, amount in amounts.items()
        for seed in range(amount)
    ]
    for _, family, seed in sorted(places):
        yield {"family": family, "seed": seed}


def _begin(arguments: argparse.Namespace, key: Key) -> tuple[str, Callable[[], Record]]:
    problem = random_operations.draw_problem(
        key["family"], key["seed"], most=arguments.most
    )
    return problem.text, functools.partial(run_problem, problem)


# --- the page -------------------------------------------------------------------------

_ABOUT = """\
Each problem is drawn from its family and its number
(`tests/lowering/random_operations.py`); every other one has gradients. Norms: up to
five axes, of which any are normalised, groups, residuals, statistics with cotangents,
and results in f8. Pooling: windows, strides, padding that differs or cuts, layouts; a
third of the arrays has ties, or NaN and infinities. ragged_dot: up to 100 groups, some
empty, NaN in rows that are in none. groups: the same with all rows in one group, and
with NaN or an infinity in one group, which no other may notice; half of them are
products in f8, quantised or stored. experts: mixtures of up to 24 experts, a quarter of
them in f8, with and without a capacity, all tokens on one expert, a token of NaN.
fuse: programs of up to nine steps beside a product; those with gradients have no
operation whose derivative jumps. Convolutions: causal ones, gated ones, and residual
branches with a `branch_scale`, of matmuls too. Operands are bf16, f16 or f32.

`implementation="cudnn"` computes it. Memory is filled with NaN before. Results are
compared with closed forms in NumPy and float64. Operands of products in f8 are rounded
in NumPy. Each entry has a bound of its own, made of what is rounded to the dtypes at
hand, and of the TF32 in which f32 is multiplied. Programs and convolutions are compared
with the plain function in float64 on a CPU. Their bound is four times the largest error
that XLA makes in the same dtypes. That of a mixture of experts is a part of the
result's largest number: 16 roundings to its dtype and 32 of gradients, and in f8 0.2
and 0.35 besides. A single expert's share, normalised, is 1: the router's gradient is
what rounding leaves of terms that cancel, and may be 2^-20 of them. A problem is right
if all entries of all results are within it; "by XLA", if cuDNN ran no part of it (by
`plans.inspect`). What cuDNN refuses is computed with "auto" as well, and would be wrong
here if that were.""".splitlines()
_OUTCOMES = ("right", "by XLA", "wrong", "refused", "failed")


def _outcome(record: Record) -> str:
    if record["outcome"] == "right" and not record["calls"].get("cudnn"):
        return "by XLA"
    return record["outcome"]


def _operation(record: Record) -> str:
    return record["problem"].partition("(")[0]


def _tables(records: Sequence[Record]) -> list[str]:
    known = [record for record in records if "family" in record]
    rows: list[tuple[str, list[Record]]] = []
    for family in random_operations.FAMILIES:
        own = [record for record in known if record["family"] == family]
        operations = sorted(set(map(_operation, own)))
        kinds = [(family, own)]
        if len(operations) > 1:
            kinds += [
                (name, [record for record in own if _operation(record) == name])
                for name in operations
            ]
        for name, chosen in kinds:
            for direction, is_backward in (("results", False), ("gradients", True)):
                some = [
                    record
                    for record in chosen
                    if random_operations.has_gradients(record["seed"]) is is_backward
                ]
                rows += [(f"{name}, {direction}", some)] if some else []
    lines = random_runs.counts(_OUTCOMES, [("all", known), *rows], _outcome)
    lines += ["", *_calls(known)]
    return lines + random_runs.largest_errors(
        known, lambda record, name: f"{record['family']}: {name.rstrip(' 12')}"
    )


def _calls(records: Sequence[Record]) -> list[str]:
    """Return sentences on who ran the calls of what is right, and what was refused."""
    ran = collections.Counter[str]()
    for record in records:
        if record["outcome"] == "right":
            ran.update(record["calls"])
    others = [record["auto"] for record in records if "auto" in record]
    parts = sum(1 for record in others if record["calls"].get("cudnn"))
    return [
        f"Of the {ran.total()} calls in problems that are right, cuDNN ran "
        f"{ran['cudnn']} and XLA {ran['xla']}.",
        f'Of the {len(others)} refused ones, "auto" computed all rightly, {parts} of '
        "them with calls of cuDNN.",
    ]


SUITE = Suite(
    name="random_operations",
    title="Random problems of other operations",
    comment="How many random norms, poolings and products cuDNN computed rightly.",
    about=_ABOUT,
    keys=_keys,
    begin=_begin,
    tables=_tables,
)


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    for family, amount in _AMOUNTS.items():
        parser.add_argument(f"--{family.replace('_', '-')}", type=int, default=amount)
    parser.add_argument(
        "--families", nargs="+", choices=random_operations.FAMILIES, help="default: all"
    )
    parser.add_argument("--most", type=int, help="elements of the largest arrays")
    random_runs.main(SUITE, parser)


if __name__ == "__main__":
    main()
