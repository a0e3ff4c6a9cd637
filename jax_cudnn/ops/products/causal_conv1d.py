# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.causal_conv1d`: a causal convolution of each channel over time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import CausalConvAttributes, causal_conv1d_graph
from jax_cudnn.lowering import (
    explicit_spec,
    gathered_along,
    is_explicitly_sharded,
    run_graph,
    sharded_where_free,
    weakly_typed,
)
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_dtype,
    check_flag,
    check_integers,
    describe,
    is_weak,
    options,
    strongly_typed,
    tensor,
    why_symbolic,
)
from jax_cudnn.ops.common.plain import check_implementation
from jax_cudnn.reference.products.causal_conv1d import activated

_OP = "causal_conv1d"
# None, a name, or JAX's function of that name.
CausalActivation = Literal["silu", "swish"] | Callable[[jax.Array], jax.Array] | None
CausalLayout = Literal["NWC", "NCW"]
_SILU = ("silu", "swish", jax.nn.silu, jax.nn.swish)


@overload
def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    *,
    bias: ArrayLike | None = ...,
    activation: CausalActivation = ...,
    initial_state: ArrayLike | None = ...,
    return_state: Literal[False] = ...,
    segment_ids: ArrayLike | None = ...,
    dimension_numbers: CausalLayout = ...,
    implementation: Implementation | None = ...,
    plan: PlanOptions | None = ...,
) -> jax.Array: ...


