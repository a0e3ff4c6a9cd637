# SPDX-License-Identifier: Apache-2.0
"""What MaxText's hooks are given computes what MaxText's own attention does.

MaxText is not installed here: `AttentionOp` and `DenseGeneral` have the attributes and
call the hooks as those of MaxText 0.2.5 do.
"""

import enum
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_cudnn
from jax_cudnn import f8
from jax_cudnn.adapters import maxtext
from tests.adapters.formulas import attention, table
from tests.common import drawn

pytestmark = pytest.mark.once

_B, _S, _H, _K, _D = 2, 16, 4, 2, 8


class AttentionType(enum.Enum):
    """As in MaxText's common_types.py."""

    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    CHUNK = "chunk"
    MLA = "mla"
    FULL = "full"
    BLOCK_DIFFUSION = "block_diffusion"


class AttentionOp:
    """What the hook reads of MaxText's `AttentionOp`, and how it is called."""

    def __init__(self, kind: AttentionType = AttentionType.GLOBAL, **more: Any) -> None:
        config = {
            "packing": True,
            "max_segments_per_seq": 3,
            "context_sharding": "context",
            "moba": False,
        }
        self.config = SimpleNamespace(**{x: more.pop(x, y) for x, y in config.items()})
        self.mesh = SimpleNamespace(shape={"data": 4, "context": 1})
        self.attention_type = kind
        self.sliding_window_size: int | None = None
        self.chunk_attn_window_size: int | None = None
        self.attn_logits_soft_cap: float | None = None
        self.dropout_rate = 0.0
        self.rngs: nnx.Rngs | None = None
        vars(self).update(more)

    def cudnn_flash_attention(self, *operands: Any, sinks: Any = None) -> Any:
        """Run TransformerEngine."""
        raise AssertionError

    def __call__(
        self, query: Any, key: Any, value: Any, ids: Any = None, **more: Any
    ) -> Any:
        """Call the kernel as `apply_attention` does."""
        mode = more.pop("model_mode", "train")
        return self.cudnn_flash_attention(query, key, value, ids, None, mode, **more)


_OPERANDS = [
    drawn.normal(i, (_B, _S, heads, _D), size=0.5)
    for i, heads in enumerate((_H, _K, _K))
]
_IDS = np.array([[1] * 6 + [2] * 7 + [0] * 3, [1] * 9 + [2] * 4 + [3] * 3])
_SINKS = np.arange(4, dtype=np.float32) - 1
_KINDS: dict[str, tuple[AttentionOp, Any, dict[str, Any]]] = {
    "global": (AttentionOp(), lambda i, j: j <= i, {}),
    "a mask": (AttentionOp(max_segments_per_seq=-1), lambda i, j: j <= i, {}),
    "mla": (AttentionOp(AttentionType.MLA), lambda i, j: j <= i, {}),
    "local": (
        AttentionOp(AttentionType.LOCAL_SLIDING, sliding_window_size=3),
        lambda i, j: i - 3 < j <= i,
        {},
    ),
    "chunk": (
        AttentionOp(AttentionType.CHUNK, chunk_attn_window_size=5),
        lambda i, j: j <= i and i // 5 == j // 5,
        {},
    ),
    "full": (AttentionOp(AttentionType.FULL), lambda i, j: True, {}),
    "cap": (
        AttentionOp(attn_logits_soft_cap=2.0),
        lambda i, j: j <= i,
        {"on_scores": lambda scores: 2.0 * np.tanh(scores / 2.0)},
    ),
    "sinks": (
        AttentionOp(),
        lambda i, j: j <= i,
        {"more": np.exp(_SINKS)[:, None, None]},
    ),
}


def test_attention_is_that_of_dot_product() -> None:
    maxtext.to_cudnn(AttentionOp)

    @jax.jit
    def run(q: Any, k: Any, v: Any, ids: Any) -> dict[str, Any]:
        return {
            name: op(q, k, v, ids, sinks=_SINKS if name == "sinks" else None)
            for name, (op, _, _) in _KINDS.items()
        }

    found = run(*_OPERANDS, jnp.asarray(_IDS))
    own = (_IDS[:, :, None] == _IDS[:, None]) & (_IDS[:, :, None] > 0)
    for name, (_, seen, more) in _KINDS.items():
        expected = attention(
            *_OPERANDS, seen=(own & table(seen, _S, _S))[:, None], scale=1.0, **more
        )
        np.testing.assert_allclose(
            found[name], expected, rtol=2e-5, atol=2e-6, err_msg=name
        )


