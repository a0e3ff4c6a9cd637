# SPDX-License-Identifier: Apache-2.0
"""Lets tests of attention's rewritten graphs compare in f32."""

import pytest

from jax_cudnn.legalize.attention import sdpa as legalize_sdpa


@pytest.fixture
def _allow_f32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the refusal of f32 off, so that rounding hides few mistakes."""
    monkeypatch.setattr(legalize_sdpa, "_refuse", lambda *_: None)
