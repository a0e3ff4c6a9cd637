# SPDX-License-Identifier: Apache-2.0
"""Generates text with a cache of keys and values: `make generate`.

A decoder as Llama has it (grouped heads, rotary embedding, RMS norm, SwiGLU) learns
Python's sources for some seconds, byte by byte. Prompts of different lengths are then
read in one call, and continued by a compiled loop, whose cache is updated in place. The
greedy text is that of the same model without a cache, which the program checks.

  python examples/generate.py --tokens 500 --temperature 0
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt.settings import VOCABULARY
from jax.typing import DTypeLike
from language.optimizer import make_optimizer
from language.settings import Settings as TextSettings
from language.text import batch_of, read_corpus

import jax_cudnn
from jax_cudnn.config import Implementation
from jax_cudnn.flax import Rotary
from jax_cudnn.flax.nnx import Linear, MultiHeadAttention

PROMPTS = (
    "import ",
    "def main(argv: list[str]) -> int:\n    ",
    "class Node:\n    def __init__(self, value",
    "for i in range(",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of model, training and generation. Lengths are in bytes."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    context: int  # of training
    batch: int
    learning_rate: float
    steps: int
    tokens: int  # to be generated for each prompt
    dtype: DTypeLike
    seed: int = 0
    temperature: float = 0.8

    @property
    def text(self) -> TextSettings:
        """What the training text is cut by."""
        return TextSettings(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            context=self.context,
            batch=self.batch,
            steps=self.steps,
            learning_rate=self.learning_rate,
            seed=self.seed,
        )


ON_CPU = Settings(
    layers=2,
    width=128,
    heads=8,
    kv_heads=2,
    context=64,
    batch=8,
    learning_rate=3e-3,
    steps=300,
    tokens=200,
    dtype=jnp.float32,
)
ON_GPU = Settings(
    layers=12,
    width=1024,
    heads=16,
    kv_heads=4,
    context=256,
    batch=32,
    learning_rate=6e-4,
    steps=600,
    tokens=1000,
    dtype=jnp.bfloat16,
)


# --- model ----------------------------------------------------------------------------


class Block(nnx.Module):
    """Attention and a gated perceptron, each on the normalised residual."""

    def __init__(
        self, settings: Settings, implementation: Implementation, rngs: nnx.Rngs
    ):
        width, hidden = settings.width, settings.width * 8 // 3 // 64 * 64
        options = {"use_bias": False, "dtype": settings.dtype, "rngs": rngs}
        norm = functools.partial(nnx.RMSNorm, width, dtype=settings.dtype, rngs=rngs)
        self.implementation: Implementation = implementation
        self.attention_norm = norm()
        self.attention = MultiHeadAttention(
            settings.heads,
            width,
            num_kv_heads=settings.kv_heads,
            is_causal=True,
            rotary=Rotary(),
            implementation=implementation,
            decode=False,
            **options,
        )
        self.mlp_norm = norm()
        self.gate = nnx.Linear(width, hidden, **options)
        self.up = nnx.Linear(width, hidden, **options)
        self.down = Linear(hidden, width, implementation=implementation, **options)

    def __call__(
        self, x: jax.Array, lengths: jax.Array | None, decode: bool
    ) -> jax.Array:
        attended = self.attention(
            self.attention_norm(x), decode=decode, input_lengths=lengths
        )
        x = x + attended
        gate, up = (each.kernel[...].astype(x.dtype) for each in (self.gate, self.up))
        gated = jax_cudnn.gated_matmul(
            self.mlp_norm(x), gate, up, implementation=self.implementation
        )
        return self.down(gated, residual=x)


class Decoder(nnx.Module):
    """A decoder; takes (batch, length) tokens and returns f32 logits."""

    def __init__(
        self, settings: Settings, implementation: Implementation, rngs: nnx.Rngs
    ):
        self.width = settings.width
        self.tokens = nnx.Embed(
            VOCABULARY, settings.width, dtype=settings.dtype, rngs=rngs
        )
        self.blocks = nnx.List(
            Block(settings, implementation, rngs) for _ in range(settings.layers)
        )
        self.norm = nnx.RMSNorm(settings.width, dtype=settings.dtype, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        *,
        decode: bool = False,
    ) -> jax.Array:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, lengths, decode)
        return self.tokens.attend(self.norm(x)).astype(jnp.float32)

    def init_cache(self, batch: int, length: int) -> None:
        """Make room for so many tokens of each batch entry."""
        shape = (batch, length, self.width)
        for block in self.blocks:
            dtype = self.tokens.dtype
            block.attention.init_cache(shape, dtype, ragged=True)


def train(settings: Settings) -> tuple[nnx.State, float]:
    """Return parameters that some steps have trained, and the last loss."""
    corpus = read_corpus(None, settings.text)
    model = Decoder(settings, "auto", nnx.Rngs(settings.seed))
    graph, params = nnx.split(model, nnx.Param)
    optimizer = make_optimizer(settings.text)

    def loss_of(params: nnx.State, text: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, text[:, 1:]
        ).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: nnx.State, state: optax.OptState, text: jax.Array
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(params, text)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, loss = optimizer.init(params), jnp.nan
    for number in range(settings.steps):
        text = jnp.asarray(batch_of(corpus, settings.text, number).text)
        params, state, loss = step(params, state, text)
    return params, float(loss)


# --- generation -----------------------------------------------------------------------


def draw(logits: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """Return the most likely token, or one that is drawn at a temperature above 0."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    return jax.random.categorical(key, logits / temperature)


