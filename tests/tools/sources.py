# SPDX-License-Identifier: Apache-2.0
"""The source files of the project."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def sources(*patterns: str) -> list[Path]:
    """Return the files that are not empty and match one of the patterns."""
    folders = ("jax_cudnn", "tests", "scripts", "benchmarks", "examples", "ffi")
    return sorted(
        path
        for folder in folders
        for pattern in patterns
        for path in (ROOT / folder).rglob(pattern)
        if path.stat().st_size
    )