def test_rows_without_packing_are_one_document_with_padding() -> None:
    maxtext.to_cudnn(AttentionOp)
    ids = (np.arange(_S) < np.array([[11], [16]])).astype(int)
    found = AttentionOp(packing=False)(*_OPERANDS, jnp.asarray(ids))
    seen = table(lambda i, j: j <= i, _S, _S) & (ids[:, :, None] * ids[:, None] > 0)
    expected = attention(*_OPERANDS, seen=seen[:, None], scale=1.0)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(
        AttentionOp()(*_OPERANDS)[1], found[1], rtol=2e-5, atol=2e-6
    )
    report = jax_cudnn.plans.inspect(lambda *x: AttentionOp()(*x), *_OPERANDS)
    assert report.calls[0].part.nodes[0].attributes.is_causal


def test_dropout_is_drawn_while_training() -> None:
    maxtext.to_cudnn(AttentionOp)
    op = AttentionOp(AttentionType.FULL, dropout_rate=0.25, rngs=nnx.Rngs(dropout=0))
    q, k, _ = _OPERANDS
    # Values that are a unit matrix return the weights.
    v = jnp.broadcast_to(jnp.eye(_S)[:, None], (_B, _S, _K, _S))
    draws = [np.asarray(op(q, k, v)) for _ in range(2)]
    kept = np.asarray(op(q, k, v, model_mode="prefill"))
    assert np.all(kept > 0)
    for draw in draws:
        np.testing.assert_allclose(draw[draw != 0], kept[draw != 0] / 0.75, rtol=1e-4)
        assert abs((draw == 0).mean() - 0.25) < 0.05
    assert np.any((draws[0] != 0) != (draws[1] != 0))
    with pytest.raises(ValueError, match=r"dropout_rate is 0.25, and rngs has no"):
        AttentionOp(dropout_rate=0.25)(q, k, v)


def test_what_is_not_computed_is_refused() -> None:
    maxtext.to_cudnn(AttentionOp)
    with pytest.raises(ValueError, match='type "block_diffusion" is not computed'):
        AttentionOp(AttentionType.BLOCK_DIFFUSION)(*_OPERANDS)
    with pytest.raises(ValueError, match="moba=true"):
        AttentionOp(moba=True)(*_OPERANDS)
    divided = AttentionOp()
    divided.mesh.shape["context"] = 8
    with pytest.raises(ValueError, match="divided over 8 devices, by axis"):
        divided(*_OPERANDS)
    with pytest.raises(ValueError, match="AttentionOp: "):
        AttentionOp()(_OPERANDS[0], _OPERANDS[1], _OPERANDS[2][:, 1:])
    with pytest.raises(TypeError, match="attention_op is 3, not a class"):
        maxtext.to_cudnn(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="with a method cudnn_flash_attention"):
        maxtext.to_cudnn(object)
    with pytest.raises(ValueError, match="implementation"):
        maxtext.to_cudnn(AttentionOp, implementation="fast")  # type: ignore[arg-type]


class DenseGeneral(linen.Module):
    """How MaxText's dense layer asks a quantisation for its product."""

    quant: Any

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """Return x times the kernel."""
        kernel = self.param("kernel", linen.initializers.lecun_normal(), (64, 32))
        product = self.quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
        return product(x, kernel, (((1,), (0,)), ((), ())), precision=None)


def test_quantised_layers_are_those_in_f8() -> None:
    x = drawn.normal(1, (48, 64))
    for recipe in (f8.Delayed(history=4), f8.Current()):
        layer = DenseGeneral(maxtext.F8Quantization(recipe))
        variables = jax.jit(layer.init)(jax.random.key(2), x)
        has_state = isinstance(recipe, f8.Delayed)
        assert ("_overwrite_with_gradient" in variables) == has_state

        def loss(variables: Any, layer: Any = layer) -> Any:
            return jnp.mean(layer.apply(variables, x) ** 2)

        gradient = jax.jit(jax.grad(loss))(variables)
        if has_state:  # as MaxText's training step carries it on
            variables |= {
                "_overwrite_with_gradient": gradient["_overwrite_with_gradient"]
            }
        found = jax.jit(layer.apply)(variables, x)
        expected = x @ variables["params"]["kernel"]
        error = np.abs(found - expected).mean() / np.abs(expected).mean()
        assert 0.005 < error < 0.06  # e4m3 has three bits after the first
    quantisation = maxtext.F8Quantization()
    assert quantisation == maxtext.F8Quantization()
    assert hash(quantisation) == hash(maxtext.F8Quantization())
    assert (quantisation.quant_mode, quantisation.needs_apply_rngs) == ("train", False)
    with pytest.raises(jax_cudnn.UnsupportedError, match="mixtures of experts"):
        quantisation.einsum(mesh_axes=())
    with pytest.raises(TypeError, match="F8Quantization"):
        maxtext.F8Quantization("delayed")  # type: ignore[arg-type]