@overload
def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    *,
    bias: ArrayLike | None = ...,
    activation: CausalActivation = ...,
    initial_state: ArrayLike | None = ...,
    return_state: Literal[True],
    segment_ids: ArrayLike | None = ...,
    dimension_numbers: CausalLayout = ...,
    implementation: Implementation | None = ...,
    plan: PlanOptions | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: CausalActivation = "silu",
    initial_state: ArrayLike | None = None,
    return_state: bool = False,
    segment_ids: ArrayLike | None = None,
    dimension_numbers: CausalLayout = "NWC",
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Return a causal convolution of each channel over time, with its activation.

    This is the short convolution of Mamba, gated DeltaNet and Hyena. For each example
    n, step s and channel c,

    .. math::

        \mathrm{output}_{nsc} = \mathrm{activation}\Big(\mathrm{bias}_c +
            \sum_{0 \le k < K} x_{n, s - k, c} \, w_{K - 1 - k, c}\Big)

    where the steps before the first one are `initial_state`, or 0. The last tap of w
    multiplies the current step, as in `torch.nn.Conv1d` and in :func:`jax.lax.conv`.
    Sums, and the values computed from them, are kept in f32 (f64 for f64) and rounded
    once, to the dtype of x.

    All of JAX's transformations apply. In first-order reverse mode, one kernel of
    cuDNN's gives all gradients, and computes the argument of the activation again:
    nothing but the operands is saved. Forward mode and higher orders run XLA's code.

    Axis letters: N any number of batch axes, s steps, c channels, K taps.

    Args:
      x: (\*N, s, c), or (\*N, c, s) by `dimension_numbers`; bf16, f16, f32 or f64.
      w: (K, c), or (c, K) by `dimension_numbers`; of the dtype of x.
      bias: (c,), rounded to the dtype of x. Default None: none.
      activation: "silu", which is also called "swish", or one of these functions of
        `jax.nn`; None for none. Apply any other one to the result. Default "silu".
      initial_state: (\*N, K - 1, c), or (\*N, c, K - 1): the steps before the first
        one, of the dtype of x. Default None: zeros.
      return_state: whether to return the last K - 1 steps, too, which are the
        `initial_state` of what follows. Default False.
      segment_ids: (\*N, s) integers of 32 bits or fewer, the document of each step.
        A step reads steps with its own id only. `initial_state` has the id of the first
        step, and in the state that is returned, steps of other documents than the last
        one are 0. NaN and infinities stay within their document. Default None: one
        document.
      dimension_numbers: "NWC" for steps before channels, or "NCW" for channels before
        steps; w and the states have the same order. Default "NWC".
      implementation: "auto" (default) uses cuDNN's function for x of 2^24 elements and
        more, and else XLA, unless :func:`jax_cudnn.plans.autotune` measured cuDNN to be
        faster. "cudnn" uses cuDNN, and raises where it has no
        plan. "xla" never touches cuDNN. On platforms other than CUDA, all three run
        XLA. Inside :func:`jax_cudnn.plans.using`, "auto" and None mean the
        implementation that is set there.
      plan: which of cuDNN's plans may run the call, as for :func:`jax_cudnn.conv`.
        Default None.

    Returns:
      The result, of the shape and dtype of x. With `return_state` a pair: the result,
      and the state, of the shape of `initial_state` and the dtype of x.

    Raises:
      ValueError: shapes that do not fit, another activation or layout.
      TypeError: dtypes other than those above, or w of another one than x.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here, as with
        `segment_ids` (raised when the function is compiled for a GPU), or there are
        symbolic dimensions (raised at once);
        types of `initial_state` and x whose shardings contradict each other.
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      cuDNN has a function for this from 9.22 on, for 2 to 8, 16, 32, 64, 128 or 256
      taps (cudnn_subquadratic_ops.h). It adds up the gradients of w and bias in an
      order that differs from run to run. Where `plan` asks for a deterministic plan,
      for other taps and for older cuDNNs, `implementation="cudnn"` runs a depthwise
      convolution; the gradients of w and bias are then XLA's
      (docs/causal_conv1d.md). `initial_state` is put in front of x, which copies x.
      Where XLA computes the gradient on a GPU, the cotangent of the activation's
      argument is rounded to the dtype of 16-bit operands.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((2, 9, 6)), jnp.ones((4, 6))
      >>> y, state = jax_cudnn.causal_conv1d(x, w, return_state=True)
      >>> y.shape, state.shape
      ((2, 9, 6), (2, 3, 6))
      >>> step = jnp.ones((2, 1, 6))
      >>> jax_cudnn.causal_conv1d(step, w, initial_state=state).shape
      (2, 1, 6)
    """
    call = options(_OP, implementation, plan)
    layout = _Layout.of(dimension_numbers)
    given = as_operand(_OP, "x", x)
    with_state = check_flag(_OP, "return_state", return_state)
    taps = as_operand(_OP, "w", w)
    _check_operands(layout, given, taps)
    arrays = {"x": strongly_typed(given), "w": strongly_typed(taps)}
    if bias is not None:
        arrays["bias"] = _bias(layout, arrays["x"], bias)
    if segment_ids is not None:
        arrays["segment_ids"] = _segments(layout, arrays["x"], segment_ids)
    state = None
    if initial_state is not None:
        state = _state(layout, arrays["x"], arrays["w"], initial_state)
    if state is not None or with_state:  # Pieces of steps are cut and joined.
        state, arrays = _with_whole_steps(layout, state, arrays)
    convolution = _Convolution(layout, arrays, _mode(activation), call)
    output = convolution.run(state)
    if is_weak(given, taps, bias, initial_state):
        output = weakly_typed(output)
    return (output, convolution.last(state)) if with_state else output


class _Layout(NamedTuple):
    """The order of axes in x, of which the last two are steps and channels."""

    name: str
    steps: int  # -2 or -1, and the channels are the other one

    @classmethod
    def of(cls, name: object) -> _Layout:
        if name == "NWC":
            return cls("NWC", -2)
        if name == "NCW":
            return cls("NCW", -1)
        raise ValueError(
            f"{_OP}: dimension_numbers={name!r} is no layout. Pass 'NWC' for (*N, s, "
            "c), or 'NCW' for (*N, c, s)."
        )

    @property
    def channels(self) -> int:
        """The axis of channels, in w as in x."""
        return -3 - self.steps

    def shape(self, front: tuple[int, ...], steps: int, channels: int) -> Any:
        """Return the shape with so many steps and channels."""
        return (*front, *((steps, channels) if self.steps == -2 else (channels, steps)))


class _Convolution(NamedTuple):
    """The operands of a call by role, its activation as graphs call it, and options."""

    layout: _Layout
    arrays: dict[str, jax.Array]
    activation: str
    call: Options

    @property
    def before(self) -> int:
        """The steps that a result needs before its own."""
        return self.arrays["w"].shape[self.layout.steps] - 1

    def run(self, state: jax.Array | None) -> jax.Array:
        """Return the result."""
        x, axis = self.arrays["x"], self.layout.steps
        if state is None or self.before == 0:
            return self._whole(self.arrays)
        if x.shape[axis] == 0:
            return x
        arrays = {**self.arrays, "x": jnp.concatenate([state, x], axis)}
        if (ids := arrays.get("segment_ids")) is not None:
            first = jnp.broadcast_to(ids[..., :1], (*ids.shape[:-1], self.before))
            arrays["segment_ids"] = jnp.concatenate([first, ids], -1)
        output = self._whole(arrays)
        return jax.lax.slice_in_dim(output, self.before, output.shape[axis], axis=axis)

    def last(self, state: jax.Array | None) -> jax.Array:
        """Return the last steps, which come before what follows."""
        x, axis = self.arrays["x"], self.layout.steps
        before = self.before
        if state is None:
            front, channels = x.shape[:-2], x.shape[self.layout.channels]
            state = jnp.zeros(self.layout.shape(front, before, channels), x.dtype)
            state = sharded_where_free(state, x)
        steps = x.shape[axis]
        # No size is compared with another: steps may be symbolic.
        whole = jnp.concatenate([state, x], axis)
        found = jax.lax.slice_in_dim(whole, steps, steps + before, axis=axis)
        ids = self.arrays.get("segment_ids")
        if ids is None or steps == 0:
            return found
        first = jnp.broadcast_to(ids[..., :1], (*ids.shape[:-1], before))
        own = jnp.concatenate([first, ids], -1)
        own = jax.lax.slice_in_dim(own, steps, steps + before, axis=own.ndim - 1)
        is_last = jnp.expand_dims(own == ids[..., -1:], self.layout.channels)
        return jnp.where(is_last, found, jnp.zeros((), found.dtype))

    def _whole(self, arrays: dict[str, jax.Array]) -> jax.Array:
        """Return the result for arrays with nothing before them."""
        x = arrays["x"]
        if reason := why_symbolic(x=x, w=arrays["w"]):
            check_implementation(_OP, reason, self.call)
            return self._plain(arrays)
        is_last = self.layout.steps == -2
        count = math.prod(x.shape[:-2])
        orders = {
            "x": (0, 1, 2) if is_last else (0, 2, 1),
            "w": (0, 1) if is_last else (1, 0),
        }
        sizes = {
            "x": (count, *x.shape[-2:]),
            "w": arrays["w"].shape,
            "bias": (1, x.shape[self.layout.channels]),
            "segment_ids": (count, x.shape[self.layout.steps]),
        }
        graph = causal_conv1d_graph(
            {
                role: tensor(role, array, orders.get(role, (0, 1)), sizes[role])
                for role, array in arrays.items()
            },
            attributes=CausalConvAttributes(activation=self.activation),
        )
        (output,) = run_graph(graph, list(arrays.values()), self.call)
        return sharded_where_free(jnp.reshape(output, x.shape), x)

    def _plain(self, arrays: dict[str, jax.Array]) -> jax.Array:
        """Return it in JAX's operations."""
        x = arrays["x"]
        is_last = self.layout.steps == -2
        merged = jnp.reshape(x, (-1, *x.shape[-2:]))
        inputs = {
            **arrays,
            "x": merged if is_last else jnp.swapaxes(merged, 1, 2),
            "w": arrays["w"] if is_last else arrays["w"].T,
        }
        if "bias" in arrays:
            inputs["bias"] = arrays["bias"][None]
        if (ids := arrays.get("segment_ids")) is not None:
            inputs["segment_ids"] = jnp.reshape(ids, (-1, ids.shape[-1]))
        output = activated(self.activation, inputs)
        output = output if is_last else jnp.swapaxes(output, 1, 2)
        return jnp.reshape(output, x.shape)


