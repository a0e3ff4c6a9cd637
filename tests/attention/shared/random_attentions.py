# SPDX-License-Identifier: Apache-2.0
"""Draws problems of attention, with float64 answers and bounds of a kernel's error.

A problem is drawn from a seed, so that another process can draw it again. The answer is
written from the formulas in the docstring of `jax_cudnn.sdpa`, on whole arrays: in
torch on a GPU where it is installed, else in NumPy. It shares nothing with the package
but which weights dropout keeps; tests/attention/test_sdpa_dropout.py compares that with
NumPy.

The bound is an analysis of what a flash kernel rounds: probabilities, the gradient of
the scores, the output that the gradient reads, and each result, all to the operands'
dtype. Everything else is done in float32. Each entry of each result has its own bound.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_cudnn
from jax_cudnn import masks, score_mods
from jax_cudnn.reference.attention.dropout import kept, numbered
from tests.attention.shared.random_answers import (
    Forward,
    Maths,
    gradients_of,
    of_rows,
    stored,
    torch_on_gpu,
)
from tests.common.judged import Judged

Arrays = dict[str, Any]
_SIDES = ("query", "key")

# What padding holds. It is finite: a kernel multiplies it by probabilities of 0.
_POISON = 1e4


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call of attention; axis letters as in `jax_cudnn.sdpa`.

    Attributes:
      band: "", "causal", "bottom-right" or "window".
      window: how many keys before and after its own position a query sees.
      bias: which axes of the bias (b, h, s, t) are not 1, such as "hst"; None for none.
      mask: likewise.
      form: another mask, "prefix", "segments" or "blocks"; "" for none.
      with_lengths: whether queries and keys have lengths; some of these are 0.
      packed: how many sequences a row holds, with gaps between them; 0 for rows of one.
      softcap: scores become softcap * tanh(score / softcap) before the bias.
      dropout: the share of the probabilities that is dropped, a multiple of 2^-16.
      with_lse: whether the log-sum-exp is a result, with a cotangent.
      with_max: whether the maximum of the logits is a result. It has no cotangent here:
        which of nearly equal logits is the largest depends on rounding.
    """

    seed: int
    dtype: str
    b: int
    s: int
    t: int
    h: int
    k: int
    d: int
    e: int
    scale: float | None
    band: str
    window: tuple[int, int]
    bias: str | None
    bias_dtype: str
    mask: str | None
    form: str
    with_lengths: bool
    with_sinks: bool
    with_lse: bool
    with_max: bool = False
    packed: int = 0
    softcap: float | None = None
    dropout: float = 0.0

    def __str__(self) -> str:
        """Return what differs from a plain call."""
        plain = {"band": "", "bias": None, "mask": None, "form": "", "scale": None}
        plain |= {"packed": 0, "softcap": None, "dropout": 0.0}
        shown = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value is not False and (name not in plain or value != plain[name])
        }
        if self.band != "window":
            del shown["window"]
        if self.bias is None:
            del shown["bias_dtype"]
        return ", ".join(f"{name}={value}" for name, value in shown.items())


_LARGE = ((192, 128), (192, 128), (576, 512), (264, 264), (512, 512))


