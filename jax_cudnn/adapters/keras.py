# SPDX-License-Identifier: Apache-2.0
"""`to_cudnn` has the layers of a Keras model compute with jax_cudnn."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

try:
    import keras
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ImportError(
        "jax_cudnn.adapters.keras: the package keras is not installed. Run: "
        'pip install "keras>=3"'
    ) from error
import jax
import jax.numpy as jnp

from jax_cudnn import keywords as _keywords
from jax_cudnn.config import Implementation, Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.ops.attention.sdpa import sdpa
from jax_cudnn.ops.common.arguments import options
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.products.conv import conv
from jax_cudnn.ops.products.matmul import matmul

__all__ = ["LayerReport", "Report", "to_cudnn"]

_log = logging.getLogger("jax_cudnn")

_Method = Callable[..., Any]
_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What became of a layer.

    Attributes:
      path: the layer's path in the model, as Keras names it; its name before it is
        built.
      kind: the name of the layer's class.
      is_turned: whether jax_cudnn computes it.
      reason: why it does not, or "".
    """

    path: str
    kind: str
    is_turned: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a model's layers; as text, a line for each.

    Attributes:
      layers: a `LayerReport` for each attention, convolution and dense layer, in the
        order of the model.
    """

    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        if not self.layers:
            return "no attention, convolution or dense layer"
        width = max(len(each.path) for each in self.layers)
        kinds = max(len(each.kind) for each in self.layers)
        return "\n".join(
            f"{each.path:{width}}  {each.kind:{kinds}}  "
            f"{'jax_cudnn' if each.is_turned else f'unchanged: {each.reason}'}"
            for each in self.layers
        )


class _Replacement(NamedTuple):
    """The method of a layer that is replaced, its class, and what replaces it."""

    method: str
    owner: type
    made: Callable[[Any, Implementation], _Method]


def to_cudnn(model: keras.Layer, *, implementation: Implementation = "auto") -> Report:
    """Have a Keras model's layers compute with jax_cudnn, in place.

    - `MultiHeadAttention` and `GroupQueryAttention` run :func:`jax_cudnn.sdpa` between
      Keras's own projections;
    - `Conv1D`, `Conv2D` and `Conv3D` run :func:`jax_cudnn.conv`, with bias and
      activation in the kernel;
    - `Dense` runs :func:`jax_cudnn.matmul`, likewise.

    Weights, configurations and saved files stay Keras's own: a model that is saved
    loads without jax_cudnn, and `to_cudnn` turns it again. Functions that the model
    has compiled for training and prediction are compiled anew.

    A layer of a subclass is turned too, unless the subclass replaces the method that
    computes. Attention of more than one axis, attention that returns its weights,
    and operands of different dtypes, of integers or sparse ones are computed by Keras;
    the logger "jax_cudnn" says so at INFO. Layers that are quantised run Keras's
    quantised code.

    Args:
      model: a model or a layer, built or not.
      implementation: as in :func:`jax_cudnn.sdpa`. Default "auto". With "cudnn", a call
        that Keras would have to compute raises.

    Returns:
      A :class:`Report`, to be printed.

    Raises:
      TypeError: no Keras layer.
      RuntimeError: Keras has another backend than JAX.
      ValueError: an unknown `implementation`.
      UnsupportedError: in calls of the layers, `implementation="cudnn"` and cuDNN
        cannot run them.

    Notes:
      A query that sees no key gives 0 here, where Keras gives the mean of all values.
      Dropout of attention weights drops others than Keras does with the same seed.
      `GroupQueryAttention` repeats keys and values for its query heads, as without
      jax_cudnn. A model that contains `model` and was compiled by an earlier call keeps
      what it compiled: turn the outermost model.

    Example:
      >>> import keras  # with the environment variable KERAS_BACKEND=jax
      >>> from jax_cudnn.adapters.keras import to_cudnn
      >>> model = keras.Sequential([
      ...     keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, activation="relu"),
      ...     keras.layers.Flatten(), keras.layers.Dense(2)])
      >>> len(to_cudnn(model).layers)
      2
    """
    if not isinstance(model, keras.Layer):
        raise TypeError(
            f"to_cudnn: model is {type(model).__name__}, not a Keras layer. Pass a "
            "keras.Model or a keras.Layer."
        )
    if (backend := keras.backend.backend()) != "jax":
        raise RuntimeError(
            f'to_cudnn: Keras runs with the backend "{backend}". jax_cudnn computes '
            'with JAX. Set the environment variable KERAS_BACKEND to "jax" before '
            "keras is imported."
        )
    Options(implementation=implementation)  # refuses unknown names
    found: list[LayerReport] = []
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            for name in ("train_function", "test_function", "predict_function"):
                setattr(layer, name, None)
        elif (turn := _replacement_of(layer)) is not None:
            reason = _turned(layer, turn, implementation)
            found.append(
                LayerReport(
                    layer.path or layer.name, type(layer).__name__, not reason, reason
                )
            )
    return Report(tuple(found))


def _replacement_of(layer: keras.Layer) -> _Replacement | None:
    """Return what is replaced of a layer, or None for other kinds of layers."""
    for kind in _ATTENTION:
        if isinstance(layer, kind):
            return _Replacement("_compute_attention", kind, _attention)
    for kind in _CONVOLUTIONS:
        if isinstance(layer, kind):
            return _Replacement("call", kind, _convolution)
    if isinstance(layer, keras.layers.Dense):
        return _Replacement("call", keras.layers.Dense, _dense)
    return None


def _turned(layer: Any, turn: _Replacement, implementation: Implementation) -> str:
    """Replace a layer's method; return why it stays as it is, or ""."""
    for name in (turn.method, "convolution_op"):
        own = getattr(type(layer), name, None)
        if own is not getattr(turn.owner, name, None):
            return f"{type(layer).__name__} has a {name} of its own"
    if getattr(layer, "quantization_mode", None) is not None:
        return f"it is quantised, to {layer.quantization_mode}"
    setattr(layer, turn.method, turn.made(layer, implementation))
    return ""


