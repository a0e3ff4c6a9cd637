# SPDX-License-Identifier: Apache-2.0
"""Remembers choices in processes that run at once: FOLDER PROCESSES CHOICES_OF_EACH."""

import multiprocessing
import sys

from jax_cudnn import choices, plans
from jax_cudnn.choices import Choice, Key


def _remember(folder: str, number: int, count: int) -> None:
    plans.set_cache(folder)
    for i in range(count):
        choice = Choice(op="", operands="", implementation="xla")
        choices.remember({Key(str(number), i, "g"): choice})


def main(folder: str, processes: str, count: str) -> None:
    """Start the processes; exit with 1 if one of them fails."""
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_remember, args=(folder, number, int(count)))
        for number in range(int(processes))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    sys.exit(any(worker.exitcode != 0 for worker in workers))


if __name__ == "__main__":
    main(*sys.argv[1:])
