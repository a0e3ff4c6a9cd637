# SPDX-License-Identifier: Apache-2.0
"""PyTorch as a contender, where it is installed: converts arrays, and times calls."""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.timing import Contender


def installed(name: str) -> Any:
    """Return a module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


torch: Any = installed("torch")

# PyTorch shares the GPU with JAX in this process. JAX reads this when it starts a
# backend, which no import does.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")


def contender(function: Callable[[], Any], count: int = 1) -> Contender:
    """Return a PyTorch function, which enqueues its work, as a contender."""
    return Contender(call=function, wait=lambda _: synchronize(), count=count)


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prefer_fast_convolutions() -> None:
    """Have cuDNN's algorithms timed at the first call of each shape."""
    torch.backends.cudnn.benchmark = True


def forget_compiled() -> None:
    """Forget what was compiled: after a few shapes, PyTorch would compile no more."""
    importlib.import_module("torch._dynamo").reset()


def release_memory() -> None:
    """Give memory that no tensor uses back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def usable(contenders: Mapping[str, Contender]) -> dict[str, Contender]:
    """Return the contenders that run, and say why the others do not."""
    return {name: c for name, c in contenders.items() if _runs(name, c)}


def _runs(name: str, contender: Contender) -> bool:
    try:
        contender.wait(contender.call())
    except RuntimeError as error:
        print(f"  {name} cannot run this cell: {str(error).splitlines()[0]}")
        return False
    return True


def from_jax(x: jax.Array) -> Any:
    """Return a copy of an array as a tensor on the same device."""
    return torch.from_dlpack(jax.block_until_ready(x)).clone()


def to_jax(x: Any) -> jax.Array:
    """Return a tensor as an array on the same device."""
    tensor = x.detach().contiguous()
    synchronize()
    return jnp.from_dlpack(tensor)
