# SPDX-License-Identifier: Apache-2.0
"""Implements `plans.add_contender`: other implementations compete in tuning."""

import functools
from collections.abc import Callable, Sequence

import jax

from jax_cudnn import contenders
from jax_cudnn.config import Options
from jax_cudnn.contenders import tokamax
from jax_cudnn.graph import Graph
from jax_cudnn.lowering.cuda import cuda_program
from jax_cudnn.lowering.decision import forget_decisions


def add_contender(
    name: str,
    offer: Callable[[Graph], Callable[..., Sequence[jax.Array]] | None],
    *,
    version: str = "",
) -> None:
    """Let another implementation compete with cuDNN's plans and XLA in tuning.

    ``plans.autotune`` and ``plans.autotuning`` ask ``offer`` for each part of a graph
    that they measure. If it returns a program, they compare what the program computes
    with the reference, on drawn operands, and time it. Where it is the fastest, it is
    the choice: the part then runs by it, forward or backward, and ``plans.inspect``
    names it. Nothing but a measured choice picks it, and only under
    ``implementation="auto"`` without ``PlanOptions``, in a process that has added it
    with the same version. Any other process takes the faster of cuDNN and XLA, as
    measured beside it.

    Derivatives, batching and sharding are as ever: they happen to graphs, before it is
    decided who runs a part.

    What is drawn has neither NaN nor infinities, nor rows that see no key. There a
    contender has to give what the operation's documentation says, or offer nothing.

    Args:
      name: one word, such as "tokamax". A contender of the same name is replaced.
      offer: takes a part, as ``Call.part`` of ``plans.inspect`` shows it, and returns
        its program, or None for a part that it does not run. The program takes the
        arrays of ``part.inputs``, in that order and with the axes of their ``dims``. It
        returns those of ``part.outputs`` likewise, in the shapes and dtypes of the
        part's tensors. A program may raise NotImplementedError when it is traced.
      version: one word, such as "0.0.17"; default "". What was measured of another
        version is not used.

    Raises:
      ValueError: the name or version is not one word, or the name is "cudnn" or "xla".
      TypeError: ``offer`` cannot be called.
    """
    contenders.add(name, offer, version)
    forget_decisions()


def add_tokamax() -> None:
    """Let tokamax's kernels compete with cuDNN's plans and XLA in tuning.

    They are offered for attention in bf16, forward and backward, where the numbers of
    queries and keys are multiples of 128: causal or not, with a bias for each query and
    key or with ``score_mods.softcap``, and without another mask, a window, lengths,
    dropout or sinks; and for `ragged_dot` and its gradients in bf16 or f16. As with
    every contender (``plans.add_contender``), only a measured choice picks them.
    Nothing changes in what is computed: a bias that they do not treat as cuDNN does
    (numbers above 2048 in size, infinities, NaN) is found when the program runs, and
    cuDNN runs it.

    Needs tokamax 0.0.17 or newer with its ``cuda`` extra, which needs JAX 0.11.1 and
    Python 3.12 (https://github.com/openxla/tokamax), and a GPU that it has kernels for
    (sm_80, sm_90, sm_100; gradients: sm_90, sm_100).

    Raises:
      LibraryError: tokamax cannot be imported.
    """
    offer = functools.partial(tokamax.offer, exact=_by_cudnn)
    add_contender("tokamax", offer, version=tokamax.version())


def _by_cudnn(part: Graph, *operands: jax.Array) -> Sequence[jax.Array]:
    return cuda_program(part, Options(implementation="cudnn"))(*operands)


def remove_contender(name: str) -> None:
    """Remove a contender, for functions that are compiled afterwards.

    Args:
      name: as it was added.

    Raises:
      LibraryError: there is none of that name.
    """
    contenders.remove(name)
    forget_decisions()
