# SPDX-License-Identifier: Apache-2.0
"""`to_cudnn` has the layers of an Equinox model compute with jax_cudnn."""

import dataclasses
from collections.abc import Callable
from typing import Any

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    if error.name != "equinox":
        raise
    raise ImportError(
        "jax_cudnn.adapters.equinox: the package equinox is not installed. Run: "
        "pip install equinox"
    ) from error
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn import keywords as _keywords
from jax_cudnn.config import Implementation, Options
from jax_cudnn.ops.attention.sdpa import sdpa
from jax_cudnn.ops.attention.visibility.masks import Mask
from jax_cudnn.ops.common.arguments import in_front
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.products.conv import conv
from jax_cudnn.ops.products.dot_general import dot_general

__all__ = ["Conv", "Linear", "MultiheadAttention", "to_cudnn"]

_Heads = tuple[jax.Array, jax.Array, jax.Array]


class Linear(eqx.nn.Linear):
    r"""`equinox.nn.Linear`, run by :func:`jax_cudnn.dot_general`, bias included.

    .. math::

        \mathrm{output} = W x + b

    Made by `to_cudnn`. Under :func:`jax.vmap`, all examples are one product.

    Attributes:
      implementation: as in :func:`jax_cudnn.dot_general`. Default "auto".

    Example:
      >>> import equinox as eqx, jax, jax.numpy as jnp
      >>> from jax_cudnn.adapters.equinox import to_cudnn
      >>> layer = to_cudnn(eqx.nn.Linear(3, 4, key=jax.random.key(0)))
      >>> jax.vmap(layer)(jnp.ones((5, 3))).shape
      (5, 4)
    """

    implementation: Implementation = eqx.field(static=True, default="auto")

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Return the product of one example.

        Args:
          x: (in_features,), or () if `in_features` is "scalar".
          key: ignored, as by Equinox.

        Returns:
          (out_features,), or () if `out_features` is "scalar".

        Raises:
          ValueError: `x` has another shape.
        """
        del key
        expected = () if self.in_features == "scalar" else (self.in_features,)
        if jnp.shape(x) != expected:
            raise ValueError(
                f"Linear: x has shape {jnp.shape(x)}, not {expected}. It is one "
                "example: use jax.vmap for several."
            )
        x, weight = _alike(jnp.ravel(x), self.weight)
        # Weights (out, in) are read as they lie, without a transposition.
        numbers = (((0,), (1,)), ((), ()))
        with on_behalf_of("Linear", "dot_general"):
            y = dot_general(
                x,
                weight,
                numbers,
                bias=self.bias,
                implementation=self.implementation,
            )
        return jnp.reshape(y, ()) if self.out_features == "scalar" else y


class Conv(eqx.nn.Conv):
    r"""`equinox.nn.Conv`, run by :func:`jax_cudnn.conv`, bias included.

    .. math::

        \mathrm{output} = x * w + b

    Made by `to_cudnn`. Under :func:`jax.vmap`, examples are the images of one
    convolution.

    Attributes:
      implementation: as in :func:`jax_cudnn.conv`. Default "auto".

    Example:
      >>> import equinox as eqx, jax, jax.numpy as jnp
      >>> from jax_cudnn.adapters.equinox import to_cudnn
      >>> layer = to_cudnn(
      ...     eqx.nn.Conv2d(3, 4, 3, padding="SAME", key=jax.random.key(0)))
      >>> jax.vmap(layer)(jnp.ones((5, 3, 8, 8))).shape
      (5, 4, 8, 8)
    """

    implementation: Implementation = eqx.field(static=True, default="auto")

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        r"""Return the convolution of one example.

        Args:
          x: (in_channels, \*spatial axes).
          key: ignored, as by Equinox.

        Returns:
          (out_channels, \*spatial axes).

        Raises:
          ValueError: `x` has another number of axes or of channels.
        """
        del key
        if x.ndim != self.num_spatial_dims + 1:
            raise ValueError(
                f"Conv: x has shape {x.shape}, and one example has "
                f"{self.num_spatial_dims + 1} axes: channels first, then "
                f"{self.num_spatial_dims} spatial ones. Use jax.vmap for several."
            )
        if x.shape[0] != self.in_channels:
            raise ValueError(
                f"Conv: x has shape {x.shape}, with {x.shape[0]} channels on axis 0, "
                f"and the layer takes {self.in_channels}. Equinox's images have "
                "channels first: for channels last, pass jnp.moveaxis(x, -1, 0)."
            )
        padding = self.padding
        if self.padding_mode != "ZEROS":
            x, padding = self._nonzero_pad(x), "VALID"
        x, weight = _alike(x, self.weight)
        with on_behalf_of("Conv", "conv"):
            y = conv(
                x[None],
                weight,
                self.stride,
                padding,
                rhs_dilation=self.dilation,
                feature_group_count=self.groups,
                bias=None if self.bias is None else jnp.ravel(self.bias),
                implementation=self.implementation,
            )
        return y[0]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    r"""`equinox.nn.MultiheadAttention`, run by :func:`jax_cudnn.sdpa`.

    .. math::

        \mathrm{output} = \sum_h \mathrm{softmax}\Big(\frac{(Q W^Q_h) (K W^K_h)^T}
            {\sqrt d}\Big) (V W^V_h) \, W^O_h

    Made by `to_cudnn`. Under :func:`jax.vmap`, examples are batch entries of one
    kernel, and no scores are stored.

    Attributes:
      implementation: as in :func:`jax_cudnn.sdpa`. Default "auto".

    Example:
      >>> import equinox as eqx, jax, jax.numpy as jnp
      >>> from jax_cudnn import masks
      >>> from jax_cudnn.adapters.equinox import to_cudnn
      >>> layer = to_cudnn(
      ...     eqx.nn.MultiheadAttention(2, 16, key=jax.random.key(0)))
      >>> attend = lambda x: layer(x, x, x, mask=masks.Causal())
      >>> jax.vmap(attend)(jnp.ones((3, 5, 16))).shape
      (3, 5, 16)
    """

    implementation: Implementation = eqx.field(static=True, default="auto")

    def __call__(  # type: ignore[override]  # mask takes more
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | Mask | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        process_heads: Callable[[jax.Array, jax.Array, jax.Array], _Heads]
        | None = None,
    ) -> jax.Array:
        """Return the attention of one example.

        Args:
          query: (s, query_size).
          key_: (t, key_size).
          value: (t, value_size).
          mask: bool (s, t) or (num_heads, s, t); True lets a query see a key. Or one of
            :mod:`jax_cudnn.masks`, such as `Causal()`, which takes no memory. Default
            None: every query sees every key.
          key: a random key for dropout of attention weights. Others are dropped than by
            Equinox with the same key. Default None, which is for no dropout.
          inference: whether dropout is off. Default None: as the layer's `dropout`
            says.
          process_heads: a function of the heads of query, key and value that returns
            others of the same shapes, such as a rotary embedding. Default None.

        Returns:
          (s, output_size). A query that sees no key gives the output projection of 0,
          where Equinox gives that of the mean of all values.

        Raises:
          ValueError: shapes that do not fit, dropout without a key.
          TypeError, UnsupportedError, LibraryError: as :func:`jax_cudnn.sdpa`.
        """
        heads = (
            self._project(self.query_proj, query),
            self._project(self.key_proj, key_),
            self._project(self.value_proj, value),
        )
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if shapes != (found := [x.shape for x in heads]):
                raise ValueError(
                    f"MultiheadAttention: process_heads returned shapes {found} for "
                    f"{shapes}. It must keep them."
                )
        off = self.dropout.inference if inference is None else inference
        rate = 0.0 if off else self.dropout.p
        if not isinstance(rate, int | float):
            raise TypeError(
                f"MultiheadAttention: dropout.p is {rate!r}. It must be an int or a "
                "float, which is part of the program. Set it by eqx.tree_at, or pass "
                "inference=True."
            )
        if rate and key is None:
            raise ValueError(
                f"MultiheadAttention: dropout of {rate} needs a random key. Pass key=, "
                "or inference=True."
            )
        sizes = (self.num_heads, query.shape[0], key_.shape[0])
        if not (mask is None or isinstance(mask, Mask)) and not _fits(mask, sizes):
            raise ValueError(
                f"MultiheadAttention: mask has shape {jnp.shape(mask)}. Its shape must "
                f"be {sizes[1:]}, queries by keys, or {sizes}, with one for each head. "
                "It is for one example: use jax.vmap for several."
            )
        with on_behalf_of("MultiheadAttention", "sdpa"):
            mixed = sdpa(
                *_alike(*heads),
                mask=mask,
                dropout_rate=rate,
                dropout_key=key if rate else None,
                implementation=self.implementation,
            )
        return jax.vmap(self.output_proj)(jnp.reshape(mixed, (mixed.shape[0], -1)))


_TURNED: dict[type, type] = {
    eqx.nn.Linear: Linear,
    eqx.nn.MultiheadAttention: MultiheadAttention,
    **dict.fromkeys((eqx.nn.Conv, eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d), Conv),
    # Layers of this module get another implementation.
    **{own: own for own in (Linear, MultiheadAttention, Conv)},
}


def to_cudnn(model: Any, *, implementation: Implementation = "auto") -> Any:
    """Return an Equinox model whose layers compute with jax_cudnn.

    `MultiheadAttention`, `Conv`, `Conv1d`, `Conv2d`, `Conv3d` and `Linear` of
    `equinox.nn` are replaced by this module's classes, wherever they are in the model.
    Their arrays are the same ones in the same order, so that saved leaves load before
    and after. Subclasses are not converted, since they may compute something else.

    Args:
      model: any pytree.
      implementation: as in :func:`jax_cudnn.sdpa`, for all of these layers. Default
        "auto".

    Returns:
      The new model, a pytree of the same leaves. `model` is not changed.

    Raises:
      ValueError: the model has none of these layers; an unknown `implementation`.

    Example:
      >>> import equinox as eqx, jax, jax.numpy as jnp
      >>> from jax_cudnn.adapters.equinox import to_cudnn
      >>> mlp = to_cudnn(eqx.nn.MLP(3, 2, 16, 2, key=jax.random.key(0)))
      >>> jax.vmap(mlp)(jnp.ones((5, 3))).shape
      (5, 2)
    """
    Options(implementation=implementation)  # refuses unknown names
    count = 0

    def turned(x: Any) -> Any:
        nonlocal count
        if (new_type := _TURNED.get(type(x))) is None:
            return x
        count += 1
        new = object.__new__(new_type)  # as Equinox rebuilds modules from their leaves
        for field in dataclasses.fields(x):
            object.__setattr__(new, field.name, turned(getattr(x, field.name)))
        object.__setattr__(new, "implementation", implementation)
        return new

    found = jax.tree.map(turned, model, is_leaf=lambda x: type(x) in _TURNED)
    if not count:
        raise ValueError(
            f"to_cudnn: model, a {type(model).__name__}, has no layer of equinox.nn "
            "that jax_cudnn computes: MultiheadAttention, Conv, Conv1d, Conv2d, Conv3d "
            "or Linear. Subclasses of them are left as they are: call jax_cudnn's "
            "functions there."
        )
    return found


def _fits(mask: ArrayLike, sizes: tuple[int, ...]) -> bool:
    """Whether a mask broadcasts to (heads, queries, keys)."""
    shape, full = in_front(jnp.shape(mask), 4), (1, *sizes)
    return len(shape) == 4 and all(
        dim in (1, size) for dim, size in zip(shape, full, strict=True)
    )


def _alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return arrays in the dtype to which JAX promotes them together."""
    dtype = jnp.result_type(*arrays)
    return tuple(x.astype(dtype) for x in arrays)


_keywords.hint_on(globals(), __all__)
