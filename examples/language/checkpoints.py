# SPDX-License-Identifier: Apache-2.0
"""Keeps a run in a folder, so that it can go on bit for bit.

A checkpoint holds all that a step changes, and batches follow from the step's number.
On a GPU two runs have equal bits only if the kernels always add in one order: for
cuDNN, that is `jax_cudnn.plans.PlanOptions(deterministic=True)`, and for XLA's own
kernels `XLA_FLAGS=--xla_gpu_deterministic_ops=true`.

orbax is imported where checkpoints are asked for, so that all else runs without it.
"""

import sys
from pathlib import Path
from typing import Any

from language.training import TrainState

# Settings that came later, and what runs without them had.
_LATER = {"reduce_dtype": "f32"}


class Checkpoints:
    """The states of a run in a folder, written by orbax while training goes on."""

    def __init__(self, folder: Path, recorded: dict[str, Any]):
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._recorded = recorded
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self._latest = self._manager.latest_step()
        if self._latest is not None:
            args = self._args.Composite(recorded=self._args.JsonRestore())
            kept = self._manager.restore(self._latest, args=args)["recorded"]
            if differing := [
                f"{name} was {kept.get(name)} and is {value}"
                for name, value in recorded.items()
                if kept.get(name, _LATER.get(name)) != value
            ]:
                sys.exit(
                    f"{folder} holds a run with other settings: {'; '.join(differing)}."
                    " Pass the settings of that run, or another folder."
                )

    def restore(self, shapes: TrainState) -> TrainState | None:
        """Return the latest state, if there is one, placed as the shapes say."""
        if self._latest is None:
            return None
        args = self._args.Composite(state=self._args.StandardRestore(shapes))
        return self._manager.restore(self._latest, args=args)["state"]

    def save(self, step: int, state: TrainState) -> None:
        """Begin to write a state. It is copied first, so the next step may start."""
        args = self._args
        self._manager.save(
            step,
            args=args.Composite(
                state=args.StandardSave(state), recorded=args.JsonSave(self._recorded)
            ),
        )

    def close(self) -> None:
        """Wait until all is written."""
        self._manager.close()
