# SPDX-License-Identifier: Apache-2.0
"""Names parameters by their path in a model."""

from typing import Any

import jax


def name_of(path: tuple[Any, ...]) -> str:
    """Return a parameter's name, such as blocks.0.qkv.kernel."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def is_matrix(path: tuple[Any, ...]) -> bool:
    """Tell whether a parameter takes part in products, and is no bias or scale."""
    return name_of(path).endswith(("kernel", "embedding", "_w"))
