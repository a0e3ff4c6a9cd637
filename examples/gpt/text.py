# SPDX-License-Identifier: Apache-2.0
"""Reads the text to learn, and computes losses that a model has to beat."""

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt.settings import VOCABULARY, Settings


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


def read_corpus(given: Path | None, settings: Settings) -> Corpus:
    """Return the text of a file that the user gives, or else that of the sources."""
    if given is not None:
        text = np.frombuffer(given.read_bytes(), np.uint8)
        cut = len(text) * 9 // 10
        if len(text) - cut <= settings.context:
            raise ValueError(
                f"{len(text)} bytes are too few: a tenth is held out, and that has to "
                f"be longer than the context of {settings.context}"
            )
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
    count = max(1, min(16, len(corpus.validation) // (settings.batch * length)))
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
