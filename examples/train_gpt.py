# SPDX-License-Identifier: Apache-2.0
"""Trains GPT-2 on all GPUs of a machine under plain `jax.jit`: `make gpt`.

The batch is split over the mesh axis "data", heads and layers' widths over "model".
Where each parameter lies is said once, in `TENSOR_PARALLEL` and `spec_of`; the compiler
finds everything else. The text is the source of Python's standard library, NumPy, JAX
and Flax, byte by byte, so that nothing has to be downloaded. On two CPU cores the
default model is tiny and takes about two minutes.

  python examples/train_gpt.py --parallel fsdp --checkpoints runs/a
  python examples/train_gpt.py --parallel tensor --mesh 2x4 --size medium
"""

import argparse
import functools
import hashlib
import importlib.util
import math
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn
import jax_cudnn.flax

Parallel = Literal["data", "fsdp", "tensor"]
VOCABULARY = 256  # the text is bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the numbers of a run, but for rounding. Lengths are in bytes."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int  # over all devices together
    steps: int
    learning_rate: float
    dtype: str = "float32"  # of products and activations; parameters are f32
    seed: int = 0
    baseline: bool = False

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context


# Layers, width, heads, context and learning rate of the larger ones are GPT-2's and
# GPT-3's (arXiv:2005.14165, table 2.1). There are 256 tokens instead of 50,257.
SIZES = {
    "tiny": Settings(
        layers=2,
        width=192,
        heads=6,
        context=64,
        batch=8,
        steps=2000,
        learning_rate=3e-3,
    ),
    "small": Settings(
        layers=12,
        width=768,
        heads=12,
        context=1024,
        batch=32,
        steps=2000,
        learning_rate=6e-4,
    ),
    "medium": Settings(
        layers=24,
        width=1024,
        heads=16,
        context=1024,
        batch=32,
        steps=2000,
        learning_rate=3e-4,
    ),
    "large": Settings(
        layers=36,
        width=1280,
        heads=20,
        context=1024,
        batch=32,
        steps=2000,
        learning_rate=2.5e-4,
    ),
}

