# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that print the numbers in the documentation.

Programs are in folders by family. `python -m benchmarks.norms` finds
benchmarks/layers/norms.py by its short name. Imports have full names, so that no module
is loaded twice.
"""

import os
import sys
from pathlib import Path

# Choices and plans of earlier runs must not affect a run's numbers.
os.environ["JAX_CUDNN_CACHE_DIR"] = "off"

_families = Path(__file__).parent.glob("*/__init__.py")
__path__.extend(sorted(str(family.parent) for family in _families))

# The examples' own modules, as they import them themselves.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
