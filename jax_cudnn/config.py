# SPDX-License-Identifier: Apache-2.0
"""Options that change the traced program; part of each call, so that jit sees them."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Implementation = Literal["auto", "cudnn", "xla"]
HeuristicMode = Literal["A", "B", "FALLBACK"]
ReduceDtype = Literal["f32", "operands"]
BehaviorNote = Literal[
    "CUBLASLT_DEPENDENCY",
    "REQUIRES_BIAS_INT8x32_REORDER",
    "REQUIRES_FILTER_INT8x32_REORDER",
    "RUNTIME_COMPILATION",
    "SUPPORTS_CUDA_GRAPH_NATIVE_API",
]
NumericNote = Literal[
    "DOWN_CONVERT_INPUTS",
    "FFT",
    "NONDETERMINISTIC",
    "REDUCED_PRECISION_REDUCTION",
    "STRICT_NAN_PROP",
    "TENSOR_CORE",
    "WINOGRAD",
    "WINOGRAD_TILE_13x13",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
]
Note = BehaviorNote | NumericNote
# A precision's name, two names (one for each operand), or a jax.lax.DotAlgorithm.
MatmulPrecision = str | tuple[str, str] | Hashable | None
_NOTES = (*get_args(BehaviorNote), *get_args(NumericNote))
_REDUCED: NumericNote = "REDUCED_PRECISION_REDUCTION"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """A filter of cuDNN's execution plans for a call; hashable, checked when made.

    cuDNN lists candidates for a graph. Each candidate is an engine with its knobs, its
    notes and a workspace. The measured candidate (``plans.autotune``) is used if it is
    allowed, otherwise the first one that is allowed and builds. If no candidate is
    left, "auto" runs XLA and says why, and "cudnn" raises.

    Args:
      heuristic_modes: which of cuDNN's candidate lists to use, in order: "A" (its
        best guess), "B" (another one), "FALLBACK" (engines that support many graphs).
        Default ("A", "FALLBACK").
      workspace_limit_bytes: the most scratch memory that one kernel may use. Default
        None: any.
      deterministic: whether equal operands must give equal bits each time. Refuses
        the note "NONDETERMINISTIC", and requests attention's deterministic gradient.
        Default False.
      reduced_precision_reduction: whether a kernel may add up in 16 bits, which loses
        digits. Default False: all sums are float32, and the note
        "REDUCED_PRECISION_REDUCTION" is refused.
      engines: the numbers of the engines that are allowed, as ``plans.inspect`` shows
        them. They differ between operations and between versions of cuDNN. 1000 is
        cuBLASLt, which runs some matmuls. Default None: all.
      denied_engines: the numbers of engines that are not allowed. Default none.
      required_notes: notes that a candidate must have (all of them), such as
        "RUNTIME_COMPILATION" for engines that are compiled when planned. Default none.
      refused_notes: notes that a candidate must not have, such as
        "RUNTIME_COMPILATION" or "DOWN_CONVERT_INPUTS", in addition to those that the
        fields above refuse. Default none.

    Raises:
      ValueError: a field has a value other than described above, or fields contradict
        each other.

    The notes are those of cuDNN's
    `backend API <https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html>`_
    (``cudnnBackendBehaviorNote_t``, ``cudnnBackendNumericalNote_t``).
    """

    heuristic_modes: tuple[HeuristicMode, ...] = ("A", "FALLBACK")
    workspace_limit_bytes: int | None = None
    deterministic: bool = False
    reduced_precision_reduction: bool = False
    engines: tuple[int, ...] | None = None
    denied_engines: tuple[int, ...] = ()
    required_notes: tuple[Note, ...] = ()
    refused_notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        self._keep_tuples("denied_engines", "required_notes", "refused_notes")
        if self.engines is not None:
            self._keep_tuples("engines")
        self._keep_tuples("heuristic_modes", is_sorted=False)
        for name in ("deterministic", "reduced_precision_reduction"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r} is neither True nor False.")
        self._check_modes()
        self._check_engines()
        self._check_notes()
        # What other fields refuse is said by them alone, so that equals are equal.
        others = (x for x in self.refused_notes if x not in self._refusing_fields())
        object.__setattr__(self, "refused_notes", tuple(others))
        limit = self.workspace_limit_bytes
        if limit is not None and (not _is_count(limit) or limit >= 2**63):
            raise ValueError(
                f"workspace_limit_bytes={limit!r} is not a number of bytes. Pass an "
                "int that is 0 or more, or None for no limit."
            )

    def _keep_tuples(self, *names: str, is_sorted: bool = True) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, str) or not hasattr(value, "__iter__"):
                meant = () if value is None else (value,)
                raise ValueError(f"{name}={value!r} is not a tuple. Pass {meant!r}.")
            value = tuple(value)
            if is_sorted:
                value = tuple(sorted(dict.fromkeys(map(_hashable, value)), key=repr))
            object.__setattr__(self, name, value)

    def _check_modes(self) -> None:
        modes, known = self.heuristic_modes, get_args(HeuristicMode)
        if not modes or len(set(modes)) < len(modes) or not set(modes) <= set(known):
            raise ValueError(
                f"heuristic_modes={modes!r} is not some of "
                f"{', '.join(map(repr, known))}, each at most once. Pass a tuple."
            )

    def _check_engines(self) -> None:
        allowed = self.engines if self.engines is not None else ()
        for name, engines in (
            ("engines", allowed),
            ("denied_engines", self.denied_engines),
        ):
            for engine in engines:
                if not _is_count(engine):
                    raise ValueError(
                        f"{name} has {engine!r}. Engines are ints that are 0 or more; "
                        "`plans.inspect` shows them."
                    )
        if self.engines is not None and not set(allowed) - set(self.denied_engines):
            raise ValueError(
                f"engines={self.engines!r} with denied_engines="
                f"{self.denied_engines!r} allows none. Allow one that is not denied."
            )

    def _check_notes(self) -> None:
        for name, notes in (
            ("required_notes", self.required_notes),
            ("refused_notes", self.refused_notes),
        ):
            unknown = sorted(set(notes) - set(_NOTES), key=repr)
            if unknown:
                raise ValueError(
                    f"{name} has {', '.join(map(repr, unknown))}. cuDNN's notes are "
                    f"{', '.join(_NOTES)}."
                )
        if self.reduced_precision_reduction and _REDUCED in self.refused_notes:
            raise ValueError(
                f"reduced_precision_reduction=True allows the note {_REDUCED}, which "
                "refused_notes has. Take it out of one of them."
            )
        both = sorted(set(self.required_notes).intersection(self.all_refused_notes))
        if both:
            by = [x for note, x in self._refusing_fields().items() if note in both]
            why = f" ({' and '.join(by)} refuses it)" if by else ""
            raise ValueError(
                f"{', '.join(both)} is both required and refused{why}. "
                "No plan has it and has it not."
            )

    def __repr__(self) -> str:
        return _set_fields(self)

    @property
    def all_refused_notes(self) -> tuple[Note, ...]:
        """The refused notes, including those that other fields refuse."""
        return tuple(sorted({*self.refused_notes, *self._refusing_fields()}))

    def _refusing_fields(self) -> dict[Note, str]:
        """Return the notes that a field of another name refuses, with its value."""
        found: dict[Note, str] = {}
        if self.deterministic:
            found["NONDETERMINISTIC"] = "deterministic=True"
        if not self.reduced_precision_reduction:
            found[_REDUCED] = "reduced_precision_reduction=False"
        return found

    def to_request(self) -> str:
        """Return the canonical text that the extension reads; "" for the defaults.

        In the compiled program, this text takes the place of a pinned plan.
        """
        if self == PlanOptions():
            return ""
        fields = {
            "denied_engines": self.denied_engines,
            "deterministic": self.deterministic,
            "engines": self.engines,
            "modes": self.heuristic_modes,
            "refused_notes": self.all_refused_notes,
            "required_notes": self.required_notes,
            "workspace_limit_bytes": self.workspace_limit_bytes,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _hashable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return repr(value)  # The checks refuse this text, and show it.
    return value


def _set_fields(options: Any) -> str:
    """Return the fields that differ from their defaults, written as a call."""
    default = type(options)()
    values = ((each.name, getattr(options, each.name)) for each in fields(options))
    changed = (f"{k}={v!r}" for k, v in values if v != getattr(default, k))
    return f"{type(options).__name__}({', '.join(changed)})"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The settings that a graph runs by; a hashable parameter of the graph primitive.

    ``implementation``: "cudnn" runs cuDNN or raises; "xla" never touches cuDNN;
    "auto" runs cuDNN where it has a plan and XLA elsewhere, saying so.
    ``plan`` says which of cuDNN's plans may run the graph. ``device`` names a GPU to
    plan for, which need not be present; None means this machine's GPU.
    ``matmul_precision`` is the call's own, or ``jax.default_matmul_precision`` as it
    was when the operation was traced. The reference is traced later, when that setting
    is no longer in force.
    ``remark`` says which part of the call is not in the graph, for ``plans.inspect``.
    The remark is part of what identifies the call, but no decision depends on it.
    ``exact_dtypes`` says that each value is to have the digits of its tensor's dtype,
    also where XLA runs the graph on a GPU, or cuDNN a part of a kernel. By default sums
    over 16-bit operands are rounded there, as in programs that use that dtype.
    ``reduce_dtype`` is the dtype in which devices add up partial sums of 16-bit
    operands: "f32", or "operands" for the operands' own.
    """

    implementation: Implementation = "auto"
    matmul_precision: MatmulPrecision = None
    plan: PlanOptions = PlanOptions()
    device: str | None = None
    remark: str = ""
    exact_dtypes: bool = False
    reduce_dtype: ReduceDtype = "f32"

    def __post_init__(self) -> None:
        if self.implementation not in get_args(Implementation):
            raise ValueError(
                f"implementation={self.implementation!r} is not one of "
                f"{', '.join(map(repr, get_args(Implementation)))}."
            )
        if self.reduce_dtype not in get_args(ReduceDtype):
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype!r} is not one of "
                f'{", ".join(map(repr, get_args(ReduceDtype)))}. Pass "operands" to '
                "add up partial sums of devices in the 16-bit dtype of the operands."
            )

    def __repr__(self) -> str:
        return _set_fields(self)


def check_plan(plan: object) -> None:
    """Raise TypeError unless ``plan`` is a PlanOptions."""
    if not isinstance(plan, PlanOptions):
        raise TypeError(
            f"plan={plan!r} is not a PlanOptions. Pass one, for example "
            "jax_cudnn.plans.PlanOptions(deterministic=True)."
        )
