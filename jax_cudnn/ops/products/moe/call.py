# SPDX-License-Identifier: Apache-2.0
"""One device's work in a mixture of experts, and what is static of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import jax
import jax.numpy as jnp

from jax_cudnn.lowering import (
    explicit_spec,
    is_explicitly_sharded,
    min_dim,
    vary_over,
)
from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.ops.products.moe.arguments import check_weights
from jax_cudnn.ops.products.moe.exchange import Exchange
from jax_cudnn.ops.products.moe.experts import (
    ExpertOptions,
    Weights,
    run_experts,
    run_shared,
)
from jax_cudnn.ops.products.moe.permutation import (
    collect,
    counts,
    permutation_of,
    spread,
    weighted,
)
from jax_cudnn.ops.products.moe.routing import (
    Auxiliary,
    Rule,
    check_router,
    check_selection_bias,
    route,
)
from jax_cudnn.ops.products.moe.states import States

OP = "moe.layer"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a layer that are no arrays."""

    rule: Rule
    how: ExpertOptions
    capacity_factor: float | None
    expert: tuple[str, ...]
    batch: tuple[str, ...]
    tensor: tuple[str, ...]

    def is_inside(self) -> bool:
        """Whether the call is inside a shard_map over the axes that it names."""
        names = (*self.expert, *self.batch, *self.tensor)
        bound = [name for name in names if _is_bound(name)]
        if bound and len(bound) < len(names):
            others = ", ".join(repr(name) for name in names if name not in bound)
            raise ValueError(
                f"{OP}: the call is inside of jax.shard_map over "
                f"{', '.join(map(repr, bound))}, and outside over {others}. Name axes "
                "of one kind: those that shard_map divides, or those of whole arrays."
            )
        return bool(bound)

    def check(self, arrays: Mapping[str, jax.Array], devices: int) -> None:
        """Raise unless the arrays go together; so many devices share the experts."""
        check_router(OP, arrays["x"], arrays["router_w"], self.rule)
        experts = arrays["router_w"].shape[1]
        check_selection_bias(OP, arrays.get("selection_bias"), experts)
        check_weights(OP, arrays, devices)
        factor = self.capacity_factor
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            raise ValueError(
                f"{OP}: capacity_factor={factor} must be positive and finite. Pass "
                "None for experts that take all tokens."
            )

    def capacity(self, tokens: int, experts: int) -> int | None:
        """Return how many rows each expert takes of so many tokens."""
        if self.capacity_factor is None:
            return None
        choices = self.rule.top_k * tokens
        # As it is written: 1.1 of 10 rows are 11, and as a binary number a little more.
        share = Fraction(str(self.capacity_factor)) / experts
        # Rounded up. The number of tokens may be symbolic.
        return min_dim(choices, -(-choices * share.numerator // share.denominator))


def _is_bound(name: str) -> bool:
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def run(
    settings: Settings, arrays: Mapping[str, jax.Array], states: States
) -> tuple[jax.Array, Auxiliary, States]:
    """Return the result, the losses and the next states of one device's arrays.

    The next states are as far as they are known forward, and those of all devices.
    """
    devices = jax.lax.axis_size(settings.expert) if settings.expert else 1
    settings.check(arrays, devices)
    _check_types(arrays)
    x, router_w = arrays["x"], arrays["router_w"]
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    routing = route(
        tokens,
        router_w,
        arrays.get("selection_bias"),
        settings.rule,
        (*settings.expert, *settings.batch),
        settings.how.precision,
        # cuDNN may have no plan for so few experts: "cudnn" is for the MLPs.
        "xla" if settings.how.implementation == "xla" else "auto",
    )
    weights = Weights(*(arrays.get(name) for name in Weights._fields))  # type: ignore[arg-type]
    weights = _with_one_bias(weights, settings.tensor)
    choices, kept, following = _choices(
        settings, tokens, routing.experts, weights, devices, states
    )
    total = weighted(choices, routing.weights, kept)
    shared, others = run_shared(OP, tokens, weights, settings.how, states)
    if shared is not None:
        total += shared.astype(total.dtype)
    y = total.astype(choices.dtype)
    if settings.tensor:
        y = jax.lax.psum(y, settings.tensor)
    auxiliary = routing.auxiliary
    if settings.capacity_factor is not None and kept.size:
        dropped = jnp.mean(~kept, dtype=auxiliary.load.dtype)
        if axes := (*settings.expert, *settings.batch):
            dropped = jax.lax.pmean(dropped, axes)
        auxiliary = replace(auxiliary, dropped=dropped)
    found = _of_all_devices({**following, **others}, settings)
    return y.reshape(x.shape), auxiliary, found


def _of_all_devices(states: States, settings: Settings) -> States:
    """Return the largest of the devices' states: they differ by their newest amaxes."""
    axes = (*settings.expert, *settings.batch, *settings.tensor)
    known = {name: each for name, each in states.items() if each is not None}

    def largest(x: jax.Array) -> jax.Array:
        return jax.lax.pmax(vary_over(x, axes), axes)

    return {
        # The cotangent's is the one that was given.
        name: state._replace(x=largest(state.x), w=largest(state.w)) if axes else state
        for name, state in jax.lax.stop_gradient(known).items()
    }


def _check_types(arrays: Mapping[str, jax.Array]) -> None:
    """Raise ValueError for whole arrays that their types call sharded."""
    for name, x in arrays.items():
        if is_explicitly_sharded(x):
            raise ValueError(
                f"{OP}: {name} is {describe(x)}, by its type sharded over "
                f"{explicit_spec(x)}. Name the axes as expert_axis, batch_axis and "
                "tensor_axis, or gather it with jax.sharding.reshard."
            )


def _with_one_bias(weights: Weights, tensor: tuple[str, ...]) -> Weights:
    """Return weights of which one device alone along some axes has the last bias.

    Results are added up along these axes.
    """
    if weights.down_bias is None or not tensor:
        return weights
    bias = weights.down_bias
    is_first = jax.lax.axis_index(tensor) == 0
    own = jnp.where(is_first, bias, jnp.zeros((), bias.dtype))
    return weights._replace(down_bias=own)


def _choices(
    settings: Settings,
    tokens: jax.Array,
    experts: jax.Array,
    weights: Weights,
    devices: int,
    states: States,
) -> tuple[jax.Array, jax.Array, States]:
    """Return what experts make of each choice (t, k, d), and which of them are kept.

    The last of the results are the products' next states.
    """
    t, k = experts.shape
    count = devices * len(weights.up_w)
    capacity = settings.capacity(t * devices, count)
    wanted = counts(experts, count)[None]
    device = 0
    if settings.expert:
        wanted = jax.lax.all_gather(wanted[0], settings.expert)
        device = jax.lax.axis_index(settings.expert)
    sizes = _kept(wanted, capacity)
    rows = t * k if capacity is None else min_dim(t * k, count * capacity)
    permutation = permutation_of(experts, sizes[device], rows)
    source, target = permutation.source, permutation.target

    def compute(rows: jax.Array, sizes: jax.Array) -> tuple[jax.Array, States]:
        return run_experts(OP, rows, sizes, weights, settings.how, states)

    if settings.expert:
        room = devices * t * k
        if capacity is not None:
            room = min_dim(room, len(weights.up_w) * capacity)
        by_device = sizes.reshape(devices, devices, len(weights.up_w))
        exchange = Exchange(permutation, by_device, settings.expert)
        y, following = compute(exchange.send(tokens, room), exchange.group_sizes)
        choices = exchange.bring_back(y)
    else:
        own = spread(tokens, source, target)
        y, following = compute(own, permutation.group_sizes)
        choices = collect(y, source, target)
    return choices, target < rows, following


def _kept(wanted: jax.Array, capacity: int | None) -> jax.Array:
    """Return how many rows (device, expert) are kept of those that are wanted.

    ``wanted`` has an axis for the number of the choice in between. First choices of all
    devices go before second ones.
    """
    if capacity is None:
        return jnp.sum(wanted, axis=1, dtype=jnp.int32)
    devices, k, experts = wanted.shape
    in_order = jnp.swapaxes(wanted, 0, 1).reshape(k * devices, experts)
    before = jnp.cumsum(in_order, axis=0) - in_order
    kept = jnp.clip(capacity - before, 0, in_order)
    return jnp.sum(kept.reshape(k, devices, experts), axis=0, dtype=jnp.int32)