# Dense bf16 FLOP/s, from NVIDIA's data sheets.
PEAKS = {
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


# --- text -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text as bytes, with every tenth file held out."""

    source: str
    train: np.ndarray
    validation: np.ndarray

    @property
    def digest(self) -> str:
        """A name for this very text: a run goes on with the text that it began with."""
        parts = (self.train.tobytes(), self.validation.tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def source_folders() -> Iterator[Path]:
    """Yield folders with text that every machine has that can run this example."""
    yield Path(sysconfig.get_path("stdlib"))
    for name in ("numpy", "jax", "flax"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        yield Path(spec.submodule_search_locations[0])


def source_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder, but for tests and for tables of letters."""
    left_out = {"test", "tests", "idle_test", "encodings", "site-packages"}
    return sorted(
        path
        for path in folder.rglob("*.py")
        if not left_out & set(path.relative_to(folder).parts)
    )


def read_corpus(given: Path | None) -> Corpus:
    """Return the text of a file that the user gives, or else that of the sources."""
    if given is not None:
        text = np.frombuffer(given.read_bytes(), np.uint8)
        cut = len(text) * 9 // 10
        return Corpus(source=given.name, train=text[:cut], validation=text[cut:])
    paths = [path for folder in source_folders() for path in source_files(folder)]
    texts = [path.read_bytes() for path in paths]
    train = b"".join(text for i, text in enumerate(texts) if i % 10 != 9)
    return Corpus(
        source="sources of Python, NumPy, JAX and Flax",
        train=np.frombuffer(train, np.uint8),
        validation=np.frombuffer(b"".join(texts[9::10]), np.uint8),
    )


def batch_of(corpus: Corpus, settings: Settings, step: int) -> np.ndarray:
    """Return the stretches of one step, (batch, context + 1).

    They follow from seed and step alone, so that a resumed run sees the same ones.
    """
    rng = np.random.default_rng([settings.seed, step])
    starts = rng.integers(
        len(corpus.train) - settings.context, size=(settings.batch, 1)
    )
    return corpus.train[starts + np.arange(settings.context + 1)].astype(np.int32)


def validation_batches(corpus: Corpus, settings: Settings) -> np.ndarray:
    """Return stretches from all over the held-out text, (count, batch, context + 1)."""
    length = settings.context + 1
    count = min(16, len(corpus.validation) // (settings.batch * length))
    starts = np.linspace(
        0, len(corpus.validation) - length, count * settings.batch, dtype=np.int64
    )
    text = corpus.validation[starts[:, None] + np.arange(length)]
    return text.reshape(count, settings.batch, length).astype(np.int32)


def counting_losses(corpus: Corpus, held_out: np.ndarray) -> tuple[float, float]:
    """Return the losses of counting bytes, and of counting pairs of them, in nats."""
    codes = corpus.train[:-1].astype(np.int32) * VOCABULARY + corpus.train[1:]
    pairs = np.bincount(codes, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
    smooth = pairs + 0.1
    single = smooth.sum(0) / smooth.sum()
    after = smooth / smooth.sum(1, keepdims=True)
    first, second = held_out[..., :-1], held_out[..., 1:]
    return -np.log(single[second]).mean(), -np.log(after[first, second]).mean()


# --- model ----------------------------------------------------------------------------


class GeluLinear(nnx.Linear):
    """A dense layer, and a gelu behind it, as plain JAX has them."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        return jax.nn.gelu(super().__call__(inputs, out_sharding))


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Who computes attention, products, and the product with bias and gelu."""

    attention: Callable[..., jax.Array]
    dot_general: Callable[..., jax.Array]
    gelu_linear: Callable[..., nnx.Linear]


OURS = Kernels(
    attention=jax_cudnn.sdpa,
    dot_general=jax_cudnn.flax.dot_general,
    gelu_linear=functools.partial(jax_cudnn.flax.nnx.Linear, activation="gelu"),
)


def plain_kernels() -> Kernels:
    """Return what JAX has itself, cuDNN's attention on a GPU included."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return Kernels(
        attention=functools.partial(
            jax.nn.dot_product_attention, implementation=implementation
        ),
        dot_general=jax.lax.dot_general,
        gelu_linear=GeluLinear,
    )


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each on the normalised residual.

    Query, key and value are one product, whose columns begin with the head: a GPU that
    has some of the heads has whole columns. The products `out` and `down` sum over what
    is split by "model", so their bias and the residual are added behind that sum.
    """

    def __init__(self, settings: Settings, kernels: Kernels, rngs: nnx.Rngs):
        width, heads = settings.width, settings.heads
        self.kernels = kernels
        norm = functools.partial(
            nnx.LayerNorm, width, epsilon=1e-5, dtype=settings.dtype, rngs=rngs
        )
        common = {"dtype": settings.dtype, "rngs": rngs}
        first = {"kernel_init": nnx.initializers.normal(0.02), **common}
        # Each layer adds two terms to the residual.
        deviation = 0.02 / math.sqrt(2 * settings.layers)
        last = {
            "kernel_init": nnx.initializers.normal(deviation),
            "dot_general": kernels.dot_general,
            **common,
        }
        head = (heads, width // heads)
        self.attention_norm = norm()
        self.qkv = nnx.LinearGeneral(
            width, (heads, 3, head[1]), dot_general=kernels.dot_general, **first
        )
        self.out = nnx.LinearGeneral(head, width, axis=(-2, -1), **last)
        self.mlp_norm = norm()
        self.up = kernels.gelu_linear(width, 4 * width, **first)
        self.down = nnx.Linear(4 * width, width, **last)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv(self.attention_norm(x))
        query, key, value = (qkv[..., i, :] for i in range(3))
        heads = self.kernels.attention(query, key, value, is_causal=True)
        x = x + self.out(heads)
        return x + self.down(self.up(self.mlp_norm(x)))


class Gpt(nnx.Module):
    """GPT-2, without dropout; takes (batch, length) tokens and returns f32 logits."""

    def __init__(self, settings: Settings, kernels: Kernels, rngs: nnx.Rngs):
        width, dtype = settings.width, settings.dtype
        options = {"embedding_init": nnx.initializers.normal(0.02), "dtype": dtype}
        self.kernels = kernels
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs, **options)
        self.positions = nnx.Embed(settings.context, width, rngs=rngs, **options)
        self.blocks = nnx.List(
            Block(settings, kernels, rngs) for _ in range(settings.layers)
        )
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        # The embedding serves as the output layer too: (b, s, w) times (vocabulary, w).
        embedding = self.tokens.embedding[...].astype(x.dtype)
        return self.kernels.dot_general(
            x, embedding, (((2,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean loss in nats.

    The logits of the targets are summed out rather than looked up, so that GPUs that
    have parts of the vocabulary need not gather it.
    """
    hits = targets[..., None] == jnp.arange(VOCABULARY)
    chosen = jnp.sum(jnp.where(hits, logits, 0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def flops_per_token(params: nnx.State, settings: Settings) -> float:
    """Return the operations of one training step per token, those of products alone.

    6 for each number in a matrix (2 forward, 4 backward), and for attention the half of
    the scores that the causal mask leaves.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    matrices = sum(
        leaf.size
        for path, leaf in leaves
        if is_matrix(path) and "positions" not in name_of(path)
    )
    return 6 * matrices + 6 * settings.layers * settings.width * settings.context


# --- where everything lies ------------------------------------------------------------

# The axes of each parameter that are split over "model". First layers are split by
# their columns and last layers by their rows, so that a block needs one sum over the
# GPUs for attention and one for the perceptron. All other parameters are whole on each
# GPU.
TENSOR_PARALLEL = {
    "tokens.embedding": P("model", None),  # vocabulary, width
    "qkv.kernel": P(None, "model", None, None),  # width, heads, 3, head size
    "qkv.bias": P("model", None, None),  # heads, 3, head size
    "out.kernel": P("model", None, None),  # heads, head size, width
    "up.kernel": P(None, "model"),  # width, 4 width
    "up.bias": P("model"),  # 4 width
    "down.kernel": P("model", None),  # 4 width, width
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The devices as a mesh of "data" and "model", and what is split over them."""

    mesh: jax.sharding.Mesh
    parallel: Parallel

    @property
    def batch(self) -> NamedSharding:
        return NamedSharding(self.mesh, P("data"))

    def of_state(self, state: Any) -> Any:
        """Return where each array of parameters or of the optimizer is kept."""
        data = self.mesh.shape["data"] if self.parallel == "fsdp" else 1
        return self._shardings(state, data)

    def of_use(self, params: nnx.State) -> nnx.State:
        """Return where each parameter is when it is used: whole along "data"."""
        return self._shardings(params, 1)

    def _shardings(self, tree: Any, data: int) -> Any:
        def sharding(path: tuple[Any, ...], x: jax.Array) -> NamedSharding:
            return NamedSharding(self.mesh, spec_of(path, x.shape, data))

        return jax.tree_util.tree_map_with_path(sharding, tree)


def name_of(path: tuple[Any, ...]) -> str:
    """Return a parameter's name, such as blocks.0.qkv.kernel."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def is_matrix(path: tuple[Any, ...]) -> bool:
    return name_of(path).endswith(("kernel", "embedding"))


def spec_of(path: tuple[Any, ...], shape: tuple[int, ...], data: int) -> P:
    """Return how a parameter, or the optimizer's moment of it, is split.

    With `data` above 1 (FSDP), the longest axis of each matrix that can be split that
    often is split over "data".
    """
    name = name_of(path)
    rules = (rule for ending, rule in TENSOR_PARALLEL.items() if name.endswith(ending))
    axes = list(next(rules, P(*[None] * len(shape))))
    free = [i for i, x in enumerate(axes) if x is None and shape[i] % data == 0]
    if data > 1 and free and is_matrix(path):
        axes[max(free, key=lambda i: shape[i])] = "data"
    return P(*axes)


# --- training -------------------------------------------------------------------------


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint holds."""

    params: Any  # an nnx.State
    optimizer: optax.OptState
    losses: jax.Array  # (steps,) f32; NaN for steps to come
    step: jax.Array  # steps taken


class Trainer:
    """The compiled programs of one run."""

    def __init__(self, settings: Settings, layout: Layout):
        self._layout = layout
        kernels = plain_kernels() if settings.baseline else OURS
        schedule = optax.warmup_cosine_decay_schedule(
            0.0,
            settings.learning_rate,
            warmup_steps=max(settings.steps // 20, 1),
            decay_steps=settings.steps,
            end_value=settings.learning_rate / 10,
        )

        def matrices(params: nnx.State) -> Any:
            return jax.tree_util.tree_map_with_path(lambda p, _: is_matrix(p), params)

        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
        )

        def build() -> tuple[nnx.GraphDef, nnx.State]:
            return nnx.split(Gpt(settings, kernels, nnx.Rngs(settings.seed)), nnx.Param)

        def initial() -> TrainState:
            params = build()[1]
            return TrainState(
                params=params,
                optimizer=optimizer.init(params),
                losses=jnp.full(settings.steps, jnp.nan),
                step=jnp.zeros((), jnp.int32),
            )

        graph = nnx.split(
            nnx.eval_shape(lambda: Gpt(settings, kernels, nnx.Rngs(0))), nnx.Param
        )[0]

        def loss(params: nnx.State, text: jax.Array) -> jax.Array:
            # The matrices are converted before FSDP gathers them: half the bytes.
            params = jax.tree_util.tree_map_with_path(
                lambda p, x: x.astype(settings.dtype) if is_matrix(p) else x, params
            )
            params = jax.lax.with_sharding_constraint(params, layout.of_use(params))
            logits = nnx.merge(graph, params)(text[:, :-1])
            return cross_entropy(logits, text[:, 1:])

        def step(state: TrainState, text: jax.Array) -> tuple[TrainState, jax.Array]:
            value, gradient = jax.value_and_grad(loss)(state.params, text)
            updates, moments = optimizer.update(gradient, state.optimizer, state.params)
            after = TrainState(
                params=optax.apply_updates(state.params, updates),
                optimizer=moments,
                losses=state.losses.at[state.step].set(value),
                step=state.step + 1,
            )
            return after, value

        shapes = jax.eval_shape(initial)
        places = layout.of_state(shapes)
        whole = NamedSharding(layout.mesh, P())
        self.shapes: TrainState = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            places,
        )
        self.initial = jax.jit(initial, out_shardings=places)
        text = jax.ShapeDtypeStruct(
            (settings.batch, settings.context + 1), jnp.int32, sharding=layout.batch
        )
        self.step = (
            jax.jit(step, donate_argnums=0, out_shardings=(places, whole))
            .lower(self.shapes, text)
            .compile()
        )
        self._loss = jax.jit(loss, out_shardings=whole)

    def place(self, text: np.ndarray) -> jax.Array:
        """Return a batch on the devices, a part of the rows on each."""
        return jax.device_put(text, self._layout.batch)

    def validate(self, params: nnx.State, batches: np.ndarray) -> float:
        """Return the mean loss over the batches."""
        return float(np.mean([self._loss(params, self.place(x)) for x in batches]))


def describe_program(program: Any) -> str:
    """Return the collectives and the memory of a compiled step."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" ({names})(?:-start)?\(", program.as_text())
    counts = ", ".join(f"{found.count(name)} {name}" for name in sorted(set(found)))
    memory = program.memory_analysis()
    told = f"collectives of a step: {counts or 'none'}"
    if memory is not None:
        state, scratch = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        told += (
            f"; per device {state / 2**20:,.0f} MiB of state and batch, "
            f"{scratch / 2**20:,.0f} MiB of scratch"
        )
    return told


def peak_flops(layout: Layout, settings: Settings) -> float | None:
    """Return the FLOP/s that the devices reach at best together, where it is known."""
    kind = layout.mesh.devices.flat[0].device_kind
    peaks = (peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", kind))
    peak = next(peaks, None) if settings.dtype == "bfloat16" else None
    return None if peak is None else peak * layout.mesh.size


class Progress:
    """A line that is redrawn in a terminal, and a line per twentieth elsewhere."""

    def __init__(self, settings: Settings, flops_per_token: float, peak: float | None):
        self._settings = settings
        self._is_terminal = sys.stdout.isatty()
        self._flops_per_token = flops_per_token
        self._peak = peak
        self._times: list[float] = []  # of each step, s
        self._last: float | None = None

    def show(self, done: int, loss: float, *, is_last: bool) -> None:
        """Note that a step is over, and tell of it now and then."""
        now = time.perf_counter()
        # The first step has no beginning here. The last one ran while the step before
        # was told of.
        if self._last is not None and not is_last:
            self._times.append(now - self._last)
        self._last = now
        steps = self._settings.steps
        every = max(steps // (200 if self._is_terminal else 20), 1)
        if not (is_last or done % every == 0):
            return
        line = f"  {done:>6}/{steps}  loss {loss:.3f}"
        if recent := self._times[-every:]:
            left = (steps - done) * statistics.median(recent)
            line += f"  {self._speed(recent)}  {left:3.0f} s left"
        if self._is_terminal:
            print(f"\r{line}", end="\n" if is_last else "", flush=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Tell how fast it was."""
        if self._times:
            print(f"  {self._speed(self._times)}, the median of {len(self._times)}")

    def _speed(self, times: list[float]) -> str:
        """Return the median time of a step and what follows from it."""
        seconds = statistics.median(times)
        rate = self._settings.tokens_per_step / seconds
        told = f"{1e3 * seconds:,.1f} ms a step, {rate:,.0f} tokens/s"
        if self._peak is None:
            return told
        return (
            f"{told}, {100 * self._flops_per_token * rate / self._peak:.1f} % of peak"
        )


# --- checkpoints and picture ----------------------------------------------------------


class Checkpoints:
    """The states of a run in a folder, written by orbax while training goes on."""

    def __init__(self, folder: Path, recorded: dict[str, Any]):
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._recorded = recorded
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self._latest = self._manager.latest_step()
        if self._latest is not None:
            args = self._args.Composite(recorded=self._args.JsonRestore())
            kept = self._manager.restore(self._latest, args=args)["recorded"]
            if differing := [
                f"{name} was {kept.get(name)} and is {value}"
                for name, value in recorded.items()
                if kept.get(name) != value
            ]:
                sys.exit(
                    f"{folder} holds a run with other settings: {'; '.join(differing)}."
                    " Pass the settings of that run, or another folder."
                )

    def restore(self, shapes: TrainState) -> TrainState | None:
        """Return the latest state, if there is one, placed as the shapes say."""
        if self._latest is None:
            return None
        args = self._args.Composite(state=self._args.StandardRestore(shapes))
        return self._manager.restore(self._latest, args=args)["state"]

    def save(self, step: int, state: TrainState) -> None:
        """Begin to write a state. It is copied first, so the next step may start."""
        args = self._args
        self._manager.save(
            step,
            args=args.Composite(
                state=args.StandardSave(state), recorded=args.JsonSave(self._recorded)
            ),
        )

    def close(self) -> None:
        """Wait until all is written."""
        self._manager.close()


def draw_losses(
    path: Path, losses: np.ndarray, lines: dict[str, float], title: str
) -> None:
    """Write the loss curve as a picture, with horizontal lines to compare it with."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    window = max(len(losses) // 50, 1)
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    axes.plot(np.arange(1, len(losses) + 1), losses, color="C0", alpha=0.3, lw=0.8)
    axes.plot(np.arange(window, len(losses) + 1), smooth, color="C0", label="training")
    for i, (label, value) in enumerate(lines.items()):
        axes.axhline(value, color=f"C{i + 1}", ls="--", label=f"{label}: {value:.3f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)


def is_missing(package: str) -> bool:
    """Tell whether a package that only part of this example needs is not installed."""
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # the package that it would lie in
        return True


# --- the whole ------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--size",
        choices=SIZES,
        default="small" if jax.default_backend() == "gpu" else "tiny",
        help="default: small on a GPU, else tiny; the next flags change parts of it",
    )
    for name in ("layers", "width", "heads", "context", "batch", "steps"):
        add(f"--{name}", type=int)
    add("--learning-rate", type=float)
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16" if jax.default_backend() == "gpu" else "float32",
        help="of products; default: bfloat16 on a GPU, else float32, which CPUs prefer",
    )
    add("--seed", type=int, default=0)
    add(
        "--parallel",
        choices=get_args(Parallel),
        default="data",
        help="data: parameters are whole on each device (default); fsdp: they are "
        'split over "data"; tensor: they are split over "model"',
    )
    add(
        "--mesh",
        metavar="DATAxMODEL",
        help="default: all devices along data, or for tensor along model",
    )
    add(
        "--baseline",
        action="store_true",
        help="the same in plain JAX, without jax_cudnn",
    )
    add("--text", type=Path, metavar="FILE", help="train on this file instead")
    add(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="save here, and continue what is here",
    )
    add("--save-every", type=int, default=500, metavar="STEPS", help="default: 500")
    add("--stop-at", type=int, metavar="STEP", help="end early, to continue later")
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="where the loss curve goes; default: train_gpt.png",
    )
    arguments = parser.parse_args(argv)
    needed = {"orbax.checkpoint": "checkpoints", "matplotlib": "picture"}
    for package, flag in needed.items():
        if getattr(arguments, flag) is not None and is_missing(package):
            parser.error(
                f"--{flag}: the package {package} is not installed. Run: pip install "
                f"{package.replace('.', '-')}, or leave --{flag} out"
            )
    for flag in ("save_every", "stop_at"):
        if (value := getattr(arguments, flag)) is not None and value < 1:
            name = flag.replace("_", "-")
            parser.error(f"--{name} {value}: it must be at least 1")
    try:
        arguments.settings = choose_settings(arguments)
        arguments.layout = choose_layout(arguments, arguments.settings)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def choose_settings(arguments: argparse.Namespace) -> Settings:
    """Return the size that was asked for, with what was asked for beyond that."""
    given = vars(arguments)
    chosen = asdict(SIZES[arguments.size])
    for field in fields(Settings):
        if given.get(field.name) is not None:
            chosen[field.name] = given[field.name]
    settings = Settings(**chosen)
    for name in ("layers", "width", "heads", "context", "batch", "steps"):
        if chosen[name] < 1:
            raise ValueError(f"--{name} {chosen[name]}: it must be at least 1")
    if settings.width % settings.heads:
        raise ValueError(
            f"--width {settings.width} is not a multiple of --heads {settings.heads}"
        )
    return settings


def choose_layout(arguments: argparse.Namespace, settings: Settings) -> Layout:
    """Return the mesh that was asked for, or one of all devices."""
    devices = jax.devices()
    if arguments.mesh is not None:
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", arguments.mesh)
        if found is None:
            raise ValueError(f"--mesh {arguments.mesh}: write it as 4x2")
        data, model = map(int, found.groups())
    else:
        is_tensor = arguments.parallel == "tensor"
        model = math.gcd(len(devices), settings.heads) if is_tensor else 1
        data = len(devices) // model
    mesh = f"the mesh {data}x{model}"
    if data * model > len(devices):
        raise ValueError(f"{mesh} needs more than the {len(devices)} devices here")
    if settings.batch % data:
        raise ValueError(f"{mesh}: {data} does not divide --batch {settings.batch}")
    if settings.heads % model or VOCABULARY % model:
        raise ValueError(
            f"{mesh}: {model} does not divide both --heads {settings.heads} and the "
            f"{VOCABULARY} tokens"
        )
    if arguments.parallel == "data" and model > 1:
        raise ValueError(
            f'{mesh}: --parallel data leaves "model" without work. Pass --parallel '
            f"tensor or fsdp, or --mesh {data * model}x1"
        )
    return Layout(
        mesh=jax.make_mesh(
            (data, model),
            ("data", "model"),
            axis_types=(AxisType.Auto, AxisType.Auto),
            devices=devices[: data * model],
        ),
        parallel=arguments.parallel,
    )


def print_run(settings: Settings, layout: Layout, corpus: Corpus, count: int) -> None:
    devices = list(layout.mesh.devices.flat)
    shape = " x ".join(f"{size} {name}" for name, size in layout.mesh.shape.items())
    print(f"Devices     {len(devices)} {devices[0].device_kind}, as a mesh of {shape}")
    print(
        f"Text        {corpus.source}: {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.validation):,} held out"
    )
    print(
        f"Model       {count:,} parameters: {settings.layers} layers of width "
        f"{settings.width}, {settings.heads} heads, context {settings.context}, "
        f"{settings.dtype}"
    )
    who = "plain JAX" if settings.baseline else "jax_cudnn"
    print(
        f"Training    {settings.steps} steps of {settings.tokens_per_step:,} bytes, "
        f"{layout.parallel}-parallel, with {who}"
    )


def train(
    trainer: Trainer,
    corpus: Corpus,
    settings: Settings,
    arguments: argparse.Namespace,
    progress: Progress,
    checkpoints: Checkpoints | None,
) -> TrainState:
    """Take the steps that are left, and return the last state."""
    state = checkpoints.restore(trainer.shapes) if checkpoints else None
    if state is not None:
        print(f"Continuing  at step {int(state.step)} of {arguments.checkpoints}")
    state = trainer.initial() if state is None else state
    first, last = int(state.step), settings.steps
    if arguments.stop_at is not None:
        last = min(last, arguments.stop_at)
    before = None  # the step before, which is waited for while the next one runs
    for done in range(first + 1, last + 1):
        text = trainer.place(batch_of(corpus, settings, done - 1))
        state, loss = trainer.step(state, text)
        if before is not None:
            progress.show(done - 1, float(before), is_last=False)
        before = loss
        if checkpoints and (done % arguments.save_every == 0 or done == last):
            checkpoints.save(done, state)
    if before is not None:
        progress.show(last, float(before), is_last=True)
    progress.close()
    return state


def run(argv: list[str] | None = None) -> TrainState:
    """Train as the arguments say, and return the last state."""
    arguments = parse_arguments(argv)
    settings, layout = arguments.settings, arguments.layout
    corpus = read_corpus(arguments.text)
    held_out = validation_batches(corpus, settings)
    recorded = {**asdict(settings), "text": corpus.digest}
    checkpoints = (
        Checkpoints(arguments.checkpoints, recorded) if arguments.checkpoints else None
    )

    start = time.perf_counter()
    trainer = Trainer(settings, layout)
    compiled = time.perf_counter() - start
    params = trainer.shapes.params
    print_run(settings, layout, corpus, sum(x.size for x in jax.tree.leaves(params)))
    print(f"Program     compiled in {compiled:.1f} s; {describe_program(trainer.step)}")

    progress = Progress(
        settings, flops_per_token(params, settings), peak_flops(layout, settings)
    )
    state = train(trainer, corpus, settings, arguments, progress, checkpoints)
    if checkpoints:
        checkpoints.close()

    unigram, bigram = counting_losses(corpus, held_out)
    after = trainer.validate(state.params, held_out)
    print("\nLoss on held-out text, in nats per byte:")
    print(f"  counting bytes  {unigram:.3f}")
    print(f"  counting pairs  {bigram:.3f}")
    verdict = "better than pairs" if after < bigram else "not yet better than pairs"
    print(f"  this model      {after:.3f}  {verdict} by {abs(bigram - after):.3f}")

    if arguments.picture is None and is_missing("matplotlib"):
        print("\nNo picture of the losses: the package matplotlib is not installed.")
        return state
    path = arguments.picture or Path("train_gpt.png")
    losses = np.asarray(state.losses)[: int(state.step)]
    lines = {"held out": after, "counting pairs": bigram}
    draw_losses(path, losses, lines, f"GPT-2, {settings.layers} layers")
    print(f"\nThe losses are drawn in {path}")
    return state


if __name__ == "__main__":
    run()
