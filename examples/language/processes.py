# SPDX-License-Identifier: Apache-2.0
"""Joins several processes, each with its own GPUs, to one run.

All of them run the same program on all devices; the first one tells of it.
"""

import argparse
import contextlib
import io
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which processes there are."""
    add = parser.add_argument
    add("--processes", type=int, metavar="COUNT", help="of one run; default: one")
    add(
        "--process",
        type=int,
        metavar="NUMBER",
        help="which of them this is, from 0; Slurm and Open MPI say it themselves",
    )
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="where process 0 is to listen; Slurm and Open MPI say it themselves",
    )


def join(argv: list[str] | None) -> None:
    """Wait for the other processes, before JAX looks for devices."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    given, _ = parser.parse_known_args(argv)
    if given.processes is None:
        if given.process is not None or given.coordinator is not None:
            parser.error("--process and --coordinator need --processes")
        return
    if not jax.distributed.is_initialized():
        jax.distributed.initialize(given.coordinator, given.processes, given.process)


def is_first() -> bool:
    """Whether this process tells of the run, and writes what one process writes."""
    return jax.process_index() == 0


@contextlib.contextmanager
def first_alone_prints() -> Iterator[None]:
    """Print nothing in other processes than the first."""
    if is_first():
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def placed(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Return an array that every process has, divided over the devices of all."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])


def whole(x: jax.Array | np.ndarray) -> np.ndarray:
    """Return an array that is divided over the devices of all processes, to each."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    gathered: Any = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(gathered)
