# SPDX-License-Identifier: Apache-2.0
"""Describes what a graph is to run on: a GPU and a cuDNN version, as data."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The GPU and cuDNN that a graph is to run on.

    ``sm_version`` is ten times the compute capability (90 for Hopper),
    ``cudnn_version`` what cudnnGetVersion returns (91900 for 9.19.0).
    """

    name: str
    sm_version: int
    sm_count: int
    cudnn_version: int


def version_text(version: int) -> str:
    """Return a version of cuDNN as people write it: "9.19.0" for 91900."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
