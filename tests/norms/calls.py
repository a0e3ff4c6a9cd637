# SPDX-License-Identifier: Apache-2.0
"""Calls of every norm on arrays, with NumPy's answer in float64."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jax_cudnn
from tests.norms.problems import truth

_EPSILON = 1e-3


@dataclass(frozen=True)
class Call:
    """A norm with the shapes of its operands; ``along`` are the axes of the factors.

    ``groups`` splits the last of them.
    """

    function: Callable[..., Any]
    shape: tuple[int, ...]
    normalised: tuple[int, ...]
    along: tuple[int, ...]
    groups: int = 0
    is_centred: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def factor_shape(self) -> tuple[int, ...]:
        """The shape of scale and bias."""
        return tuple(self.shape[i] for i in self.along)

    def run(self, x: Any, scale: Any = None, bias: Any = None, **more: Any) -> Any:
        """Return what the norm returns."""
        options = {"epsilon": _EPSILON, **dict(self.options), **more}
        return self.function(x, scale, bias, **options)

    def truth(
        self, x: Any, scale: Any = None, bias: Any = None, epsilon: float = _EPSILON
    ) -> dict[str, np.ndarray]:
        """Return output and statistics in float64, the latter without axes of 1."""
        x = np.asarray(x, np.float64)
        full = x.shape
        normalised, along = self.normalised, self.along
        if self.groups:
            # The channels' axis becomes two, of which the second is normalised.
            (channel,) = along
            split = (self.groups, full[channel] // self.groups)
            x = x.reshape(*full[:channel], *split, *full[channel + 1 :])
            normalised = tuple(i + (i > channel) for i in normalised)
            normalised = tuple(sorted((*normalised, channel + 1)))
            along = (channel, channel + 1)
        factors = [
            None
            if value is None
            else np.asarray(value, np.float64).reshape(
                [x.shape[i] if i in along else 1 for i in range(x.ndim)]
            )
            for value in (scale, bias)
        ]
        found = truth(
            x,
            *factors,
            axes=normalised,
            epsilon=epsilon,
            is_centred=self.is_centred,
        )
        output = found.pop("output").reshape(full)
        squeezed = {k: np.squeeze(v, normalised) for k, v in found.items()}
        return {"output": output, **squeezed}


def _partial(function: Any, **options: Any) -> Any:
    return functools.partial(function, **options)


CALLS = {
    "layer": Call(jax_cudnn.layer_norm, (3, 5, 7), (2,), (2,)),
    "layer_two_axes": Call(
        _partial(jax_cudnn.layer_norm, axis=(-1, 1)), (3, 5, 7), (1, 2), (1, 2)
    ),
    "layer_first": Call(_partial(jax_cudnn.layer_norm, axis=0), (5, 3, 7), (0,), (0,)),
    "layer_middle": Call(_partial(jax_cudnn.layer_norm, axis=1), (3, 5, 7), (1,), (1,)),
    "layer_all": Call(
        _partial(jax_cudnn.layer_norm, axis=(0, 1)), (5, 7), (0, 1), (0, 1)
    ),
    "rms": Call(jax_cudnn.rms_norm, (3, 5, 7), (2,), (2,), is_centred=False),
    "rms_outer": Call(
        _partial(jax_cudnn.rms_norm, axis=(0, 2)),
        (5, 3, 7),
        (0, 2),
        (0, 2),
        is_centred=False,
    ),
    "adaptive": Call(jax_cudnn.adaptive_layer_norm, (3, 2, 5, 7), (3,), (0, 3)),
    "group": Call(
        _partial(jax_cudnn.group_norm, groups=3), (2, 5, 4, 6), (1, 2), (3,), 3
    ),
    "group_first": Call(
        _partial(jax_cudnn.group_norm, groups=2, channel_axis=1),
        (3, 6, 5, 4),
        (2, 3),
        (1,),
        2,
    ),
    "group_middle": Call(
        _partial(jax_cudnn.group_norm, groups=2, channel_axis=2),
        (3, 5, 6, 4),
        (1, 3),
        (2,),
        2,
    ),
    "group_no_positions": Call(
        _partial(jax_cudnn.group_norm, groups=2), (3, 6), (), (1,), 2
    ),
    "group_two_batches": Call(
        _partial(jax_cudnn.group_norm, groups=2, batch_axes=(0, 1)),
        (3, 2, 5, 6),
        (2,),
        (3,),
        2,
    ),
    "instance": Call(jax_cudnn.instance_norm, (3, 5, 4, 6), (1, 2), (3,)),
    "instance_first": Call(
        _partial(jax_cudnn.instance_norm, channel_axis=1), (3, 6, 5, 4), (2, 3), (1,)
    ),
    "batch": Call(jax_cudnn.batch_norm, (3, 5, 7), (0, 1), (2,)),
    "batch_first": Call(
        _partial(jax_cudnn.batch_norm, channel_axis=1), (3, 5, 7), (0, 2), (1,)
    ),
}


def operands(call: Call, seed: int = 0, dtype: Any = np.float32) -> list[jax.Array]:
    """Return x, scale and bias of a call."""
    rng = np.random.default_rng(seed)
    shapes = (call.shape, call.factor_shape, call.factor_shape)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    # Far from 0, where the difference of two means would cancel.
    arrays[0] += 3
    return [jax.numpy.asarray(x, dtype) for x in arrays]
