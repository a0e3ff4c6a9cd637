# SPDX-License-Identifier: Apache-2.0
"""Ways to attention as contenders: programs of JAX, and PyTorch's kernels."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.harness.contest import program
from benchmarks.harness.timing import Contender
from benchmarks.harness.torch_side import torch

# PyTorch's kernels, as its `SDPBackend` names them.
_BACKENDS = {
    "torch cudnn": "CUDNN_ATTENTION",
    "torch flash": "FLASH_ATTENTION",
    "torch efficient": "EFFICIENT_ATTENTION",
}


class Way(NamedTuple):
    """A function of JAX, and the arrays that it is called with."""

    function: Callable[..., Any]
    arrays: Sequence[jax.Array]


class Program(NamedTuple):
    """A compiled function, called with some arrays."""

    compiled: Any
    arguments: Sequence[Any]

    @property
    def contender(self) -> Contender:
        """The program, to be timed."""
        call = functools.partial(self.compiled, *self.arguments)
        return Contender(call=call, wait=jax.block_until_ready)


def programs(
    ways: Mapping[str, Way],
    what: str,
    cotangents: Sequence[jax.Array] = (),
    *,
    ours: Sequence[str],
) -> dict[str, Program]:
    """Compile ways and run each once; those that are not ours may fail, and say why."""
    found: dict[str, Program] = {}
    for name, way in ways.items():
        arguments = (list(way.arrays), list(cotangents))
        run = jax.jit(program(way.function, what))
        try:
            made = Program(run.lower(*arguments).compile(), arguments)
            jax.block_until_ready(made.contender.call())
        except (NotImplementedError, ValueError, RuntimeError) as error:
            if name in ours:
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            print(f"  {name} cannot run this cell: {reason}", flush=True)
        else:
            found[name] = made
    return found


def contenders(made: Mapping[str, Program]) -> dict[str, Contender]:
    """Return programs, to be timed."""
    return {name: each.contender for name, each in made.items()}


def torch_kernels(
    names: Sequence[str], **options: Any
) -> dict[str, Callable[..., Any]]:
    """Return PyTorch's attention by each of the kernels of these names."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(backend: Any, *tensors: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

    return {
        name: functools.partial(attend, getattr(SDPBackend, _BACKENDS[name]))
        for name in names
    }
