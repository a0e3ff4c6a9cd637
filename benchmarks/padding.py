# SPDX-License-Identifier: Apache-2.0
"""Times what it would cost attention not to read NaN and infinities in padding.

    python -m benchmarks.padding --out docs/internals/measured

writes padding.json and padding.md there. cuDNN multiplies the values past a length by
probabilities of 0, which are NaN where a value is NaN or infinite. Two ways exclude
them: "select" writes all keys and values once more, with zeros in the padding, and
"tail" writes zeros into the last tile that a kernel reads of each sequence. Needs an
NVIDIA GPU. Operands are random bf16, with random lengths; see timing.py for how times
are taken.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.records import write_records
from benchmarks.report import environment, versions_text
from benchmarks.timing import Contender, compare
from jax_cudnn import masks

_DATA, _PAGE = "padding.json", "padding.md"
# b, s, h, k, d of a call.
_SIZES = ((32, 512, 12, 12, 64), (8, 2048, 16, 16, 64), (4, 4096, 32, 8, 128))
# No kernel of cuDNN reads keys in larger tiles.
_TILE = 256
_AS_IT_IS, _SELECT, _TAIL = "as it is", "select", "tail"

Clean = Callable[[jax.Array, jax.Array], jax.Array]


def _same(x: jax.Array, lengths: jax.Array) -> jax.Array:
    del lengths
    return x


def _select(x: jax.Array, lengths: jax.Array) -> jax.Array:
    is_inside = jnp.arange(x.shape[1])[None] < lengths[:, None]
    return jnp.where(is_inside[..., None, None], x, jnp.zeros((), x.dtype))


def _tail(x: jax.Array, lengths: jax.Array) -> jax.Array:
    places = lengths[:, None] + jnp.arange(_TILE)[None]
    rows = jnp.arange(x.shape[0])[:, None]
    zero = jnp.zeros((), x.dtype)
    return x.at[rows, places].set(zero, mode="drop", unique_indices=True)


WAYS: dict[str, Clean] = {_AS_IT_IS: _same, _SELECT: _select, _TAIL: _tail}


def _attend(
    clean: Clean, is_packed: bool, q: Any, k: Any, v: Any, lengths: Any
) -> jax.Array:
    k, v = clean(k, lengths), clean(v, lengths)
    if is_packed:
        mask = masks.Packed(jnp.zeros_like(lengths)[:, None], None, lengths[:, None])
        return jax_cudnn.sdpa(q, k, v, mask=mask, implementation="cudnn")
    return jax_cudnn.sdpa(
        q, k, v, key_value_seq_lengths=lengths, implementation="cudnn"
    )


def _layer(attend: Any, x: Any, weights: Any, shape: Any, lengths: Any) -> jax.Array:
    """Return attention of projections, whose memory the program may write again."""
    b, s, h, k, d = shape
    q, key, value = (
        jnp.reshape(x @ w, (b, s, heads, d))
        for w, heads in zip(weights, (h, k, k), strict=True)
    )
    return attend(q, key, value, lengths)


def _gradients(function: Any) -> Any:
    def run(lengths: Any, cotangent: Any, *operands: Any) -> Any:
        output, pull = jax.vjp(lambda *x: function(*x, lengths), *operands)
        return output, pull(cotangent)

    return run


def _is_clean(run: Any, k: jax.Array, v: jax.Array, lengths: jax.Array) -> bool:
    """Whether NaN in padding reaches nothing but the padding's own gradients."""
    is_padding = jnp.arange(k.shape[1])[None] >= lengths[:, None]
    bad = [jnp.where(is_padding[..., None, None], jnp.nan, x) for x in (k, v)]
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(run(*bad)))


def rows() -> Iterator[dict[str, Any]]:
    """Time all calls; yield a row for each."""
    for b, s, h, k, d in _SIZES:
        keys = jax.random.split(jax.random.key(s), 8)
        shapes = ((b, s, h, d), (b, s, k, d), (b, s, k, d), (b, s, h, d))
        q, key, value, cotangent = (
            jax.random.normal(each, shape, jnp.bfloat16)
            for each, shape in zip(keys, shapes, strict=False)
        )
        lengths = jax.random.randint(keys[4], (b,), s // 2, s + 1)
        width = h * d
        x = jax.random.normal(keys[5], (b, s, width), jnp.bfloat16)
        weights = [
            0.02 * jax.random.normal(each, (width, heads * d), jnp.bfloat16)
            for each, heads in zip(keys[5:], (h, k, k), strict=True)
        ]
        for is_packed in (False, True):
            for what in ("forward", "with gradients", "layer with gradients"):
                contenders: dict[str, Contender] = {}
                clean: dict[str, bool] = {}
                for name, way in WAYS.items():
                    attend = functools.partial(_attend, way, is_packed)
                    given: tuple[Any, ...] = (q, key, value, lengths)
                    function: Any = attend
                    if what != "forward":
                        function = _gradients(attend)
                        given = (lengths, cotangent, q, key, value)
                    if what.startswith("layer"):
                        shape = (b, s, h, k, d)

                        def layer(
                            x: Any, w: Any, n: Any, a: Any = attend, z: Any = shape
                        ) -> Any:
                            return _layer(a, x, w, z, n)

                        function = _gradients(layer)
                        given = (lengths, cotangent, x, weights)
                    compiled = jax.jit(function).lower(*given).compile()
                    contenders[name] = Contender(
                        call=functools.partial(compiled, *given),
                        wait=jax.block_until_ready,
                    )
                    if what == "with gradients":
                        first = functools.partial(compiled, lengths, cotangent, q)
                        clean[name] = _is_clean(first, key, value, lengths)
                times = compare(contenders, baseline=_AS_IT_IS)
                yield {
                    "call": f"({b},{s},{h}h,{k}k,{d}){' packed' * is_packed} {what}",
                    "us": times[_AS_IT_IS].median_us,
                    **{
                        name: [x.ratio, x.ratio_low, x.ratio_high]
                        for name, x in times.items()
                    },
                    "clean": clean,
                }


def page(records: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """Return the page."""
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- What attention would take if NaN in padding were excluded. -->",
        "",
        "# What it costs not to read padding",
        "",
        "Written by `python -m benchmarks.padding`; do not edit. Ratios are to the "
        "call as it is, with their range over nine rounds. A way is clean if NaN in "
        "the padding of keys and values reaches no result and no gradient.",
        "",
        versions_text(versions),
        "",
        "| call, bf16 | µs | select | tail | clean |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in records:
        ratios = [
            "{:.3f} ({:.3f} to {:.3f})".format(*row[name]) for name in (_SELECT, _TAIL)
        ]
        clean = ", ".join(name for name, is_in in row["clean"].items() if is_in)
        told = clean or ("none" if row["clean"] else "")
        cells = [row["call"], f"{row['us']:.0f}", *ratios, told]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Time and print, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    versions, records = environment(), [*rows()]
    text = page(records, versions)
    print(text)
    if out is not None:
        write_records(out / _DATA, {"environment": versions, "rows": records})
        (out / _PAGE).write_text(text)


if __name__ == "__main__":
    main()
