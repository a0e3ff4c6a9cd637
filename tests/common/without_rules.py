# SPDX-License-Identifier: Apache-2.0
"""A fixture for tests that ask whether cuDNN has a plan, not whether "auto" takes it.

tests/products/test_default_rules.py is about the rules by which "auto" leaves a
contraction to XLA, and tests/attention/legalize/test_legalize_sdpa.py about small
attention.
"""

from collections.abc import Iterator

import pytest

from jax_cudnn.legalize.attention import defaults as sdpa_defaults
from jax_cudnn.legalize.products import measured
from jax_cudnn.lowering.decision import forget_decisions


@pytest.fixture
def without_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no contraction or small attention to XLA by what was measured of others."""
    monkeypatch.setattr(sdpa_defaults, "MOST_SCORES", 0)
    monkeypatch.setattr(sdpa_defaults, "MOST_TRAINED_SCORES", 0)
    monkeypatch.setattr(measured, "slower", lambda part: "")
    monkeypatch.setattr(measured, "slow_engines", lambda part, target: ())
    forget_decisions()
    yield
    forget_decisions()
