# SPDX-License-Identifier: Apache-2.0
"""Reads the text to learn, and computes losses that a model has to beat."""

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from language.settings import BYTES, Settings


class Rows(NamedTuple):
    """Stretches of text, (batch, context + 1), and the document of each byte."""

    text: np.ndarray
    documents: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Texts one after another, as bytes, and where each of them starts."""

    text: np.ndarray
    starts: np.ndarray

    def rows(self, first: np.ndarray, length: int) -> Rows:
        """Return stretches that begin at the given bytes, (..., 1)."""
        places = first + np.arange(length)
        documents = np.searchsorted(self.starts, places, side="right") - 1
        return Rows(self.text[places].astype(np.int32), documents.astype(np.int32))

    def most_in(self, length: int) -> int:
        """Return how many documents a stretch of so many bytes has at most."""
        starts = np.unique(self.starts[self.starts < len(self.text)])
        ends = np.append(starts[1:], len(self.text))
        # The stretches that begin with the last byte of a document have most.
        reached = np.searchsorted(starts, ends - 1 + length)
        return int(np.max(reached - np.arange(len(starts)), initial=1))


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text to train on, and the text that is held out."""

    source: str
    train: Documents
    validation: Documents

    def most_documents(self, length: int) -> int:
        """Return how many documents a stretch of so many bytes has at most."""
        return max(self.train.most_in(length), self.validation.most_in(length))

    @property
    def digest(self) -> str:
        """A name for this very text: a run goes on with the text that it began with."""
        parts = (self.train.text.tobytes(), self.validation.text.tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def documents_of(texts: Sequence[bytes]) -> Documents:
    """Join texts."""
    sizes = [len(text) for text in texts]
    return Documents(
        text=np.frombuffer(b"".join(texts), np.uint8),
        starts=np.cumsum([0, *sizes[:-1]]),
    )


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
    """Return the text of a file or folder that the user gives, or of the sources.

    A tenth is held out. Each file of a folder is a document, and so is each source.
    """
    if given is None:
        paths = [path for folder in source_folders() for path in source_files(folder)]
        source = "sources of Python, NumPy, JAX and Flax"
    elif given.is_dir():
        paths = sorted(path for path in given.iterdir() if path.is_file())
        source = f"{len(paths)} files of {given.name}"
    else:
        return _of_one(given, settings)
    texts = [path.read_bytes() for path in paths]
    train = documents_of([text for i, text in enumerate(texts) if i % 10 != 9])
    validation = documents_of(texts[9::10] or [b""])
    _check_length(len(validation.text), settings, len(train.text))
    return Corpus(source=source, train=train, validation=validation)


def _of_one(path: Path, settings: Settings) -> Corpus:
    text = path.read_bytes()
    cut = len(text) * 9 // 10
    _check_length(len(text) - cut, settings, cut)
    return Corpus(
        source=path.name,
        train=documents_of([text[:cut]]),
        validation=documents_of([text[cut:]]),
    )


def _check_length(held_out: int, settings: Settings, others: int) -> None:
    if min(held_out, others) <= settings.context:
        raise ValueError(
            f"{held_out + others} bytes are too few: a tenth is held out, and that has "
            f"to be longer than the context of {settings.context}; of a folder it is "
            "every tenth file"
        )


def batch_of(corpus: Corpus, settings: Settings, step: int) -> Rows:
    """Return the stretches of one step.

    They follow from seed and step alone, so that a resumed run sees the same ones.
    """
    rng = np.random.default_rng([settings.seed, step])
    first = rng.integers(
        len(corpus.train.text) - settings.context, size=(settings.batch, 1)
    )
    return corpus.train.rows(first, settings.context + 1)


def validation_batches(corpus: Corpus, settings: Settings) -> list[Rows]:
    """Return stretches from all over the held-out text, at most 16 batches."""
    length, size = settings.context + 1, len(corpus.validation.text)
    count = max(1, min(16, size // (settings.batch * length)))
    starts = np.linspace(0, size - length, count * settings.batch, dtype=np.int64)
    return [
        corpus.validation.rows(first[:, None], length)
        for first in starts.reshape(count, settings.batch)
    ]


def counting_losses(corpus: Corpus, held_out: Sequence[Rows]) -> tuple[float, float]:
    """Return the losses of counting bytes, and of counting pairs of them, in nats."""
    train = corpus.train.text
    codes = train[:-1].astype(np.int32) * BYTES + train[1:]
    pairs = np.bincount(codes, minlength=BYTES**2).reshape(BYTES, BYTES)
    smooth = pairs + 0.1
    single = smooth.sum(0) / smooth.sum()
    after = smooth / smooth.sum(1, keepdims=True)
    text = np.stack([rows.text for rows in held_out])
    first, second = text[..., :-1], text[..., 1:]
    return -np.log(single[second]).mean(), -np.log(after[first, second]).mean()
