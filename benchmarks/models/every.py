# SPDX-License-Identifier: Apache-2.0
"""All models of the benchmark, in the order of its page."""

from benchmarks.models.biased import biased, diffusion
from benchmarks.models.images import images
from benchmarks.models.sound import sounds
from benchmarks.models.text import texts
from benchmarks.models.zoo import Model, models


def every(*, small: bool = False) -> list[Model]:
    """Return the models; small ones try a script on a CPU."""
    return [
        *models(small=small),
        *texts(small=small),
        *biased(small=small),
        *images(small=small),
        diffusion(small=small),
        *sounds(small=small),
    ]