def _with_whole_steps(
    layout: _Layout, state: jax.Array | None, arrays: dict[str, jax.Array]
) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """Return the arrays with steps that no type says are sharded."""

    def whole(x: jax.Array, axis: int) -> jax.Array:
        return gathered_along(x, [axis % x.ndim])

    found = {**arrays, "x": whole(arrays["x"], layout.steps)}
    if "segment_ids" in arrays:
        found["segment_ids"] = whole(arrays["segment_ids"], -1)
    if state is not None:
        state = whole(state, layout.steps)
        found["x"] = sharded_where_free(found["x"], state)
        state = sharded_where_free(state, found["x"])
        specs = [explicit_spec(x) for x in (state, found["x"])]
        if is_explicitly_sharded(state) and specs[0] != specs[1]:
            raise UnsupportedError(
                f"{_OP}: the types of initial_state and x are sharded over {specs[0]} "
                f"and {specs[1]}. They must be sharded alike, since the state is put "
                "before the steps of x. Reshard one of them with "
                "jax.sharding.reshard, or use a mesh with AxisType.Auto."
            )
    return state, found


def _mode(activation: object) -> str:
    if activation is None:
        return "identity"
    if any(activation is each or activation == each for each in _SILU):
        return "silu"
    raise ValueError(
        f"{_OP}: activation={activation!r} is not one that the convolution has. Pass "
        "'silu' or None, and apply another one to the result."
    )


