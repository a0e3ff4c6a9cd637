# SPDX-License-Identifier: Apache-2.0
"""Trains a character transformer with jax_cudnn's attention: `make demo`.

The text is the documentation that comes with every Python (help topics and docstrings).
On an NVIDIA GPU the model is larger, computes in bf16 and runs cuDNN's attention. On
two CPU cores the same program takes about two minutes.
"""

import argparse
import ast
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike

import jax_cudnn.plans
from jax_cudnn.flax import AttentionFn, make_attention_fn


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of model and training; lengths are in characters."""

    steps: int
    batch: int
    context: int
    layers: int
    width: int
    heads: int
    learning_rate: float
    dtype: DTypeLike
    sample_length: int = 400

    @property
    def characters_per_step(self) -> int:
        return self.batch * self.context


# Many small steps: on a CPU they learn more in two minutes than few large ones.
ON_CPU = Settings(
    steps=2000,
    batch=8,
    context=64,
    layers=2,
    width=192,
    heads=6,
    learning_rate=3e-3,
    dtype=jnp.float32,
)
ON_GPU = Settings(
    steps=800,
    batch=32,
    context=512,
    layers=6,
    width=384,
    heads=6,
    learning_rate=1e-3,
    dtype=jnp.bfloat16,
)
QUICK = {
    "steps": 20,
    "batch": 8,
    "context": 32,
    "layers": 2,
    "width": 48,
    "heads": 3,
    "learning_rate": 1e-2,
    "sample_length": 60,
}


# --- text -----------------------------------------------------------------------------


def documents() -> Iterator[str]:
    """Yield Python's help topics, then the docstrings of each standard module."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some small distributions of Python leave it out
        topics = {}
    yield from (topics[name] for name in sorted(topics))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
        yield "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text as character numbers, with every tenth document held out."""

    alphabet: str
    train: np.ndarray
    validation: np.ndarray

    def decode(self, numbers: np.ndarray) -> str:
        return "".join(self.alphabet[i] for i in numbers)


def read_corpus() -> Corpus:
    """Return the text without repeated paragraphs, of which the topics have many.

    Characters beyond ASCII, which are rare here, become question marks.
    """
    seen: set[str] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    for i, document in enumerate(documents()):
        for paragraph in document.split("\n\n"):
            if paragraph.strip() and paragraph.strip() not in seen:
                seen.add(paragraph.strip())
                parts[i % 10 == 9].append(paragraph)
    train, validation = (
        "\n\n".join(part).encode("ascii", "replace").decode() for part in parts
    )
    alphabet = "".join(sorted(set(train) | set(validation)))
    number = {character: i for i, character in enumerate(alphabet)}
    return Corpus(
        alphabet=alphabet,
        train=np.array([number[c] for c in train], np.int32),
        validation=np.array([number[c] for c in validation], np.int32),
    )


def bigram_losses(corpus: Corpus) -> tuple[float, float]:
    """Return the validation loss of counting letters, and of counting pairs of them."""
    size = len(corpus.alphabet)
    pairs = np.zeros((size, size))
    np.add.at(pairs, (corpus.train[:-1], corpus.train[1:]), 1)
    single = (pairs.sum(0) + 0.1) / (pairs.sum() + 0.1 * size)
    after = (pairs + 0.1) / (pairs.sum(1, keepdims=True) + 0.1 * size)
    first, second = corpus.validation[:-1], corpus.validation[1:]
    return -np.log(single[second]).mean(), -np.log(after[first, second]).mean()


def batches(text: np.ndarray, settings: Settings, seed: int) -> Iterator[jax.Array]:
    """Yield random stretches of the text, (batch, context + 1), without end."""
    rng = np.random.default_rng(seed)
    reach = np.arange(settings.context + 1)
    while True:
        starts = rng.integers(len(text) - settings.context, size=(settings.batch, 1))
        yield jnp.asarray(text[starts + reach])


