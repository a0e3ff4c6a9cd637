# SPDX-License-Identifier: Apache-2.0
"""Runs random problems of attention on cuDNN and writes docs/random_attention.md.

    python -m scripts.random_attention --out docs

Needs an NVIDIA GPU. With torch installed, the answers in float64 are computed there.
Several processes share the GPU. `--more` keeps what an earlier run left in the folder,
and runs the problems that are missing there, or failed. `--only SEED` runs one problem
and prints its errors; `--platform cpu --longest 40` tries the script without a GPU.
"""

import argparse
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import torch_side
from benchmarks.harness.torch_side import torch
from jax_cudnn.errors import UnsupportedError
from scripts import random_runs
from scripts.random_runs import Key, Record, Suite
from tests.attention.shared import random_attentions, random_decode
from tests.common.judged import worst_ratio

# What is no gradient, as the page calls it.
_RESULTS = {"output": "output", "lse": "log-sum-exp", "max": "largest score"}


def run_problem(source: Any, problem: Any, *, with_gradients: bool) -> Record:
    """Run a problem with cuDNN and compare all its results with the answers.

    ``source`` is the module that drew it.
    """
    arrays = source.make_arrays(problem)
    random_runs.poison()
    function = source.results if with_gradients else source.call
    run = jax.jit(functools.partial(function, problem, implementation="cudnn"))
    try:
        found = run({name: jnp.asarray(x) for name, x in arrays.items()})
    except UnsupportedError as error:
        return {"outcome": "refused", "reason": random_runs.why_refused(str(error))}
    judged = source.judge(problem, arrays, with_gradients=with_gradients)
    if torch is not None:
        torch_side.release_memory()  # Other processes share it.
    ratios = {name: worst_ratio(x, judged[name]) for name, x in found.items()}
    is_right = max(ratios.values()) <= 1
    return {"outcome": "right" if is_right else "wrong", "ratios": ratios}


def _keys(arguments: argparse.Namespace) -> Iterator[Key]:
    """Return all kinds by turns, so that a cut-off run has each."""
    forward, backward = arguments.forward, arguments.backward
    for i in range(max(forward, 2 * backward, 4 * arguments.decode)):
        if i < forward:
            yield {"seed": i, "backward": False}
        if i % 4 == 0 and i // 4 < arguments.decode:
            yield {"seed": forward + backward + i // 4, "backward": False}
        if i % 2 and i // 2 < backward:
            yield {"seed": forward + i // 2, "backward": True}


def _begin(arguments: argparse.Namespace, key: Key) -> tuple[str, Callable[[], Record]]:
    is_decode = key["seed"] >= arguments.forward + arguments.backward
    source = random_decode if is_decode else random_attentions
    problem = source.draw_problem(
        key["seed"], longest=arguments.longest, most_scores=arguments.most_scores
    )
    run = functools.partial(
        run_problem, source, problem, with_gradients=key["backward"]
    )
    return str(problem), run


# --- the page -------------------------------------------------------------------------


def _head_size(text: str) -> int:
    found = re.search(r" d=(\d+)", text)
    assert found is not None
    return int(found.group(1))


_ABOUT = """\
Each problem is drawn from its number (`tests/attention/shared/random_attentions.py`):
batch 1 to 16, lengths 1 to 2048, head sizes to 256 and some to 576, MHA, GQA and MQA as
1 to 4 to 1, bf16 or f16, and a mixture of masks and other arguments.
`implementation="cudnn"` computes it. Memory is filled with NaN before. Padding is NaN
between packed sequences, and 1e4 past other lengths. Caches, with pages and without,
are drawn by `tests/attention/shared/random_decode.py`: NaN lies past the lengths and in
pages of no sequence where the kernel is made for decoding, else 1e4. Results are
compared with float64. Each entry has a bound of its own, made of what a kernel rounds
to 16 bits. A problem is right if all entries of all results are within it.
""".splitlines()
_FEATURES: dict[str, Callable[[str], bool]] = {
    "all": lambda _: True,
    "causal": lambda x: "band=causal" in x,
    "causal, bottom-right": lambda x: "band=bottom-right" in x,
    "window": lambda x: "band=window" in x,
    "bias": lambda x: " bias=" in x,
    "mask": lambda x: " mask=" in x,
    "prefix, segments or blocks": lambda x: " form=" in x,
    "lengths, some of them 0": lambda x: "with_lengths" in x,
    "packed sequences": lambda x: " packed=" in x,
    "softcap": lambda x: " softcap=" in x,
    "dropout": lambda x: " dropout=" in x,
    "sinks": lambda x: "with_sinks" in x,
    "head sizes above 256": lambda x: _head_size(x) > 256,
    "cotangent of the log-sum-exp": lambda x: "with_lse" in x,
    "one query": lambda x: " s=1," in x,
    "caches": lambda x: x.startswith("decode") and " page=" not in x,
    "caches in pages": lambda x: x.startswith("decode") and " page=" in x,
}


def _tables(records: Sequence[Record]) -> list[str]:
    rows: list[tuple[str, list[Record]]] = []
    for name, has in _FEATURES.items():
        for direction, is_backward in (("results", False), ("gradients", True)):
            chosen = [
                x
                for x in records
                if x.get("backward") is is_backward and has(x["problem"])
            ]
            rows.append((f"{name}, {direction}", chosen))
    lines = random_runs.counts(("right", "wrong", "refused", "failed"), rows)
    return lines + random_runs.largest_errors(
        records, lambda _, name: _RESULTS.get(name, f"gradient of {name}")
    )


SUITE = Suite(
    name="random_attention",
    title="Random problems of attention",
    comment="How many random problems of attention cuDNN computed rightly.",
    about=_ABOUT,
    keys=_keys,
    begin=_begin,
    tables=_tables,
)


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forward", type=int, default=1500)
    parser.add_argument("--backward", type=int, default=750)
    parser.add_argument("--decode", type=int, default=400)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--most-scores", type=int, default=2**25)
    random_runs.main(SUITE, parser)


if __name__ == "__main__":
    main()
