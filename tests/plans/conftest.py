# SPDX-License-Identifier: Apache-2.0
"""The planning process that answers as a test says."""

from collections.abc import Iterator

import pytest

from jax_cudnn.lowering import devices
from tests.plans.planning import FakeProcess, fake_process


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcess]:
    """Plan by a fake process, on a machine without a GPU."""
    monkeypatch.setattr(devices, "local_target", lambda: None)
    with fake_process(monkeypatch) as made:
        yield made
