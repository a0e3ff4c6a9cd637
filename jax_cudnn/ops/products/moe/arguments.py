# SPDX-License-Identifier: Apache-2.0
"""Checks the arrays of a mixture of experts: dtypes, and shapes that go together."""

from collections.abc import Iterable, Mapping

import jax

from jax_cudnn.ops.common.arguments import check_dtype, describe

# The axes of each array: d width, e all experts, o a device's own, f and g hidden.
_AXES = {
    "gate_w": "odf",
    "up_w": "odf",
    "down_w": "ofd",
    "gate_bias": "of",
    "up_bias": "of",
    "down_bias": "od",
    "shared_gate_w": "dg",
    "shared_up_w": "dg",
    "shared_down_w": "gd",
}
_WORDS = {"d": "width", "o": "experts", "f": "hidden width", "g": "shared hidden width"}
# What an array needs beside it.
_NEEDS = {
    "gate_bias": ("gate_w",),
    "shared_gate_w": ("shared_up_w",),
    "shared_up_w": ("shared_down_w",),
    "shared_down_w": ("shared_up_w",),
}


def check_weights(op: str, arrays: Mapping[str, jax.Array], devices: int) -> None:
    """Raise unless the experts' arrays go with x and router_w, which were checked.

    Args:
      op: the function that the user called.
      arrays: by their names; those that are not given are left out.
      devices: how many devices share the experts.
    """
    experts = arrays["router_w"].shape[1]
    if experts % devices:
        raise ValueError(
            f"{op}: router_w is {describe(arrays['router_w'])}. {devices} devices "
            f"along expert_axis cannot share its {experts} experts evenly. Use an axis "
            f"whose size divides {experts}."
        )
    sizes = {"d": arrays["x"].shape[-1], "o": experts // devices}
    for name, axes in _AXES.items():
        if name not in arrays:
            continue
        check_dtype(op, name, x := arrays[name])
        missing = [each for each in _NEEDS.get(name, ()) if each not in arrays]
        if missing:
            raise ValueError(f"{op}: {name} needs {missing[0]}. Pass both, or neither.")
        if len(axes) == x.ndim:
            for letter, size in zip(axes, x.shape, strict=True):
                sizes.setdefault(letter, size)
        wanted = [sizes.get(letter, f"any {_WORDS[letter]}") for letter in axes]
        if len(axes) != x.ndim or wanted != [*x.shape]:
            raise ValueError(
                f"{op}: {name} is {describe(x)}. Its axes are ({_named(axes)}), which "
                f"{_own(devices)}must be [{', '.join(map(str, wanted))}] beside "
                f"{_beside(arrays, axes)}. Transpose it, or pass the arrays of one "
                "layer."
            )


def _named(axes: Iterable[str]) -> str:
    return ", ".join(_WORDS[letter] for letter in axes)


def _own(devices: int) -> str:
    return f"on each of {devices} devices " if devices > 1 else ""


def _beside(arrays: Mapping[str, jax.Array], axes: str) -> str:
    """Return the operands that set the sizes, in words."""
    names = ["x"] if "d" in axes else []
    names += ["router_w"] if "o" in axes else []
    if "f" in axes:
        names.append("gate_w" if "gate_w" in arrays else "up_w")
    return " and ".join(f"{name} {describe(arrays[name])}" for name in names)
