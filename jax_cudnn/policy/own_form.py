# SPDX-License-Identifier: Apache-2.0
"""Validates the data of a calibration file, as far as the package uses it.

A file may have been edited, or come from anywhere: what is wrong with it is to be said
when it is read, and not while a program is compiled.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

# The version of the file's form.
SCHEMA = 1
# Times, ratios and sizes are between these.
_SMALLEST, _LARGEST = 1e-12, 1e18


def check(data: Any) -> None:
    """Raise ValueError where data is not a calibration, with a reason."""
    _is(data, dict, "it")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema {data.get('schema')} is not {SCHEMA}")
    for name, kind in _TYPES.items():
        _is(data.get(name), kind, name)
    if unknown := data.keys() - {"schema", *_TYPES}:
        raise ValueError(f"{sorted(unknown)!r:.200} are no parts of it")
    _is(data["gpu"] or None, str, "gpu")
    if not data["gpu"].isprintable():
        raise ValueError(f"gpu {data['gpu']!r:.100} is no name")
    if not (data["sm_version"] > 0 and data["cudnn"] > 0):
        raise ValueError("sm_version and cudnn are positive")
    if data["rows"] or data["orders"]:
        raise ValueError("it has rows or orders, which the package's tables have alone")
    if not _is_environment(data["environment"]):
        raise ValueError("environment has something else than text")
    for name, is_one in _ENTRIES.items():
        for entry in data[name]:
            if not is_one(entry):
                raise ValueError(f"{entry!r:.200} is none of its {name}")
    for name, engines in data["slow_engines"].items():
        if not _are_whole(engines):
            raise ValueError(f"{engines!r:.200} are no engines of {name}")


_TYPES: dict[str, type] = {
    **{"gpu": str, "sm_version": int, "cudnn": int, "environment": dict},
    **dict.fromkeys(("rows", "orders", "kernels", "measured"), list),
    **{"slow_engines": dict, "preferred": list, "engines": list},
}


def _is(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        what = "missing" if value is None else f"of type {type(value).__name__}"
        raise ValueError(f"{name} is {what}, where there should be {kind.__name__}")


def _is_kernel(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) not in (5, 6):
        return False
    name, *sizes_and_ratio = entry[:5]
    return (
        _is_class(name)
        and all(map(_is_positive, sizes_and_ratio))
        and all(_are_times(x) and all(map(str.isdecimal, x)) for x in entry[5:])
    )


def _is_row(entry: Any) -> bool:
    """Whether it is what was measured of a kernel (calibration/measuring.py)."""
    return (
        _has(entry, **{"class": _is_class, "op": _is_text, "operands": _is_text})
        and _has(entry, sizes=_are_sizes, ratio=_is_positive, first_engine=_is_whole)
        and _has(entry, engines=_are_times, kernels=_are_times)
        and _has(entry, **{"with": _is_environment})
        and all(name.isdecimal() for name in entry["engines"])
        and all(map(_is_json, entry["kernels"]))
    )


def _is_preference(entry: Any) -> bool:
    return (
        _has(entry, kind=_is_text, bits=_is_text, cudnn=_is_whole, engine=_is_whole)
        and _has(entry, knobs=_is_list_of(_is_knobs), work=_are_bounds)
        and _has(entry, ratio=_is_positive, count=_is_whole, of=_is_whole)
        and _is_whole(entry.get("to", 0))
    )


def _is_order(entry: Any) -> bool:
    return (
        _has(entry, kind=_is_convolution, bits=_is_text, cudnn=_is_whole)
        and _has(entry, groups=_is_bool, windows_of_1=_is_bool)
        and _has(entry, first=_is_whole, before=_are_whole)
    )


_ENTRIES: Mapping[str, Callable[[Any], bool]] = {
    "kernels": _is_kernel,
    "measured": _is_row,
    "preferred": _is_preference,
    "engines": _is_order,
}


def _has(entry: Any, **fields: Callable[[Any], bool]) -> bool:
    return isinstance(entry, dict) and all(
        name in entry and is_one(entry[name]) for name, is_one in fields.items()
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_json(value: Any) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_environment(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and _SMALLEST < value < _LARGEST


def _is_class(value: Any) -> bool:
    """Whether it has a kind of operation, and a width or dtypes."""
    return isinstance(value, str) and len(value.split(", ")) > 1


def _is_convolution(value: Any) -> bool:
    return value in ("conv_fprop", "conv_dgrad", "conv_wgrad")


def _is_list_of(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_one, value))


_are_whole = _is_list_of(_is_whole)


def _is_knobs(value: Any) -> bool:
    return isinstance(value, dict) and _are_whole([*value.values()])


def _are_bounds(value: Any) -> bool:
    return _are_whole(value) and len(value) == 2


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_positive, value))


def _are_times(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_positive, value.values()))
