# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder run other libraries' code, with JAX's own defaults."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def as_users_have_it() -> Iterator[None]:
    """Promote as JAX does by default: other tests are stricter."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
