# SPDX-License-Identifier: Apache-2.0
"""The layers of PyTorch that the models are written over, and a model's steps.

At its best: channels last in memory, bf16 copies of f32 weights, a fused AdamW.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.harness.torch_side import synchronize, torch
from benchmarks.models.zoo import Composed, Kind, Model, Weights

F: Any = None if torch is None else torch.nn.functional


def _activated(x: Any, activation: Any) -> Any:
    if activation is None:
        return x
    if activation == "gelu":
        return F.gelu(x, approximate="tanh")
    return {"relu": F.relu, "silu": F.silu}[activation](x)


class TorchKit(Composed):
    """Layers as a user of PyTorch writes them: `PlainKit` says what each returns.

    Images are views with the channels second, which are last in memory. They stay so
    from one convolution to the next: torch.compile is misled by views in between.
    """

    name = "torch"

    def __init__(self) -> None:
        """Find the device."""
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    def stored(self, x: np.ndarray, kind: Kind) -> Any:
        tensor = torch.tensor(x, device=self._device)
        if kind == "product":
            return tensor.T.contiguous()
        if kind == "filter":
            tensor = tensor.permute(-1, -2, *range(tensor.ndim - 2)).contiguous()
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            return tensor.contiguous(memory_format=formats[tensor.ndim])
        return tensor

    def weight(self, x: Any) -> Any:
        return x.to(torch.bfloat16)

    def operand(self, x: np.ndarray) -> Any:
        tensor = torch.tensor(x, device=self._device)
        return (
            tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor.long()
        )

    def constant(self, x: np.ndarray) -> Any:
        """Return an array that the model has."""
        return torch.as_tensor(x, device=self._device).to(torch.bfloat16)

    def embed(self, table: Any, tokens: Any) -> Any:
        return F.embedding(tokens, table)

    def logits(self, x: Any, table: Any) -> Any:
        return F.linear(x, table)

    def split(self, x: Any, count: int) -> Sequence[Any]:
        return x.chunk(count, -1)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        return torch.cat(list(parts), -1)

    def relu(self, x: Any) -> Any:
        return F.relu(x)

    def images(self, x: Any) -> Any:
        return x.permute(0, x.ndim - 1, *range(1, x.ndim - 1))

    def pixels(self, x: Any) -> Any:
        return x.permute(0, *range(2, x.ndim), 1)

    def channels(self, x: Any) -> int:
        return x.shape[1]

    def joined(self, parts: Sequence[Any]) -> Any:
        return torch.cat(list(parts), 1)

    def doubled(self, x: Any) -> Any:
        return F.interpolate(x, scale_factor=2, mode="nearest")

    def dense(
        self,
        x: Any,
        w: Any,
        b: Any = None,
        activation: Any = None,
        residual: Any = None,
    ) -> Any:
        y = _activated(F.linear(x, w, b), activation)
        return y if residual is None else y + residual

    def gated(self, x: Any, gate: Any, up: Any) -> Any:
        """Return silu(x gate) * (x up)."""
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    def attention(self, q: Any, k: Any, v: Any, *, is_causal: bool) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=grouped
        )
        return y.transpose(1, 2)

    def written(self, cache: Any, x: Any) -> Any:
        """Return a cache with its last token replaced, in place."""
        cache[:, -1:] = x
        return cache

    def attend_lengths(self, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        """Return attention of a token over caches, which are full."""
        del lengths
        return self.attention(q, k, v, is_causal=False)

    def layer_norm(self, x: Any, scale: Any, bias: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], scale, bias, 1e-6)

    def rms_norm(self, x: Any, scale: Any) -> Any:
        return F.rms_norm(x, x.shape[-1:], scale, 1e-6)

    def batch_norm(self, x: Any, scale: Any, bias: Any, activation: Any) -> Any:
        y = F.batch_norm(x, None, None, scale, bias, training=True)
        return _activated(y, activation)

    def conv(
        self,
        x: Any,
        w: Any,
        b: Any = None,
        step: int = 1,
        *,
        groups: int = 1,
        activation: Any = None,
    ) -> Any:
        convolve = F.conv2d if x.ndim == 4 else F.conv3d
        pad = [(k - 1) // 2 if k % 2 else 0 for k in w.shape[2:]]
        return _activated(convolve(x, w, b, step, pad, 1, groups), activation)

    def max_pool(self, x: Any) -> Any:
        return F.max_pool2d(x, 3, 2, 1)

    def cross_entropy(self, logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())

    def mean_square(self, x: Any, y: Any) -> Any:
        return F.mse_loss(x.float(), y.float())


class TorchSteps:
    """A model's steps in PyTorch, of training or of inference."""

    def __init__(
        self,
        model: Model,
        weights: Sequence[np.ndarray],
        kinds: Sequence[Kind],
        batch: dict[str, np.ndarray],
        *,
        rate: float,
        is_training: bool,
        is_compiled: bool,
    ) -> None:
        """Move everything to the device, and run the first step."""
        kit = TorchKit()
        arrays = [kit.stored(x, kind) for x, kind in zip(weights, kinds, strict=True)]
        given = {name: kit.operand(x) for name, x in batch.items()}
        if not is_training:
            arrays = [x.to(torch.bfloat16) for x in arrays]

        def output() -> Any:
            result = model.output(kit, Weights(kit, arrays), given)
            return result[0] if model.carried else result

        def loss() -> Any:
            assert model.loss is not None
            return model.loss(kit, output(), given)

        function = loss if is_training else output
        self._run = torch.compile(function) if is_compiled else function
        self._optimizer = None
        if is_training:
            for x in arrays:
                x.requires_grad_(True)
            self._optimizer = torch.optim.AdamW(
                arrays, rate, weight_decay=1e-4, fused=torch.cuda.is_available()
            )
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self.first = self.step()
        synchronize()
        self.compile_s = time.perf_counter() - start
        self.tuning_s = 0.0

    @property
    def bytes(self) -> int:
        """The most memory that PyTorch had in use."""
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0

    def step(self) -> Any:
        """Run a step; return the loss, or the output."""
        if self._optimizer is None:
            with torch.no_grad():
                return self._run()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._run()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    @staticmethod
    def number(loss: Any) -> float:
        """Return a loss as a number."""
        return float(loss)

    @staticmethod
    def array(output: Any) -> np.ndarray:
        """Return an output as NumPy's."""
        return output.float().cpu().numpy()

    @staticmethod
    def wait(result: Any) -> None:
        """Wait for the device."""
        del result
        synchronize()


def is_there() -> bool:
    """Whether PyTorch is installed and runs where JAX does."""
    if torch is None:
        return False
    return torch.cuda.is_available() == (jax.default_backend() == "gpu")