# Cache, and the last token of each batch entry.
Carry = tuple[nnx.State, jax.Array]


class Generator:
    """A decoder with a cache: one program for the prompts, and one for all tokens."""

    def __init__(
        self, settings: Settings, implementation: Implementation, params: nnx.State
    ):
        self._settings = settings
        model = Decoder(settings, implementation, nnx.Rngs(settings.seed))
        nnx.update(model, params)
        self._model = model
        program = functools.partial(
            jax.jit, static_argnames="graph", donate_argnames="cache"
        )
        self._read, self._continue = program(self._next), program(self._rest)

    def _next(
        self,
        params: nnx.State,
        cache: nnx.State,
        tokens: jax.Array,
        lengths: jax.Array,
        key: jax.Array,
        graph: nnx.GraphDef,
    ) -> tuple[nnx.State, jax.Array]:
        """Add tokens (b, s) to the cache; return it, and the tokens (b,) behind them.

        ``cache`` is donated: XLA writes the new keys and values into it.
        """
        model = nnx.merge(graph, params, cache)
        logits = model(tokens, lengths, decode=True)
        last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]
        cache = nnx.state(model, nnx.Cache)
        return cache, draw(last, key, self._settings.temperature)

    def _rest(
        self,
        params: nnx.State,
        cache: nnx.State,
        token: jax.Array,
        keys: jax.Array,
        graph: nnx.GraphDef,
    ) -> tuple[nnx.State, jax.Array]:
        """Return the cache and the tokens (n, b) behind a token, one for each key.

        The loop is part of the program: a call from Python for each token would take
        longer than the token.
        """
        ones = jnp.ones(token.shape, jnp.int32)

        def step(carry: Carry, key: jax.Array) -> tuple[Carry, jax.Array]:
            cache, token = carry
            carry = self._next(params, cache, token[:, None], ones, key, graph)
            return carry, carry[1]

        (cache, _), found = jax.lax.scan(step, (cache, token), keys)
        return cache, found

    def generate(
        self, prompts: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, float]:
        """Return the tokens (b, n) behind prompts (b, s), and seconds for a step."""
        count = self._settings.tokens
        self._model.init_cache(len(prompts), prompts.shape[1] + count)
        graph, params, cache = nnx.split(self._model, nnx.Param, nnx.Cache)
        keys = jax.random.split(jax.random.key(self._settings.seed), count)
        cache, token = self._read(params, cache, prompts, lengths, keys[0], graph=graph)
        arguments = params, cache, token, keys[1:]
        program = self._continue.lower(*arguments, graph=graph).compile()
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        cache, found = jax.block_until_ready(program(*arguments))
        seconds = time.perf_counter() - start
        return jnp.concatenate([token[None], found]).T, seconds / (count - 1)