def _check_operands(layout: _Layout, x: jax.Array, w: jax.Array) -> None:
    check_dtype(_OP, "x", x)
    axes_of_x = "(*N, s, c)" if layout.steps == -2 else "(*N, c, s)"
    axes_of_w = "(K, c)" if layout.steps == -2 else "(c, K)"
    if x.ndim < 2:
        raise ValueError(
            f"{_OP}: x is {describe(x)}. In the layout {layout.name} it must have the "
            f"axes {axes_of_x}. Add what is missing."
        )
    if w.ndim != 2:
        raise ValueError(
            f"{_OP}: w is {describe(w)}. In the layout {layout.name} it must have the "
            f"axes {axes_of_w}: each channel has taps of its own. Reshape it."
        )
    if w.dtype != x.dtype:
        raise TypeError(
            f"{_OP}: x is {describe(x)} and w {describe(w)}. They must have one dtype. "
            "Convert one of them."
        )
    if w.shape[layout.channels] != x.shape[layout.channels]:
        raise ValueError(
            f"{_OP}: x is {describe(x)} and w {describe(w)}. In the layout "
            f"{layout.name}, {axes_of_x} and {axes_of_w}, both must have the same "
            "channels c. Transpose w, or pass another dimension_numbers."
        )
    if w.shape[layout.steps] == 0:
        raise ValueError(
            f"{_OP}: w is {describe(w)}, without taps. It must have one at least."
        )


def _bias(layout: _Layout, x: jax.Array, value: ArrayLike) -> jax.Array:
    bias = as_operand(_OP, "bias", value)
    check_dtype(_OP, "bias", bias)
    channels = x.shape[layout.channels]
    if bias.shape != (channels,):
        raise ValueError(
            f"{_OP}: bias is {describe(bias)}. It must have one entry for each of the "
            f"{channels} channels of x, {describe(x)}. Reshape or broadcast it."
        )
    return strongly_typed(bias).astype(x.dtype)


def _segments(layout: _Layout, x: jax.Array, value: ArrayLike) -> jax.Array:
    ids = check_integers(_OP, "segment_ids", value)
    if ids.dtype.itemsize > np.dtype(np.int32).itemsize:
        raise TypeError(
            f"{_OP}: segment_ids is {describe(ids)}. It must have 32 bits or fewer. "
            "Convert it to int32."
        )
    wanted = (*x.shape[:-2], x.shape[layout.steps])
    if ids.shape != wanted:
        raise ValueError(
            f"{_OP}: segment_ids is {describe(ids)}. It must have an id for each step "
            f"of x, {describe(x)}: the shape {wanted}. Broadcast it."
        )
    return ids.astype(jnp.int32)


def _state(layout: _Layout, x: jax.Array, w: jax.Array, value: ArrayLike) -> jax.Array:
    state = as_operand(_OP, "initial_state", value)
    if state.dtype != x.dtype:
        raise TypeError(
            f"{_OP}: initial_state is {describe(state)} and x {describe(x)}. They must "
            "have one dtype. Convert the state."
        )
    before = w.shape[layout.steps] - 1
    wanted = layout.shape(x.shape[:-2], before, x.shape[layout.channels])
    if state.shape != wanted:
        raise ValueError(
            f"{_OP}: initial_state is {describe(state)}. For x, {describe(x)}, and "
            f"w, {describe(w)}, it must have the last {before} steps: the shape "
            f"{wanted}. Pass the state that the call before returned."
        )
    return strongly_typed(state)
