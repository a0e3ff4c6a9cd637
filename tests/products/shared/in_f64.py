# SPDX-License-Identifier: Apache-2.0
"""Fixtures with which ways for cuDNN, which has no f64, are compared in f64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.legalize.products import fusion, reduction
from jax_cudnn.policy import tables


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute in f64, and choose ways as in 16 bits."""
    measure_in_f64(monkeypatch)
    with jax.enable_x64(True):
        yield


def measure_in_f64(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let what was measured in 16 bits hold for f64, with other conditions."""
    monkeypatch.undo()
    monkeypatch.setattr(fusion, "_refusals", lambda *_: [])
    monkeypatch.setattr(reduction, "_refusals", lambda _: ())
    (table, *_) = tables.shipped()
    orders = [
        replace(each, when={**each.when, **_of_f64(each, changes)})
        for each in table.orders
    ]
    made = replace(table, orders=orders)
    monkeypatch.setattr(tables, "shipped", lambda: (made,))


def _of_f64(order: tables.Order, changes: dict[str, Any]) -> dict[str, Any]:
    found = {name: each for name, each in changes.items() if name in order.when}
    if "dtype" in order.when:
        found["dtype"] = [*order.when["dtype"], "f64"]
    return found


@pytest.fixture
def rng() -> np.random.Generator:
    """Return a source of operands, the same ones in every run."""
    return np.random.default_rng(7)


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Return normal numbers."""
    return jnp.asarray(rng.normal(size=shape))
