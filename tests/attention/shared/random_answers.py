# SPDX-License-Identifier: Apache-2.0
"""The maths of the answers of random_attentions.py, by torch on a GPU or by NumPy."""

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tests.attention.shared.random_attentions import Arrays, Problem


class Maths:
    """The functions that the answer needs, of torch on a GPU or of NumPy."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.of: Any = np if torch is None else torch

    def double(self, x: np.ndarray) -> Any:
        wide = np.array(x, np.float64)
        return wide if self.torch is None else self.torch.as_tensor(wide).cuda()

    def bools(self, x: np.ndarray) -> Any:
        return x if self.torch is None else self.torch.as_tensor(np.array(x)).cuda()

    def numpy(self, x: Any) -> np.ndarray:
        return x if self.torch is None else x.cpu().numpy()


def torch_on_gpu() -> Any:
    """Return torch if it is installed and sees a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        return None
    return torch if torch.cuda.is_available() else None


def of_rows(maths: Maths, p: "Problem", x: np.ndarray) -> Any:
    """Return numbers of rows (b, s, h) as (b, k, g, s, 1)."""
    rows = maths.double(x).reshape(p.b, p.s, p.k, p.h // p.k)
    return maths.of.einsum("bskg->bkgs", rows)[..., None]


class Forward(NamedTuple):
    """What gradients read: the operands by head and the probabilities."""

    scale: float
    u: float
    q: Any
    k: Any
    v: Any
    grad: Any
    probabilities: Any
    off: Any
    least_step: Any
    output: Any
    passed: Any
    slope_of_cap: Any


def gradients_of(
    p: "Problem", maths: Maths, arrays: "Arrays", forward: Forward
) -> dict[str, tuple[Any, Any]]:
    m = maths.of
    scale, u, q, k, v, grad, probabilities, off, least_step, output, passed, cap = (
        forward
    )
    products = passed * m.einsum("bkgse,bkte->bkgst", grad, v)
    size = passed * m.einsum("bkgse,bkte->bkgst", abs(grad), abs(v))
    delta = m.sum(output * grad, -1)[..., None]
    blur = m.sum(abs(output * grad), -1)[..., None]
    if p.with_lse:
        rows = of_rows(maths, p, arrays["grad_lse"])
        delta = delta - rows
        blur = blur + abs(rows)
    gap = products - delta
    slope = probabilities * gap
    # Rounded output, rounded slope, probabilities off by what scores lose.
    loose = probabilities * (2 * u * blur + 2.0**-20 * size) + abs(slope) * off
    loose = loose + least_step
    of_scores, of_loose = slope, loose
    if cap is not None:
        of_scores = slope * cap
        of_loose = loose * cap + 2.0**-9 * abs(slope) + least_step
    given = probabilities * passed
    loose_given = (probabilities * off + least_step) * passed
    factor = abs(scale)

    def summed(formula: str, x: Any, y: Any, by: float = 1.0) -> Any:
        return by * m.einsum(formula, x, y)

    dq = summed("bkgst,bktd->bkgsd", of_scores, k, scale)
    dk = summed("bkgst,bkgsd->bktd", of_scores, q, scale)
    dv = summed("bkgst,bkgse->bkte", given, grad)
    # Each query head's share may be rounded before the group's sum.
    share_k = abs(summed("bkgst,bkgsd->bkgtd", of_scores, q, factor)).sum(2)
    share_v = abs(summed("bkgst,bkgse->bkgte", given, grad)).sum(2)
    found = {
        "query": (
            dq,
            2 * summed("bkgst,bktd->bkgsd", of_loose, abs(k), factor) + 2 * u * abs(dq),
        ),
        "key": (
            dk,
            2 * summed("bkgst,bkgsd->bktd", of_loose, abs(q), factor) + 2 * u * share_k,
        ),
        "value": (
            dv,
            2 * summed("bkgst,bkgse->bkte", loose_given, abs(grad)) + 2 * u * share_v,
        ),
    }
    if p.bias is not None:
        shape = (p.b, p.h, p.s, p.t)
        whole, of_whole = slope.reshape(shape), loose.reshape(shape)
        for axis, letter in enumerate("bhst"):
            if letter not in p.bias:
                whole = m.sum(whole, axis)
                whole = whole.reshape(*whole.shape[:axis], 1, *whole.shape[axis:])
                of_whole = m.sum(of_whole, axis)
                of_whole = of_whole.reshape(whole.shape)
        found["bias"] = (whole, 2 * of_whole + 2 * u * abs(whole))
    return found


def stored(maths: Maths, p: "Problem", name: str, x: Any) -> np.ndarray:
    if name in ("output", "query"):
        x = maths.of.einsum("bkgsn->bskgn", x)
        return maths.numpy(x.reshape(p.b, p.s, p.h, -1))
    if name in ("lse", "max"):
        x = maths.of.einsum("bkgsx->bskgx", x)
        return maths.numpy(x.reshape(p.b, p.s, p.h))
    if name in ("key", "value"):
        return maths.numpy(maths.of.einsum("bktn->btkn", x))
    return maths.numpy(x)