# --- attention ------------------------------------------------------------------------


def _attention(layer: Any, implementation: Implementation) -> _Method:
    """Return `_compute_attention` of a layer."""
    keras_own = functools.partial(type(layer)._compute_attention, layer)

    def compute_attention(
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Any, Any]:
        wants_scores = return_attention_scores or getattr(
            layer, "_return_attention_scores", False
        )
        if reason := _why_not(query, key, value, wants_scores):
            _delegate("attention", layer, reason, implementation)
            # Each class takes some of these, and gives defaults to what is not passed.
            asked = {
                "return_attention_scores": return_attention_scores,
                "use_causal_mask": use_causal_mask,
            }
            more = {name: x for name, x in asked.items() if x}
            return keras_own(query, key, value, attention_mask, training, **more)
        rate = float(layer.dropout) if training else 0.0
        with on_behalf_of(layer.path, "sdpa"):
            output = sdpa(
                query,
                key,
                value,
                mask=_scores_like(attention_mask),
                is_causal=use_causal_mask,
                dropout_rate=rate,
                dropout_key=_drawn_key(layer._dropout_layer) if rate else None,
                implementation=implementation,
            )
        return output, None

    return compute_attention


def _why_not(query: Any, key: Any, value: Any, wants_scores: bool) -> str:
    if wants_scores:
        return "the attention weights are asked for"
    if query.ndim != 4:
        return f"attention is over more than one axis: query is {query.shape}"
    return _unlike(query, key, value)


def _scores_like(mask: Any) -> jax.Array | None:
    """Return a mask (b, s, t) or (b, h, s, t) as booleans (b, h, s, t)."""
    if mask is None:
        return None
    mask = jnp.asarray(mask, bool)
    return jnp.expand_dims(mask, -3) if mask.ndim == 3 else mask


def _drawn_key(dropout: Any) -> jax.Array:
    """Return the next random key of a Dropout layer."""
    return jax.random.wrap_key_data(
        jnp.asarray(dropout.seed_generator.next()), impl="threefry2x32"
    )


# --- products -------------------------------------------------------------------------