def without_cache(
    settings: Settings, params: nnx.State, prompts: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Return the most likely tokens, computing everything anew for each of them."""
    model = Decoder(settings, "auto", nnx.Rngs(settings.seed))
    graph, _ = nnx.split(model, nnx.Param)
    rows = jnp.arange(len(prompts))
    room = ((0, 0), (0, settings.tokens))

    @jax.jit
    def add(text: jax.Array, lengths: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(text)
        return text.at[rows, lengths].set(jnp.argmax(logits[rows, lengths - 1], -1))

    text = jnp.pad(prompts, room)
    for number in range(settings.tokens):
        text = add(text, lengths + number)
    found = lengths[:, None] + jnp.arange(settings.tokens)
    return jnp.take_along_axis(text, found, axis=1)


def padded(prompts: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Return prompts as rows of bytes, padded on the right, and their lengths."""
    texts = [np.frombuffer(prompt.encode(), np.uint8) for prompt in prompts]
    lengths = [len(text) for text in texts]
    rows = np.zeros((len(texts), max(lengths)), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return jnp.asarray(rows), jnp.asarray(lengths, jnp.int32)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, help="training steps; 0: the model stays random")
    add("--tokens", type=int, help="how many to generate for each prompt")
    add("--temperature", type=float, help="0: the most likely tokens; default: 0.8")
    add("--seed", type=int, default=0, help="default: 0")
    add("--prompt", action="append", help="a text to continue; may be given repeatedly")
    add("--quick", action="store_true", help="a tiny model for some seconds")
    arguments = parser.parse_args()
    for name, least in (("steps", 0), ("tokens", 2), ("temperature", 0)):
        value = getattr(arguments, name)
        if value is not None and not value >= least:
            parser.error(f"--{name} {value}: it must be at least {least}")
    if arguments.prompt is not None and not all(arguments.prompt):
        parser.error("--prompt: it must not be empty")
    return arguments


def choose_settings(arguments: argparse.Namespace) -> Settings:
    """Return sizes that suit the machine and the arguments."""
    settings = ON_GPU if jax.default_backend() == "gpu" else ON_CPU
    if arguments.quick:
        settings = replace(
            settings, layers=2, width=64, heads=4, kv_heads=2, steps=20, tokens=12
        )
    given = {
        name: value
        for name in ("steps", "tokens", "temperature", "seed")
        if (value := getattr(arguments, name)) is not None
    }
    return replace(settings, **given)


def same_tokens(
    settings: Settings, params: nnx.State, prompts: jax.Array, lengths: jax.Array
) -> bool:
    """Tell whether greedy text is the same with a cache and without one, in f32."""
    exact = replace(settings, dtype=jnp.float32, temperature=0.0, tokens=12)
    with jax.default_matmul_precision("highest"):
        expected = without_cache(exact, params, prompts, lengths)
        found, _ = Generator(exact, "auto", params).generate(prompts, lengths)
    return bool((found == expected).all())


def main() -> int:
    """Train, generate and compare; return 1 if the cache changes the text."""
    arguments = parse_arguments()
    settings = choose_settings(arguments)
    prompts, lengths = padded(tuple(arguments.prompt or PROMPTS))
    print(f"Device      {jax.devices()[0].device_kind}, {jnp.dtype(settings.dtype)}")
    params, loss = train(settings)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(
        f"Model       {count:,} parameters: {settings.layers} layers of width "
        f"{settings.width}, {settings.heads} heads, {settings.kv_heads} of keys"
    )
    told = f"loss {loss:.3f} nats per byte" if settings.steps else "no training"
    print(
        f"Training    {settings.steps} steps of {settings.text.tokens_per_step:,} "
        f"bytes, {told}"
    )
    print(
        f"Prompts     {len(prompts)} of {', '.join(map(str, lengths.tolist()))} bytes, "
        f"{settings.tokens} to follow each\n"
    )
    is_same = same_tokens(settings, params, prompts, lengths)
    print(
        f"Greedy text with the cache and without: {'equal' if is_same else 'DIFFERENT'}"
    )

    # Each token reads all weights. Converted once, they are not converted every time.
    params = jax.tree.map(lambda x: x.astype(settings.dtype), params)
    texts: jax.Array | None = None
    runs: dict[str, Callable[[], Generator]] = {
        "jax_cudnn": lambda: Generator(settings, "auto", params),
        "XLA alone": lambda: Generator(settings, "xla", params),
    }
    told = "" if jax.default_backend() == "gpu" else " (without a GPU, both are XLA's)"
    print(f"Tokens per second, on one {jax.devices()[0].device_kind}{told}:")
    # Twice each, in turns: whoever is first meets a machine that is still cold.
    made = {name: make() for name, make in runs.items()}
    times: dict[str, float] = {}
    for name, generator in [*made.items()] * 2:
        found, seconds = generator.generate(prompts, lengths)
        times[name] = min(seconds, times.get(name, seconds))
        texts = found if texts is None else texts
    for name, seconds in times.items():
        print(
            f"  {name}  {len(prompts) / seconds:9,.0f}  "
            f"({1e3 * seconds:.2f} ms for a step of {len(prompts)} tokens)"
        )
    assert texts is not None
    for row, length, text in zip(prompts, lengths, texts, strict=True):
        given = bytes(np.asarray(row[:length], np.uint8)).decode()
        drawn = bytes(np.asarray(text, np.uint8)).decode(errors="replace")
        print("\n" + "\n".join(f"  | {x}" for x in f"{given}[...]{drawn}".splitlines()))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
