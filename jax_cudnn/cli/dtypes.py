# SPDX-License-Identifier: Apache-2.0
"""Dtypes on the command line: as people write them, and as graphs do."""

from jax_cudnn.reference.dtypes import DTYPES

_LONG = {
    "bool_": "bool",
    "uint8": "u8",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
    "float8_e4m3fn": "f8_e4m3fn",
    "float8_e5m2": "f8_e5m2",
    "bfloat16": "bf16",
    **dict.fromkeys(("float16", "fp16", "half"), "f16"),
    **dict.fromkeys(("float32", "fp32"), "f32"),
    **dict.fromkeys(("float64", "fp64", "double"), "f64"),
}
_NAMES = {**{name: name for name in DTYPES}, **_LONG}


def dtype_named(text: str) -> str | None:
    """Return the name in graphs of a dtype that is written so; None for none."""
    return _NAMES.get(text)


def spellings(*dtypes: str) -> tuple[str, ...]:
    """Return how dtypes may be written, each by its name in graphs first."""
    return tuple(
        text for dtype in dtypes for text, name in _NAMES.items() if name == dtype
    )