def _dense(layer: Any, implementation: Implementation) -> _Method:
    """Return `call` of a dense layer."""
    keras_own = functools.partial(type(layer).call, layer)

    def call(inputs: Any, training: bool | None = None) -> Any:
        inputs, kernel, bias = map(_array, (inputs, layer.kernel, layer.bias))
        if reason := _unlike(inputs, kernel):
            _delegate("a dense layer", layer, reason, implementation)
            return keras_own(inputs, training=training)
        fused, rest = _activations(layer)
        with on_behalf_of(layer.path, "matmul"):
            y = matmul(
                inputs,
                kernel,
                bias=bias,
                activation=fused,
                implementation=implementation,
            )
        return y if rest is None else rest(y)

    return call


def _convolution(layer: Any, implementation: Implementation) -> _Method:
    """Return `call` of a convolution."""
    keras_own = functools.partial(type(layer).call, layer)

    def call(inputs: Any) -> Any:
        inputs, kernel = map(_array, (inputs, layer.kernel))
        if reason := _unlike(inputs, kernel):
            _delegate("a convolution", layer, reason, implementation)
            return keras_own(inputs)
        padding = layer.padding.upper()
        if padding == "CAUSAL":
            inputs = jnp.pad(inputs, layer._compute_causal_padding())
            padding = "VALID"
        axes = _SPATIAL[layer.rank]
        images = f"N{axes}C" if layer.data_format == "channels_last" else f"NC{axes}"
        fused, rest = _activations(layer)
        with on_behalf_of(layer.path, "conv"):
            y = conv(
                inputs,
                kernel,
                layer.strides,
                padding,
                rhs_dilation=layer.dilation_rate,
                dimension_numbers=(images, f"{axes}IO", images),
                feature_group_count=layer.groups,
                bias=_array(layer.bias) if layer.use_bias else None,
                activation=fused,
                implementation=implementation,
            )
        return y if rest is None else rest(y)

    return call


_Activation = Callable[[jax.Array], jax.Array]


def _activations(layer: Any) -> tuple[_Activation | None, _Activation | None]:
    """Return what a kernel may compute of an activation, and what follows it.

    One that changes the shape, such as "glu", follows.
    """
    own = layer.activation
    if own is keras.activations.linear:
        return None, None
    if isinstance(own, keras.layers.Layer):
        return own, None  # It is built by the first array that it gets.
    return (own, None) if _keeps_shape(own) else (None, own)


@functools.lru_cache
def _keeps_shape(function: _Activation) -> bool:
    """Whether a function gives arrays of its argument's shape; asked once of each."""
    probe = jax.ShapeDtypeStruct((2, 4, 4, 4, 4), jnp.float32)
    try:
        return jax.eval_shape(function, probe).shape == probe.shape
    except (TypeError, ValueError):  # It may be for other ranks alone.
        return False


# --- both -----------------------------------------------------------------------------


def _array(x: Any) -> Any:
    """Return JAX's array; of a variable, in the dtype in which the layer computes."""
    return None if x is None else keras.ops.convert_to_tensor(x)


def _unlike(*operands: Any) -> str:
    """Return why jax_cudnn does not take these operands together, or ""."""
    if not all(isinstance(x, jax.Array) for x in operands):
        kinds = ", ".join(type(x).__name__ for x in operands)
        return f"the operands are {kinds}, not all arrays"
    dtypes = [str(x.dtype) for x in operands]
    if len({*dtypes}) > 1 or not jnp.issubdtype(operands[0].dtype, jnp.floating):
        return f"the operands are {', '.join(dtypes)}, not floats of one dtype"
    return ""


def _delegate(
    what: str, layer: Any, reason: str, implementation: Implementation
) -> None:
    """Say that Keras computes a layer, or raise where cuDNN was asked for."""
    if options("to_cudnn", implementation, None).implementation == "cudnn":
        raise UnsupportedError(
            f"{layer.path}: jax_cudnn cannot compute {what}:",
            (reason,),
            'Pass implementation="auto" to to_cudnn to let Keras compute it.',
        )
    _log.info("%s: Keras computes %s: %s", layer.path, what, reason)


_keywords.hint_on(globals(), __all__)