def draw_problem(
    seed: int, *, longest: int = 2048, most_scores: int = 2**26
) -> Problem:
    """Return the problem of a seed: at most `most_scores` scores in all."""
    rng = np.random.default_rng(seed)
    most = np.log(longest + 0.99)

    def length() -> int:
        return 1 if rng.random() < 0.1 else int(np.exp(rng.uniform(0, most)))

    s, t = length(), length()
    if rng.random() < 0.5:
        t = s
    group = {"mha": 1, "gqa": 4, "mqa": 0}[
        rng.choice(["mha", "gqa", "mqa"], p=[1 / 6, 4 / 6, 1 / 6])
    ]
    k = int(rng.integers(1, 5)) if group else 1
    h = k * (group or int(rng.integers(2, 9)))
    b = int(rng.integers(1, 17))
    b = max(1, min(b, most_scores // (h * s * t)))
    sizes = [8, 16, 32, 40, 48, 64, 64, 80, 96, 128, 128, 128, 160, 192, 256]
    d = int(rng.choice(sizes)) if rng.random() < 0.9 else int(rng.integers(1, 257))
    e = d if rng.random() < 0.8 else int(rng.choice([x for x in sizes if x <= 128]))
    if rng.random() < 0.06:  # multi-head latent attention, and large heads
        d, e = _LARGE[int(rng.integers(len(_LARGE)))]
    patterns = ["", "b", "h", "t", "s", "st", "hst", "bst", "bhst", "bt", "ht", "bhs"]
    problem = Problem(
        seed=seed,
        dtype=str(rng.choice(["bfloat16", "float16"])),
        b=b,
        s=s,
        t=t,
        h=h,
        k=k,
        d=d,
        e=e,
        scale=None if rng.random() < 0.8 else float(rng.choice([0.3, -0.2, 0.0, 1.0])),
        band=str(
            rng.choice(["", "causal", "bottom-right", "window"], p=[0.4, 0.3, 0.1, 0.2])
        ),
        window=(int(rng.integers(0, s + 1)), int(rng.integers(0, t + 1))),
        bias=str(rng.choice(patterns)) if rng.random() < 0.25 else None,
        bias_dtype=str(rng.choice(["same", "same", "float32"])),
        mask=str(rng.choice(patterns)) if rng.random() < 0.15 else None,
        form=str(
            rng.choice(["", "prefix", "segments", "blocks"], p=[0.85, 0.05, 0.05, 0.05])
        ),
        with_lengths=bool(rng.random() < 0.4),
        with_sinks=bool(rng.random() < 0.15),
        with_lse=bool(rng.random() < 0.3),
    )
    if rng.random() < 0.12:
        count = int(rng.integers(1, 9))
        problem = replace(problem, packed=count, with_lengths=False, form="")
    if rng.random() < 0.1:
        problem = replace(problem, softcap=float(rng.choice([0.5, 2.0, 30.0])))
    if rng.random() < 0.1:
        problem = replace(
            problem, dropout=float(rng.choice([0.125, 0.5, 6554 / 2**16]))
        )
    return replace(problem, with_max=bool(rng.random() < 0.2))


def make_arrays(problem: Problem) -> Arrays:
    """Return the operands and cotangents of a problem as NumPy arrays, by name."""
    p = problem
    rng = np.random.default_rng([p.seed, 1])
    dtype = np.dtype(getattr(ml_dtypes, p.dtype, p.dtype))
    shape = {"b": p.b, "h": p.h, "s": p.s, "t": p.t}

    def normal(*dims: int, of: np.dtype = dtype) -> np.ndarray:
        return rng.standard_normal(dims, np.float32).astype(of)

    def like_scores(axes: str) -> tuple[int, ...]:
        return tuple(shape[x] if x in axes else 1 for x in "bhst")

    arrays: Arrays = {
        "query": normal(p.b, p.s, p.h, p.d),
        "key": normal(p.b, p.t, p.k, p.d),
        "value": normal(p.b, p.t, p.k, p.e),
        "grad_output": normal(p.b, p.s, p.h, p.e),
    }
    if p.with_lse:
        arrays["grad_lse"] = normal(p.b, p.s, p.h, of=np.dtype(np.float32))
    if p.with_sinks:
        arrays["sinks"] = normal(p.h, of=np.dtype(np.float32))
    if p.bias is not None:
        of = dtype if p.bias_dtype == "same" else np.dtype(np.float32)
        arrays["bias"] = normal(*like_scores(p.bias), of=of)
    if p.mask is not None:
        arrays["mask"] = rng.random(like_scores(p.mask)) < 0.8
    if p.with_lengths:
        for name, size, of_padding in (
            ("query_lengths", p.s, ("query", "grad_output")),
            ("key_lengths", p.t, ("key", "value")),
        ):
            lengths = rng.integers(1, size + 1, p.b)
            lengths[rng.random(p.b) < 0.1] = 0
            arrays[name] = lengths.astype(np.int32)
            is_padding = np.arange(size)[None] >= lengths[:, None]
            for padded in of_padding:
                arrays[padded][is_padding] = _POISON
    for name, size in (("query", p.s), ("key", p.t)) if p.packed else ():
        starts, lengths = _sequences(rng, p, size)
        arrays |= {f"{name}_starts": starts, f"{name}_packed_lengths": lengths}
        is_padding = _sequence_of(starts, lengths, size)[0] < 0
        padded = ("query", "grad_output") if name == "query" else ("key", "value")
        for each in padded:
            arrays[each][is_padding] = np.nan
    if p.form == "prefix":
        arrays["prefix"] = rng.integers(0, p.t + 1, p.b).astype(np.int32)
    elif p.form == "segments":
        for name, size in (("query_segments", p.s), ("key_segments", p.t)):
            arrays[name] = np.sort(rng.integers(0, 4, (p.b, size))).astype(np.int32)
    elif p.form == "blocks":
        rows, columns = (-(-size // 64) for size in (p.s, p.t))
        arrays["blocks"] = rng.random((p.b, 1, rows, columns)) < 0.7
    return arrays


def _sequences(
    rng: np.random.Generator, p: Problem, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths of the sequences of each row; some are empty."""
    ends = np.sort(rng.integers(0, size + 1, (p.b, p.packed + 1)), axis=1)
    starts, room = ends[:, :-1], np.diff(ends, axis=1)
    lengths = np.where(rng.random(room.shape) < 0.5, room, rng.integers(0, room + 1))
    lengths[rng.random(room.shape) < 0.1] = 0
    return starts.astype(np.int32), lengths.astype(np.int32)


def _sequence_of(
    starts: np.ndarray, lengths: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's sequence, -1 for none, and its position there: (b, size)."""
    token = np.arange(size)[None, None]
    first = starts[:, :, None]
    is_inside = (token >= first) & (token < first + lengths[:, :, None])
    number = np.where(is_inside.any(1), is_inside.argmax(1), -1)
    begin = np.take_along_axis(starts, np.maximum(number, 0), axis=1)
    return number, np.arange(size)[None] - begin


def call(
    problem: Problem, operands: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
    """Call `jax_cudnn.sdpa` on operands by name; return its results by name."""
    p = problem
    mask = masks.Lengths(operands.get("query_lengths"), operands.get("key_lengths"))
    if p.band == "causal":
        mask = mask & masks.Causal()
    elif p.band == "bottom-right":
        mask = mask & masks.Causal("bottom-right")
    elif p.band == "window":
        mask = mask & masks.Window(*p.window)
    if p.mask is not None:
        mask = mask & masks.Where(operands["mask"])
    if p.form == "prefix":
        mask = mask & masks.Prefix(operands["prefix"])
    elif p.form == "segments":
        ids = (operands["query_segments"], operands["key_segments"])
        mask = mask & masks.Segments(*ids)
    elif p.form == "blocks":
        mask = mask & masks.Blocks(operands["blocks"], (64, 64))
    if p.packed:
        sequences = ("query_starts", "key_starts")
        lengths = ("query_packed_lengths", "key_packed_lengths")
        given = [operands[name] for name in (*sequences, *lengths)]
        mask = mask & masks.Packed(*given)
    if p.softcap is not None:
        options["score_mod"] = score_mods.softcap(p.softcap)
    if p.dropout:
        options |= {"dropout_rate": p.dropout, "dropout_key": _key(p)}
    results = jax_cudnn.sdpa(
        operands["query"],
        operands["key"],
        operands["value"],
        operands.get("bias"),
        mask,
        scale=p.scale,
        sinks=operands.get("sinks"),
        return_residual=p.with_lse,
        return_max_logit=p.with_max,
        **options,
    )
    asked = {"lse": p.with_lse, "max": p.with_max}
    names = [name for name, is_asked in asked.items() if is_asked]
    if not names:
        return {"output": results}
    return dict(zip(["output", *names], results, strict=True))


def _key(problem: Problem) -> jax.Array:
    return jax.random.key(problem.seed)


def is_kept(problem: Problem) -> np.ndarray:
    """Return which probabilities dropout keeps, (b, h, s, t).

    tests/attention/test_sdpa_dropout.py compares the numbers with those of a GPU. Which
    ones a call takes from its key is said in ops/attention/dropout.py.
    """
    p = problem
    bits = jax.random.bits(_key(p), (2,), jnp.uint32)
    seed, first = (jnp.int32(x) for x in np.asarray(bits).view(np.int32))
    offsets = numbered(first & np.int32(2**30 - 4), p.b, p.h)
    return np.asarray(
        kept(p.dropout, jnp.reshape(seed, (1, 1, 1, 1)), offsets, (p.s, p.t))
    )


def results(
    problem: Problem, operands: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
    """Return the results of a call and all gradients, by name."""
    p = problem
    names = ["query", "key", "value"]
    names += ["bias"] if p.bias is not None else []
    names += ["sinks"] if p.with_sinks else []

    def of_moved(moved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = call(p, {**operands, **moved}, **options)
        return found, {name: found.pop(name) for name in ("max",) if name in found}

    moved = {name: operands[name] for name in names}
    found, pull, still = jax.vjp(of_moved, moved, has_aux=True)
    cotangents = {name: operands[f"grad_{name}"] for name in found}
    (gradients,) = pull(cotangents)
    return {**found, **still, **gradients}


# --- the answer -----------------------------------------------------------------------


def is_seen(problem: Problem, arrays: Mapping[str, Any]) -> np.ndarray:
    """Return which keys a query sees, (b, h or 1, s, t)."""
    p = problem
    row, column = np.arange(p.s)[:, None], np.arange(p.t)[None, :]
    seen = np.ones((1, 1, p.s, p.t), bool)
    # Positions in a sequence, and where its last query is.
    i, j, gap = row, column, np.array(p.t - p.s)
    if p.packed:
        spans = [(arrays[f"{x}_starts"], arrays[f"{x}_packed_lengths"]) for x in _SIDES]
        of_query, i = _sequence_of(*spans[0], p.s)
        of_key, j = _sequence_of(*spans[1], p.t)
        gap = np.take_along_axis(
            spans[1][1] - spans[0][1], np.maximum(of_query, 0), axis=1
        )[:, None, :, None]
        i, j = i[:, None, :, None], j[:, None, None, :]
        same = of_query[:, None, :, None] == of_key[:, None, None, :]
        seen = seen & same & (of_query >= 0)[:, None, :, None]
    if p.band == "causal":
        seen = seen & (j <= i)
    elif p.band == "bottom-right":
        seen = seen & (j - i <= gap)
    elif p.band == "window":
        left, right = p.window
        seen = seen & (j >= i - left) & (j <= i + right)
    if p.with_lengths:
        of_queries = row < arrays["query_lengths"][:, None, None, None]
        of_keys = column < arrays["key_lengths"][:, None, None, None]
        seen = seen & of_queries & of_keys
    if p.mask is not None:
        seen = seen & arrays["mask"]
    if p.form == "prefix":
        within = column < arrays["prefix"][:, None, None, None]
        seen = seen & (within | (column <= row))
    elif p.form == "segments":
        ids = arrays["query_segments"][:, None, :, None]
        seen = seen & (ids == arrays["key_segments"][:, None, None, :])
    elif p.form == "blocks":
        seen = seen & arrays["blocks"][:, :, row // 64, column // 64]
    return seen


# By dtype: the largest relative error of rounding, and the spacing of its smallest
# numbers. Small probabilities and slopes are among these in float16.
_ROUNDING = {"bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-24)}


def judge(
    problem: Problem, arrays: Arrays, *, with_gradients: bool
) -> dict[str, Judged]:
    """Return the results of a problem with their bounds, by name."""
    p = problem
    maths = Maths(torch_on_gpu())
    m = maths.of
    u, tiny = _ROUNDING[p.dtype]
    g = p.h // p.k
    scale = p.d**-0.5 if p.scale is None else p.scale

    def heads(name: str) -> Any:  # (b, k, g, s, n)
        # Padding is not read, and may be NaN.
        x = maths.double(np.nan_to_num(np.asarray(arrays[name], np.float64)))
        x = x.reshape(p.b, x.shape[1], p.k, -1, x.shape[-1])
        return m.einsum("bskgn->bkgsn", x)

    def of_scores(x: np.ndarray) -> np.ndarray:
        whole = np.broadcast_to(x, (p.b, p.h, p.s, p.t))
        return whole.reshape(p.b, p.k, g, p.s, p.t)

    q = heads("query")
    k, v = heads("key")[:, :, 0], heads("value")[:, :, 0]
    logits = scale * m.einsum("bkgsd,bktd->bkgst", q, k)
    # What float32 loses of a score, times log2(e) in kernels.
    slack = 2.0**-20 * abs(scale) * m.einsum("bkgsd,bktd->bkgst", abs(q), abs(k))
    slope_of_cap = None
    if p.softcap is not None:
        capped = m.tanh(logits / p.softcap)
        slope_of_cap = 1 - capped * capped
        logits = p.softcap * capped
        # A kernel's tanh has eleven digits.
        slack = slack * slope_of_cap + 2.0**-10 * abs(logits)
    if p.bias is not None:
        bias = maths.double(of_scores(np.asarray(arrays["bias"], np.float64)))
        logits, slack = logits + bias, slack + 2.0**-20 * abs(bias)
    seen = maths.bools(of_scores(is_seen(p, arrays)))
    zero = logits * 0.0
    hidden = zero - np.inf
    slack = m.where(seen, slack, zero)
    logits = m.where(seen, logits, hidden)
    none = zero[..., :1]
    top = largest = m.amax(logits, -1)[..., None]
    sinks = none - np.inf
    if p.with_sinks:
        sinks = none + maths.double(arrays["sinks"]).reshape(1, p.k, g, 1, 1)
    top = m.where(top > sinks, top, sinks)
    top = m.where(top == -np.inf, none, top)
    weights = m.exp(logits - top)
    total = m.sum(weights, -1)[..., None]
    total = total + m.exp(sinks - top)
    empty = total == 0
    least = m.where(empty, none + 1, total)
    probabilities = weights / least
    finite = top + m.log(least)
    lse = m.where(empty, none - np.inf, finite)
    loosest = m.amax(slack, -1)[..., None]
    off = u + slack + loosest  # relative, of a probability
    # What the values are multiplied by, divided by the probability.
    passed = zero + 1
    if p.dropout:
        kept_ones = maths.double(of_scores(is_kept(p)))
        passed = kept_ones / (1 - p.dropout)
    output = m.einsum("bkgst,bkte->bkgse", probabilities * passed, v)
    # What is absolute in it: numbers that the dtype has not, near 0.
    least_step = m.where(seen, zero + tiny, zero)
    loose = (probabilities * off + least_step) * passed
    spread = m.einsum("bkgst,bkte->bkgse", loose, abs(v))
    output_bound = 2 * spread + 2 * u * abs(output)
    found = {
        "output": (output, output_bound),
        "lse": (lse, 2 * loosest + 2.0**-20 * (1 + abs(finite))),
    }
    if p.with_max:
        size = abs(m.where(largest == -np.inf, none, largest))
        found["max"] = (largest, 2 * loosest + 2.0**-20 * (1 + size))
    if with_gradients:
        grad = heads("grad_output")
        forward = Forward(
            scale=scale,
            u=u,
            q=q,
            k=k,
            v=v,
            grad=grad,
            probabilities=probabilities,
            off=off,
            least_step=least_step,
            output=output,
            passed=passed,
            slope_of_cap=slope_of_cap,
        )
        found |= gradients_of(p, maths, arrays, forward)
        if p.with_sinks:
            slope = -m.sum(output * grad, -1)[..., None]
            blur = 2 * u * m.sum(abs(output * grad), -1)[..., None]
            if p.with_lse:
                slope = slope + of_rows(maths, p, arrays["grad_lse"])
            share = m.exp(sinks - finite)
            bound = share * (blur + loosest * abs(slope) + 2.0**-20 * abs(slope))
            found["sinks"] = (
                m.einsum("bkgsx->kg", share * slope).reshape(p.h),
                2 * m.einsum("bkgsx->kg", bound).reshape(p.h) + 1e-6,
            )
    return {
        name: Judged(stored(maths, p, name, x), stored(maths, p, name, y))
        for name, (x, y) in found.items()
    }