# --- model ----------------------------------------------------------------------------


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each on the normalised residual."""

    def __init__(self, settings: Settings, attention_fn: AttentionFn, rngs: nnx.Rngs):
        width, dtype = settings.width, settings.dtype
        self.attention_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=settings.heads,
            in_features=width,
            attention_fn=attention_fn,
            decode=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """A causal transformer over characters; returns f32 logits."""

    def __init__(
        self,
        alphabet_size: int,
        settings: Settings,
        attention_fn: AttentionFn,
        rngs: nnx.Rngs,
    ):
        width, dtype = settings.width, settings.dtype
        self.characters = nnx.Embed(alphabet_size, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(settings.context, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            Block(settings, attention_fn, rngs) for _ in range(settings.layers)
        )
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.logits = nnx.Linear(width, alphabet_size, dtype=dtype, rngs=rngs)

    def __call__(self, characters: jax.Array) -> jax.Array:
        positions = jnp.arange(characters.shape[1])
        x = self.characters(characters) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x)).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer without its parameters, which its methods take as an argument."""

    graph: nnx.GraphDef

    def loss(self, params: nnx.State, text: jax.Array) -> jax.Array:
        """Return the mean cross-entropy of each next character, in nats."""
        logits = nnx.merge(self.graph, params)(text[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return losses.mean()

    def generate(
        self, params: nnx.State, window: jax.Array, keys: jax.Array
    ) -> jax.Array:
        """Return one character per key, each drawn given the `context` before it."""

        def draw(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = nnx.merge(self.graph, params)(window[None])[0, -1]
            character = jax.random.categorical(key, logits / 0.7)
            return jnp.append(window[1:], character), character

        return jax.lax.scan(draw, window, keys)[1]


def build(
    corpus: Corpus, settings: Settings, attention_fn: AttentionFn, seed: int
) -> tuple[Model, nnx.State]:
    """Return a model and its first parameters; equal seeds give equal parameters."""
    transformer = Transformer(
        len(corpus.alphabet), settings, attention_fn, nnx.Rngs(seed)
    )
    graph, params = nnx.split(transformer, nnx.Param)
    return Model(graph=graph), params


# --- is the gradient right? -----------------------------------------------------------


def gradient_error(gradient: nnx.State, truth: nnx.State) -> float:
    """Return |gradient - truth| / |truth| over all parameters together."""
    flat_gradient, flat_truth = ravel_pytree(gradient)[0], ravel_pytree(truth)[0]
    norm = jnp.linalg.norm
    return float(norm(flat_gradient - flat_truth) / norm(flat_truth))


def check_gradient(
    corpus: Corpus, settings: Settings, attention_fn: AttentionFn, seed: int
) -> bool:
    """Compare one batch's gradient with that of Flax's own attention in full f32."""
    text = next(batches(corpus.train, settings, seed))

    def gradient(attention_fn: Callable[..., jax.Array], dtype: DTypeLike) -> nnx.State:
        used = replace(settings, dtype=dtype)
        model, params = build(corpus, used, attention_fn, seed)
        return jax.jit(jax.grad(model.loss))(params, text)

    # Without this, f32 products on a GPU may be rounded to TF32.
    with jax.default_matmul_precision("highest"):
        truth = gradient(nnx.dot_product_attention, jnp.float32)
    dtype = jnp.dtype(settings.dtype)
    xla = make_attention_fn(implementation="xla")
    xla_error = gradient_error(gradient(xla, dtype), truth)
    error = gradient_error(gradient(attention_fn, dtype), truth)
    is_f32 = dtype == jnp.float32
    bound, rule = (1e-5, "") if is_f32 else (1.5 * xla_error, ", 1.5 times XLA's")
    is_right = error <= bound
    print(f"  error of XLA's attention in {dtype}  {xla_error:.1e}")
    print(f"  error of the chosen one in {dtype}   {error:.1e}  ", end="")
    print(f"{'ok' if is_right else 'WRONG'} (allowed: {bound:.1e}{rule})")
    return is_right


# --- training -------------------------------------------------------------------------


class Progress:
    """A bar that is redrawn in a terminal, and a line per tenth elsewhere."""

    def __init__(self, total: int):
        self._total = total
        self._start = time.monotonic()
        self._is_terminal = sys.stdout.isatty()

    def show(self, done: int, told: str) -> None:
        """Draw the bar; `told` goes behind it."""
        is_last = done == self._total
        tenth = max(self._total // 10, 1)
        if not (self._is_terminal or is_last or done % tenth == 0):
            return
        filled = 28 * done // self._total
        elapsed = time.monotonic() - self._start
        left = elapsed * (self._total - done) / max(done, 1)
        line = (
            f"  {'█' * filled}{'░' * (28 - filled)} {done:>5}/{self._total}  {told}  "
            f"{elapsed:3.0f} s, {left:3.0f} s left"
        )
        is_redrawn = self._is_terminal and not is_last
        print(
            f"\r{line}" if self._is_terminal else line, end="" if is_redrawn else "\n"
        )
        sys.stdout.flush()


class Trainer:
    """Parameters, optimizer and the compiled steps."""

    def __init__(self, model: Model, params: nnx.State, settings: Settings):
        schedule = optax.warmup_cosine_decay_schedule(
            0.0,
            settings.learning_rate,
            warmup_steps=max(settings.steps // 20, 1),
            decay_steps=settings.steps,
            end_value=settings.learning_rate / 20,
        )
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1)
        )

        def step(
            params: nnx.State, state: optax.OptState, text: jax.Array
        ) -> tuple[nnx.State, optax.OptState, jax.Array]:
            loss, gradient = jax.value_and_grad(model.loss)(params, text)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, loss

        self.params = params
        self._state = optimizer.init(params)
        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._loss = jax.jit(model.loss)

    def inspect(self, text: jax.Array) -> jax_cudnn.plans.Report:
        """Return where the attention of one step runs, and with which plan."""
        return jax_cudnn.plans.inspect(self._step, self.params, self._state, text)

    def step(self, text: jax.Array) -> jax.Array:
        """Take one step and return its loss, which may still be under way."""
        self.params, self._state, loss = self._step(self.params, self._state, text)
        return loss

    def validate(self, corpus: Corpus, settings: Settings) -> float:
        """Return the mean loss over the first of the held-out text, in full contexts.

        At most 32 batches, the same ones at every call.
        """
        size = settings.context
        count = min(len(corpus.validation) - 1, 32 * settings.characters_per_step)
        rows = count // settings.characters_per_step * settings.batch
        starts = size * np.arange(rows)[:, None]
        text = corpus.validation[starts + np.arange(size + 1)]
        parts = jnp.asarray(text.reshape(-1, settings.batch, size + 1))
        return float(np.mean([self._loss(self.params, part) for part in parts]))


def train(
    trainer: Trainer, corpus: Corpus, settings: Settings, seed: int
) -> tuple[float, float]:
    """Train for all steps; return the validation loss before and after."""
    before = trainer.validate(corpus, settings)
    print(f"  validation loss before training: {before:.3f}")
    stretches = batches(corpus.train, settings, seed)
    progress = Progress(settings.steps)
    smooth = math.nan
    for done in range(1, settings.steps + 1):
        loss = trainer.step(next(stretches))
        if done % 5 == 0 or done == settings.steps:
            recent = float(loss)
            smooth = recent if math.isnan(smooth) else 0.8 * smooth + 0.2 * recent
            progress.show(done, f"loss {smooth:.3f}")
    return before, trainer.validate(corpus, settings)


# --- the whole ------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--implementation",
        choices=("auto", "cudnn", "xla"),
        default="auto",
        help="who runs attention; default: auto",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model for some seconds"
    )
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1 step is needed")
    return arguments


def choose_settings(arguments: argparse.Namespace) -> Settings:
    """Return sizes that suit the machine and the arguments."""
    settings = ON_GPU if jax.default_backend() == "gpu" else ON_CPU
    if arguments.quick:
        settings = replace(settings, **QUICK)
    if arguments.steps is not None:
        settings = replace(settings, steps=arguments.steps)
    return settings


def print_sample(
    model: Model, params: nnx.State, corpus: Corpus, settings: Settings, seed: int
) -> None:
    """Continue the held-out text with characters drawn from the model."""
    window = jnp.asarray(corpus.validation[: settings.context])
    keys = jax.random.split(jax.random.key(seed), settings.sample_length)
    drawn = corpus.decode(np.asarray(jax.jit(model.generate)(params, window, keys)))
    given = corpus.decode(np.asarray(window))[-60:]
    print("\n".join(f"  | {line}" for line in f"{given}[...]{drawn}".splitlines()))


def main() -> int:
    """Run the demo; return 1 if the gradient is wrong."""
    arguments = parse_arguments()
    settings, seed = choose_settings(arguments), arguments.seed
    attention_fn = make_attention_fn(implementation=arguments.implementation)

    corpus = read_corpus()
    unigram, bigram = bigram_losses(corpus)
    model, params = build(corpus, settings, attention_fn, seed)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(f"Device      {jax.devices()[0].device_kind}, {jnp.dtype(settings.dtype)}")
    print(
        f"Text        Python's documentation: {len(corpus.train):,} characters to "
        f"train on, {len(corpus.validation):,} held out, {len(corpus.alphabet)} kinds"
    )
    print(
        f"Model       {count:,} parameters: {settings.layers} layers of width "
        f"{settings.width}, {settings.heads} heads, context {settings.context}"
    )
    print(f"Training    {settings.steps} steps of {settings.characters_per_step:,}")

    print("\nIs the gradient right? One batch, against Flax's own attention in f32:")
    is_right = check_gradient(corpus, settings, attention_fn, seed)

    trainer = Trainer(model, params, settings)
    print("\nWhere does attention run in a training step?")
    text = next(batches(corpus.train, settings, seed))
    print("\n".join(f"  {line}" for line in str(trainer.inspect(text)).splitlines()))

    print("\nTraining (losses in nats per character):")
    before, after = train(trainer, corpus, settings, seed)

    print("\nThe model continues a held-out text from [...] on:")
    print_sample(model, trainer.params, corpus, settings, seed)

    print("\nLoss on held-out text, in nats per character:")
    print(f"  counting characters  {unigram:.3f}")
    print(f"  counting pairs       {bigram:.3f}")
    print(f"  before training      {before:.3f}")
    verdict = "better than pairs" if after < bigram else "not yet better than pairs"
    print(f"  after training       {after:.3f}  {verdict} by {abs(bigram - after):.3f}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
