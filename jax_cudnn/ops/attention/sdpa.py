# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.sdpa`: attention over queries, keys and values."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.call import run_sdpa
from jax_cudnn.ops.attention.layouts import Layout, check_layout
from jax_cudnn.ops.attention.options import AttentionCall, SdpaOptions
from jax_cudnn.ops.attention.visibility.masks import Mask
from jax_cudnn.ops.common.signatures import takes


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    layout: Layout = ...,
    return_residual: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[SdpaOptions],
) -> jax.Array: ...


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    layout: Layout = ...,
    return_residual: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[SdpaOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    layout: Layout = ...,
    return_residual: bool = ...,
    return_max_logit: Literal[True],
    **options: Unpack[SdpaOptions],
) -> tuple[jax.Array, ...]: ...


@takes(AttentionCall, SdpaOptions)
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    layout: Layout = "bshd",
    return_residual: bool = False,
    return_max_logit: bool = False,
    **options: Unpack[SdpaOptions],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Return scaled dot-product attention, through cuDNN on NVIDIA GPUs.

    A drop-in for :func:`jax.nn.dot_product_attention`, except that the log-sum-exp is
    f32 and has a gradient. For each batch entry and head,

    .. math::

        S_{st} = \mathrm{scale} \sum_d Q_{sd} K_{td} + \mathrm{bias}_{st}, \qquad
        O_{se} = \sum_t \frac{e^{S_{st}}}{\sum_{t'} e^{S_{st'}}} V_{te}

    where the sums over t include only the keys that query s may see: those that `mask`
    allows, with t <= s if `is_causal` (top-left alignment, also where the lengths
    differ), and with t below the batch entry's key length. Scores, softmax
    and sums are kept in f32 (f64 for f64 operands); the result is rounded once. A query
    that sees no key, or is at or past its query length, gives 0 with gradient 0.

    All of JAX's transformations apply. First-order reverse mode runs cuDNN's backward
    kernel. Forward mode and higher orders run the jax.numpy reference.

    Axis letters: b batch, s query length, t key length, h query heads, k key heads,
    d head size, e value head size.

    Args:
      query: (b, s, h, d) or (s, h, d), or as `layout` says; bf16, f16, f32 or f64.
      key: (b, t, k, d) or (t, k, d), of query's dtype. h must be a multiple of k:
        each key head serves h/k consecutive query heads (GQA; MQA for k = 1).
      value: (b, t, k, e) or (t, k, e), of query's dtype; e may differ from d.
      bias: as in :class:`AttentionCall`.
      mask: as in :class:`AttentionCall`.
      layout: the order of the axes of query, key, value and the output: "bshd"
        (default), "bhsd" or "sbhd", with s standing for the tokens, queries or keys,
        and h for the heads. Kernels read and write each layout without a copy. Without
        a batch axis, b is omitted. Bias, mask, lengths and the log-sum-exp do not
        depend on it.
      **options: as in :class:`AttentionCall`.
      return_residual: whether to return the log-sum-exp of the scores as well.
        Default False.
      return_max_logit: whether to return the largest score of each query as well.
        Default False. See the notes.

    Returns:
      (b, s, h, e) or (s, h, e), or as `layout` says, of query's dtype. With
      `return_residual`, a tuple of this array and the log-sum-exp (natural logarithm).
      The log-sum-exp is (b, s, h) or (s, h) in each layout, f32 (f64 for f64), and
      differentiable. The sinks are part of it. For queries that see no key, padding
      among them, it is the sink of the head, and -inf without sinks. With
      `return_max_logit`, the last of the tuple is the maximum of the scores, of the
      same shape and dtype, -inf for queries that see no key.

    Raises:
      ValueError: shapes that do not fit, query heads that are not a multiple of the
        key heads, an unknown `implementation` or `layout`, a `scale` that is not
        finite, a window in which no query sees a key, with `is_causal` where it is
        given, a `dropout_rate` outside of [0, 1) or above 0 without a key, more than
        one key, 2^25 heads or more in all batch entries with dropout, a `score_mod`
        that reads an array beyond its end.
      TypeError: dtypes that are not supported or differ, a `mask` that is not bool, a
        `scale` or a `dropout_rate` that is not a Python number, a `dropout_key` that
        is not one, a `score_mod` that is no function or returns anything but one float.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised
        when the function is compiled for a GPU), or symbolic dimensions or a
        `score_mod` that cannot run in a kernel (raised at once); operands whose types
        have shardings that contradict each other.
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      **Supported configurations.** docs/attention_support.md lists what each version of
      cuDNN supports. cuDNN runs bf16 and f16 on sm_80 (Ampere) and newer, from cuDNN
      9.8 on except for 9.10.0 and 9.10.1, whose attention has known bugs
      (cudnn-frontend 1.28). Head sizes that are not multiples of 8 are padded. The
      largest head sizes of the backward kernel are:

      - sm_80: 128
      - sm_90: 256
      - sm_100: 128; d = 192 with e = 128; from cuDNN 9.24 on also d = e = 256. Other
        large heads run there if operands are padded with zeros to 256, with `scale` of
        the old size (planned, not run).

      On sm_80 and sm_100, the gradient of the log-sum-exp needs e of 120 or less.

      f32 runs with XLA, unless "cudnn" is requested: cuDNN's f32 kernel is slower than
      XLA and has no gradient. f64 runs with XLA. `jax.default_matmul_precision` applies
      to calls that XLA runs. A call with symbolic dimensions of `jax.export` runs XLA's
      code.

      **Windows** are a band of cuDNN's kernel, which takes no memory. In three cases
      the window is written into the mask instead, an array of s * t: with a mask or
      lengths; if a query sees no key in its window; and with cuDNN 9.14.0 beyond 1024
      keys without `is_causal`, whose band is wrong (cudnn-frontend 1.28).

      **Packed sequences** run in cuDNN one by one, on sm_90 and sm_100. On other GPUs,
      and with a bias or an array as a mask, they are part of the mask (docs/packed.md).

      **Masked values must be finite**, and for gradients masked keys and padded queries
      as well: a weight of 0 times NaN is NaN, as in
      :func:`jax.nn.dot_product_attention`. In :class:`~jax_cudnn.masks.Packed`, padding
      may contain NaN, and so may padding beyond lengths where XLA runs
      (docs/attention.md).

      **Bias.** XLA computes the gradient of an f32 bias with 16-bit operands, since
      cuDNN computes it in the operands' dtype only.

      A bias may mask a whole row, for example by -1e9 for every key. Such a row attends
      to all these keys alike, because f32 has no digits left for scores next to 1e9.
      Kernels lose the number of keys in a row whose log-sum-exp a bias moves further
      than 2048 from 0, so XLA computes the gradient of such rows, unless their
      cotangent is 0. The host asks the GPU whether there are such rows. Therefore a
      gradient with a bias takes 3 to 8 % longer for (8, 1024, 16, 64), and at most 3 %
      for 2048 tokens or more, on an H200 (docs/internals/measured/sdpa_bias.md).
      Lengths or a mask instead of such a bias avoid this.

      cuDNN keeps scores times log2(e) in f32 (seen with 9.19 on sm_90). So a bias below
      -2.3e38 counts as -inf if each head has its own bias, with full rows and columns.
      With other biases below -2.3e38 the log-sum-exp has three digits.

      **Sinks.** With `sinks`, head h has the softmax

      .. math::

          P_{st} = \frac{e^{S_{st}}}{e^{\mathrm{sinks}_h} + \sum_{t'} e^{S_{st'}}}

      so a query need not attend to any key. The output is computed without the sinks
      and then multiplied by the total weight of the keys, sigmoid(L - sinks), where L
      is the log-sum-exp of the scores. So it is rounded twice. Sinks can be combined
      with all other arguments. Reverse mode runs the backward kernel once, on the
      output and the log-sum-exp with the sinks.

      **Largest scores.** With `return_max_logit`, the maximum of a query is that of S
      over the keys that it sees: scaled, through `score_mod`, with the bias, and
      without the sink. It does not depend on dropout. cuDNN's kernel computes it
      together with the output (planned with 9.13 to 9.27, run with 9.19 on an H200:
      docs/random_attention.md). Other libraries also return the sum of exp(S -
      maximum), which is exp(log-sum-exp - maximum). The gradient of the maximum goes to
      the largest score, or to the first of several equal ones. XLA computes it if a
      loss depends on the maximum, in memory that grows with s * t. docs/attention.md
      has an example, QK-clip.

      **Dropout.** With a `dropout_rate` of p, weights are dropped after the softmax,
      and the others are divided by 1 - p:

      .. math::

          O_{se} = \sum_t \frac{D_{st}}{1 - p} P_{st} V_{te}, \qquad
          \Pr(D_{st} = 1) = 1 - p

      Dropout does not change the log-sum-exp. D depends only on the key: it is the same
      in each transformation of a call, on each platform, and for each sharding of the
      operands. Under :func:`jax.vmap` each example has the D of its key. In a
      :func:`jax.shard_map` of your own, each device would draw the same D for its part:
      fold :func:`jax.lax.axis_index` into the key.

      D differs between batch entries and heads. Within these, queries share it: of
      queries 8n to 8n + 7, those with even numbers drop the same keys, and so do those
      with odd numbers. cuDNN's kernels draw it like this (9.19), and the reference does
      the same. Each weight by itself is kept with probability 1 - p.

      cuDNN's kernels draw D themselves on sm_90 with cuDNN 9.19, where they were
      compared bit by bit with the reference, in memory that does not grow with s * t. A
      forward and backward pass then takes 1.5 times as long as without dropout, for
      bf16 (4, 2048, 16, 128) on an H200. In these cases XLA writes D for the kernel, an
      array of b * h * s * t numbers in the operands' dtype, and the backward kernel
      takes almost five times as long:

      - other versions and GPUs
      - rates above 0.96
      - devices that have a part of the heads of several batch entries
      - examples of a vmap, which are one call of the kernel. With "cudnn", they run one
        by one instead, each as above: prefer that for long sequences.

      **Functions of scores.** With `score_mod`, S is score_mod(scale QK^T) + bias, and
      masks, lengths, causality and windows are applied afterwards. The function is
      traced once for each call that is traced, and split into parts:

      - A term that is added last and does not depend on the score is a bias.
      - Where -inf is selected last, by the indices, it is a mask.
      - Any other operation on the score runs inside the kernel, if it is one of cuDNN's
        pointwise operations. Causality, lengths and a window then take no memory, but
        the kernel does not skip masked keys.
      - A function with other operations on the score, or more than four arrays, runs
        with XLA; the log says why.

      XLA computes the gradients of arrays that operations in the kernel read, and of a
      bias together with such operations, in memory that grows with s * t. The gradient
      of such an array is NaN where the function has no finite slope at a masked key.
      Operations in the kernel need cuDNN 9.19, and their gradient sm_90 or sm_100
      (planned with 9.19 and 9.27, run with 9.19 on an H200). docs/score_mods.md has
      examples.

      A `score_mod` that reads an array beyond its end for a score that some query sees,
      such as slopes of 4 heads for 6, is refused: JAX would read the nearest element.
      This is checked where sizes are known and an index is computed from the positions
      in integers, except for reads that depend on the query or the key where lengths, a
      mask or a bias may mask keys. To read the nearest element on purpose, clip the
      index or select by :func:`jax.numpy.where`.

      **Several devices.** Operands that are sharded stay so along the batch, and along
      the heads if the key heads can be divided; other axes are gathered
      (docs/several_gpus.md). :mod:`jax_cudnn.parallel` shards the sequence.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> jax_cudnn.sdpa(q, k, v, is_causal=True).shape
      (2, 5, 4, 8)
    """
    given = AttentionCall(bias=bias, mask=mask, **options)
    return run_sdpa(
        query,
        key,
        value,
        given,
        given.options("sdpa"),
        check_layout("sdpa", layout),
        return_residual=return_residual,
        return_max_logit=return_max_logit,
    )
