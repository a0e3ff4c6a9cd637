# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.sdpa`: checks the arguments of attention and builds its graph."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.graph.rules import broadcasts_to
from jax_cudnn.ops.arguments import (
    as_operand,
    check_dtype,
    check_flag,
    describe,
    in_front,
    options,
    why_symbolic,
)
from jax_cudnn.ops.attend import Operands, attend, stored_order
from jax_cudnn.ops.masks import Additive, Causal, Lengths, Mask, Window
from jax_cudnn.ops.plain import check_implementation
from jax_cudnn.ops.sinks import attend_with_sinks, check_sinks, with_sinks
from jax_cudnn.reference.dtypes import dtype_name
from jax_cudnn.reference.sdpa import forward as attention


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    sinks: ArrayLike | None = ...,
    implementation: Implementation | None = ...,
    plan: PlanOptions | None = ...,
    return_residual: Literal[False] = ...,
) -> jax.Array: ...


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    sinks: ArrayLike | None = ...,
    implementation: Implementation | None = ...,
    plan: PlanOptions | None = ...,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    sinks: ArrayLike | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Return scaled dot-product attention, through cuDNN on NVIDIA GPUs.

    A drop-in for :func:`jax.nn.dot_product_attention`, except that the log-sum-exp is
    f32 and has a gradient. For each batch entry and head,

    .. math::

        S_{st} = \mathrm{scale} \sum_d Q_{sd} K_{td} + \mathrm{bias}_{st}, \qquad
        O_{se} = \sum_t \frac{e^{S_{st}}}{\sum_{t'} e^{S_{st'}}} V_{te}

    where the sums over t include only the keys that query s may see. These are the
    keys that `mask` allows, with t <= s if `is_causal` (top-left alignment, also where
    the lengths differ), and with t below the batch entry's key length. Scores, softmax
    and sums are kept in f32 (f64 for f64 operands); the result is rounded once. A query
    that sees no key, or that lies at or past its query length, gives 0 with gradient 0.

    All of JAX's transformations apply. First-order reverse mode runs cuDNN's backward
    kernel. Forward mode and higher orders run the jax.numpy reference.

    Axis letters: b batch, s query length, t key length, h query heads, k key heads,
    d head size, e value head size.

    Args:
      query: (b, s, h, d) or (s, h, d); bf16, f16, f32 or f64.
      key: (b, t, k, d) or (t, k, d), of query's dtype. h must be a multiple of k:
        each key head serves h/k consecutive query heads (GQA; MQA for k = 1).
      value: (b, t, k, e) or (t, k, e), of query's dtype; e may differ from d.
      bias: added to the scaled scores; broadcasts to (b, h, s, t), and missing axes
        are inserted in front; bf16, f16, f32, f64 or integers. Differentiable. Default
        None: nothing added.
      mask: bool, broadcasts to (b, h, s, t); True lets a query see a key. Or one of
        :mod:`jax_cudnn.masks`, which adds to the other arguments that hide keys.
        Default None: every query sees every key.
      scale: a Python number that multiplies the scores. Default None: 1/sqrt(d).
      is_causal: whether query s sees keys 0 to s only. Default False.
      query_seq_lengths: integers (b,); queries at or past their entry's length are
        padding. Default None: s.
      key_value_seq_lengths: integers (b,); keys at or past their entry's length are
        padding. Default None: t. Lengths below 0 count as 0, and lengths above the
        axis's size count as its size.
      local_window_size: (left, right): query s sees keys s - left to s + right only,
        counted from the first query and key, also where s and t differ. An int n means
        (n, n). It adds to what `is_causal`, the lengths, `mask` and `bias` hide.
        Default None: no window.
      sinks: (h,), a score for each query head of one more key, which every query sees
        and whose value is 0. It is not scaled; bf16, f16, f32 or f64. Differentiable.
        Default None: no such key. See the notes.
      implementation: "auto" (default) uses cuDNN where it has a plan and XLA
        elsewhere (the logger "jax_cudnn" says why at INFO); "cudnn" raises where
        cuDNN has no plan; "xla" never touches cuDNN. On platforms other than CUDA,
        all three run XLA. Inside :func:`jax_cudnn.plans.using`, "auto" and None mean
        the implementation that is set there.
      plan: which of cuDNN's execution plans may run the call, a
        :class:`jax_cudnn.plans.PlanOptions`. Default None: the options of
        :func:`jax_cudnn.plans.using`; outside of that scope, every plan.
      return_residual: whether to return the log-sum-exp of the scores as well.
        Default False.

    Returns:
      (b, s, h, e) or (s, h, e), of query's dtype. With `return_residual`, a pair of
      this array and the log-sum-exp (natural logarithm). The log-sum-exp is (b, s, h)
      or (s, h), f32 (f64 for f64), -inf for queries that see no key, and
      differentiable. The sinks are part of it.

    Raises:
      ValueError: shapes that do not fit, query heads that are not a multiple of the
        key heads, an unknown `implementation`, a `scale` that is not finite.
      TypeError: dtypes that are not supported or differ, a `mask` that is not bool, a
        `scale` that is not a Python number.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised
        when the function is compiled for a GPU), or symbolic dimensions, which cuDNN
        has no plan for (raised at once); operands whose types have shardings that
        contradict each other.
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      cuDNN runs bf16 and f16 on sm_80 (Ampere) and newer, from cuDNN 9.8 on except for
      9.10.0 and 9.10.1, whose attention has known bugs (cudnn-frontend 1.28). Head
      sizes that are not multiples of 8 are padded. The backward kernel takes head sizes
      up to 256 on sm_90, and up to 128 on sm_80 and sm_100 (NVIDIA cuDNN frontend,
      "Attention" support matrix). On sm_80 and sm_100, the gradient of the log-sum-exp
      needs e of 120 or less. On sm_100, cuDNN 9.27 also plans the backward kernel for
      d = e = 256, and for d = 192 with e = 128. So larger heads run there if operands
      are padded with zeros to 256, with `scale` of the old size (planned, not run).

      A window is a band of cuDNN's kernel, which takes no memory. Beside a mask or
      lengths, or where a query sees no key in its window, the window is written into
      the mask instead, an array of s * t. So it is for cuDNN 9.14.0 beyond 1024 keys
      without `is_causal`, whose band is wrong (cudnn-frontend 1.28).

      f32 runs with XLA, unless "cudnn" is asked for: cuDNN has a forward plan for f32,
      which is slower than XLA, and no gradient. f64 runs with XLA. The gradient of an
      f32 bias is computed by XLA, since cuDNN gives it in the operands' dtype only.
      `jax.default_matmul_precision` applies to what XLA runs.

      A bias may hide a whole row, for example by -1e9 for every key. Such a row attends
      to all these keys alike: beside 1e9, f32 has no digits left for scores. XLA
      computes the gradient of such a row, and of every row whose log-sum-exp a bias
      moves further than 2048 from 0, since kernels lose the number of keys there. Rows
      whose cotangent is 0 are left out; padding that the loss leaves out is an example.
      The host asks the GPU whether there are such rows. So a gradient with a bias takes
      3 to 8 % longer for (8, 1024, 16, 64), and at most 3 % for 2048 tokens or more, on
      an H200 (docs/benchmarks/sdpa_bias.md). With lengths or a mask in place of such a
      bias, padding costs nothing.

      With `sinks`, head h has the softmax

      .. math::

          P_{st} = \frac{e^{S_{st}}}{e^{\mathrm{sinks}_h} + \sum_{t'} e^{S_{st'}}}

      so a query need not attend to any key. The output is computed without the sinks
      and then multiplied by the share that the keys have, sigmoid(L - sinks), with the
      log-sum-exp L of the scores; so it is rounded twice. All that `sdpa` takes can be
      combined with them. Reverse mode runs the backward kernel once, on the output and
      the log-sum-exp with the sinks. Beside a bias it is that of the log-sum-exp
      without them, which takes longer, and has the limits above on sm_80 and sm_100.

      cuDNN keeps scores times log2(e) in f32 (seen with 9.19 on sm_90). So it takes a
      bias below -2.3e38 for -inf if each head has its own bias, with full rows and
      columns. For other biases below -2.3e38 the log-sum-exp has three digits.

      Operands that are sharded over devices stay so along the batch, and along the
      heads where the key heads divide; other axes are gathered (docs/several_gpus.md).
      :mod:`jax_cudnn.parallel` shards the sequence. A call with symbolic dimensions of
      `jax.export` runs XLA's code.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> jax_cudnn.sdpa(q, k, v, is_causal=True).shape
      (2, 5, 4, 8)
    """
    call = options("sdpa", implementation, plan)
    hiding = _Hiding(
        bias=bias,
        mask=mask,
        is_causal=check_flag("sdpa", "is_causal", is_causal),
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )
    if isinstance(mask, Mask):
        hiding = _combined(mask, hiding, query, key)
    operands, has_batch = canonicalize(
        query,
        key,
        value,
        hiding.bias,
        hiding.mask,
        hiding.query_seq_lengths,
        hiding.key_value_seq_lengths,
    )
    attributes = SdpaAttributes(
        scale=check_scale(scale, operands.query.shape[3], operands.query.dtype),
        is_causal=hiding.is_causal,
        window=check_window(hiding.local_window_size),
    )
    sinks = check_sinks("sdpa", sinks, operands.query.shape[2])
    with_residual = check_flag("sdpa", "return_residual", return_residual)
    results = _attend(operands, attributes, call, sinks, with_lse=with_residual)
    output, *residual = results if has_batch else [x[0] for x in results]
    return (output, residual[0]) if with_residual else output


class _Hiding(NamedTuple):
    """The arguments that hide keys or move scores, by their names."""

    bias: ArrayLike | None = None
    mask: Any = None
    is_causal: bool = False
    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    local_window_size: int | tuple[int, int] | None = None


def _combined(mask: Mask, beside: _Hiding, query: ArrayLike, key: ArrayLike) -> _Hiding:
    """Return the arguments that a mask and others beside it stand for."""
    window = check_window(beside.local_window_size)
    parts = [Causal()] if beside.is_causal else []
    parts += [Window(window[0], window[1])] if window else []
    parts += [Additive(beside.bias)] if beside.bias is not None else []
    parts += [Lengths(beside.query_seq_lengths, beside.key_value_seq_lengths)]
    arrays = [as_operand("sdpa", n, x) for n, x in (("query", query), ("key", key))]
    if not all(x.ndim in (3, 4) for x in arrays):
        return _Hiding()  # They are refused next.
    combined = functools.reduce(operator.and_, parts, mask)
    return _Hiding(**combined.arguments(*(x.shape[-3] for x in arrays)))


def _attend(
    operands: Operands,
    attributes: SdpaAttributes,
    call: Options,
    sinks: jax.Array | None,
    *,
    with_lse: bool,
) -> tuple[jax.Array, ...]:
    """Return output (b, s, h, e) and, if asked for, log-sum-exp (b, s, h)."""
    if reason := why_symbolic(**operands.given):
        check_implementation("sdpa", reason, call)
        output, *stats = _plain(attributes, operands.given)
    elif sinks is not None and operands.bias is None:
        return attend_with_sinks(attributes, call, operands, sinks)
    else:
        # With a bias, rows may lie where the kernel that is given a log-sum-exp loses
        # the number of keys (legalize/far_rows.py). The gradient below mends these.
        with_stats = with_lse or sinks is not None
        output, *stats = attend(operands, attributes, call, with_stats=with_stats)
    if not stats:
        return (output,)
    lse = jnp.swapaxes(stats[0][..., 0], 1, 2)
    return (output, lse) if sinks is None else with_sinks(output, lse, sinks)


def _plain(
    attributes: SdpaAttributes, operands: dict[str, jax.Array]
) -> list[jax.Array]:
    """Return output and log-sum-exp by the reference, for shapes that graphs lack."""
    inputs = {
        role: jnp.transpose(x, stored_order(role)) for role, x in operands.items()
    }
    results = attention(attributes, inputs, {})
    output = jnp.transpose(results["output"], stored_order("output"))
    return [output.astype(operands["query"].dtype), results["stats"]]


# --- checks ---------------------------------------------------------------------------


def check_scale(scale: float | None, d: int, dtype: np.dtype) -> float:
    """Return the scale as cuDNN gets it: a double that is exact in f32, unless f64."""
    if scale is None:
        value = 1.0 / math.sqrt(d) if d else 1.0
    else:
        is_odd = isinstance(scale, bool | np.bool_ | str | bytes)
        is_odd = is_odd or np.iscomplexobj(scale)
        if is_odd or np.ndim(scale) != 0:
            raise _not_a_number(scale)
        try:
            value = float(scale)
        except (TypeError, ValueError):  # A traced value is one of its causes.
            raise _not_a_number(scale) from None
        except OverflowError:
            value = math.inf
    if dtype != np.float64:
        with np.errstate(over="ignore"):
            value = float(np.float32(value))
    if not math.isfinite(value):
        raise ValueError(f"sdpa: scale={scale} is not finite. Pass a finite number.")
    return value


def check_window(window: int | tuple[int, int] | None) -> tuple[int, ...]:
    """Return the window as (left, right), or () for none."""
    if window is None:
        return ()
    try:
        sizes = [
            operator.index(size)
            for size in (window if isinstance(window, Sequence) else [window])
            if not isinstance(size, bool | np.bool_)
        ]
    except TypeError:  # A traced value is one of its causes.
        sizes = []
    if isinstance(window, Sequence) and len(sizes) == len(window) == 2:
        left, right = sizes
    elif not isinstance(window, Sequence) and sizes:
        left = right = sizes[0]
    else:
        raise TypeError(
            f"sdpa: local_window_size={window!r} is neither an int nor two. Pass "
            "(left, right), ints known when the program is traced: how many keys "
            "before and after its own position a query sees."
        )
    if not all(-(2**62) <= size < 2**62 for size in (left, right)):
        raise ValueError(
            f"sdpa: local_window_size={window!r} does not fit in 63 bits. Pass at most "
            "the length of the sequences."
        )
    return (left, right)


def _not_a_number(scale: object) -> TypeError:
    return TypeError(
        f"sdpa: scale is {type(scale).__name__}. It must be a number known when the "
        "program is traced, since it is part of it. Multiply query by a traced scale."
    )


def _check_dtypes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    check_dtype(
        "sdpa", "query", q, advice="Convert query, key and value to one of them."
    )
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise TypeError(
                f"sdpa: {name} is {describe(x)} but query is {describe(q)}. All "
                f"three must have one dtype. Convert {name} to {dtype_name(q.dtype)}."
            )


def canonicalize(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    *,
    shares: int = 1,
    check_dtypes: Callable[[jax.Array, jax.Array, jax.Array], None] = _check_dtypes,
) -> tuple[Operands, bool]:
    """Check the operands together and give each its batch axis and dtype.

    Queries and keys may be one of several equal shares of their sequences. The keys of
    bias and mask, and the lengths, are those of the whole sequences.
    """
    q, k, v = (
        as_operand("sdpa", name, x)
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    check_dtypes(q, k, v)
    has_batch = _check_ranks(q, k, v)
    if not has_batch:
        q, k, v = q[None], k[None], v[None]
    _check_shapes(q, k, v)
    b, s, h, _ = q.shape
    t = k.shape[1] * shares
    scores = (b, h, s, t)
    return (
        Operands(
            query=q,
            key=k,
            value=v,
            bias=_check_bias(bias, scores, q.dtype),
            mask=_check_mask(mask, scores),
            query_lengths=_check_lengths(
                "query_seq_lengths", query_seq_lengths, b, s * shares
            ),
            key_lengths=_check_lengths(
                "key_value_seq_lengths", key_value_seq_lengths, b, t
            ),
        ),
        has_batch,
    )


def _check_ranks(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        advice = "Use jax.vmap or reshape for more batch axes."
        if q.ndim == 2:
            advice = "For a single head insert its axis: query[:, None, :]."
        raise ValueError(
            f"sdpa: {_shapes(q, k, v)}. All three must be (batch, length, heads, head "
            f"size) or all (length, heads, head size). {advice}"
        )
    return q.ndim == 4


def _shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> str:
    return f"query is {describe(q)}, key {describe(k)}, value {describe(v)}"


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    shapes = _shapes(q, k, v)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"sdpa: batch sizes differ: {shapes}. They must be equal. Broadcast, or "
            "use jax.vmap with in_axes=None for the shared operand."
        )
    if k.shape[1] != v.shape[1]:
        raise ValueError(
            f"sdpa: key has length {k.shape[1]} but value {v.shape[1]}: {shapes}. They "
            "must be equal."
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"sdpa: query has head size {q.shape[3]} but key {k.shape[3]}: {shapes}. "
            "They must be equal; value's may differ."
        )
    if k.shape[2] != v.shape[2]:
        raise ValueError(
            f"sdpa: key has {k.shape[2]} heads but value {v.shape[2]}: {shapes}. They "
            "must be equal."
        )
    h, heads = q.shape[2], k.shape[2]
    if (heads == 0) != (h == 0) or (heads and h % heads):
        raise ValueError(
            f"sdpa: {h} query heads are not a multiple of {heads} key heads: {shapes}. "
            "Repeat key and value heads, or change the number of query heads."
        )


def _check_bias(
    bias: ArrayLike | None, scores: tuple[int, ...], dtype: np.dtype
) -> jax.Array | None:
    if bias is None:
        return None
    array = as_operand("sdpa", "bias", bias)
    if jnp.issubdtype(array.dtype, jnp.integer):
        # Added to the scores, whose dtype it takes on.
        array = array.astype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    advice = "Convert it to the dtype of query."
    if array.dtype == jnp.bool_:
        advice = "Pass a boolean array as mask instead."
    check_dtype("sdpa", "bias", array, also=" and integers", advice=advice)
    return _check_scores_like("bias", array, scores)


def _check_mask(mask: ArrayLike | None, scores: tuple[int, ...]) -> jax.Array | None:
    if mask is None:
        return None
    array = as_operand("sdpa", "mask", mask)
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"sdpa: mask is {describe(array)}. It must be bool, True where a query "
            "may see a key. Pass an additive mask as bias, or convert with mask != 0."
        )
    return _check_scores_like("mask", array, scores)


def _check_scores_like(
    name: str, array: jax.Array, scores: tuple[int, ...]
) -> jax.Array:
    padded = in_front(array.shape, 4)
    if not broadcasts_to(padded, scores):
        raise ValueError(
            f"sdpa: {name} is {describe(array)}, which does not broadcast to (batch, "
            f"heads, query length, key length) = {list(scores)}. Each of its axes must "
            f"be 1 or the full size.{axes_hint(name, array.shape, scores)}"
        )
    return jnp.reshape(array, padded)


def axes_hint(name: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> str:
    """Return how a mask or bias of fewer axes is meant, probably; "" if no one knows.

    Of the scores (*batch axes, h, s, t); axes are added in front, as in NumPy.
    """
    *batch, h, s, t = scores
    index = {
        (*batch, t): ", None, None, :",
        (*batch, s, t): ", None, :, :",
        (*batch, h, t): ", :, None, :",
        (h, t): "None, :, None, :",
    }.get(shape)
    if index is None:
        return ""
    if index.startswith(","):
        index = ", ".join([":"] * len(batch)) + index
    return f" Its axes are taken to be the last ones. Pass {name}[{index}]."


def _check_lengths(
    name: str, lengths: ArrayLike | None, b: int, size: int
) -> jax.Array | None:
    if lengths is None:
        return None
    array = as_operand("sdpa", name, lengths)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"sdpa: {name} is {describe(array)}. Lengths must be integers. Convert "
            "them to int32."
        )
    if array.shape != (b,):
        raise ValueError(
            f"sdpa: {name} is {describe(array)}. It must have one length per batch "
            f"entry, shape [{b}]."
        )
    # Clipped in its own dtype: a longer one would wrap.
    most = int(jnp.iinfo(array.dtype).max)
    largest = (
        min(size, most) if isinstance(size, int) else jnp.asarray(size, array.dtype)
    )
    clipped = jnp.clip(array, 0, largest).astype(jnp.int32)
    return jnp.reshape(clipped, (b, 1, 1, 1))
