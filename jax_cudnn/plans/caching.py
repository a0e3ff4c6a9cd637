# SPDX-License-Identifier: Apache-2.0
"""`plans.set_cache` and its like: what is kept between processes, and where."""

from dataclasses import dataclass
from pathlib import Path

from jax_cudnn import cache, choices, native
from jax_cudnn.lowering.decision import forget_decisions
from jax_cudnn.policy import own


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheInfo:
    """The result of ``cache_info``.

    ``directory`` is the cache folder, or None where nothing is kept. ``plans`` and
    ``plan_bytes`` are the number and the size of the plan files in the folder, and
    ``choices`` is the number of measured choices. ``stats`` counts the plans that were
    built, found and kept since the process began.
    """

    directory: Path | None
    limit_bytes: int
    plans: int
    plan_bytes: int
    choices: int
    stats: native.CacheStats


def set_cache(
    directory: str | Path | None, *, limit_bytes: int = cache.DEFAULT_LIMIT_BYTES
) -> None:
    """Keep plans and measured choices in a folder from now on, or nowhere.

    This overrides the environment variables ``JAX_CUDNN_CACHE_DIR`` (a folder, or
    "off") and ``JAX_CUDNN_CACHE_LIMIT`` (bytes). It also overrides the default, the
    user's cache folder as platformdirs names it (``~/.cache/jax_cudnn``). Choices that
    the folder has are used at once. The folder is made when there is something to keep.

    Processes that run at once may share the folder. Its plans contain native code, so
    files that belong to other users, or that other users may write, are not read.

    Args:
      directory: the folder; None keeps nothing between processes.
      limit_bytes: the most bytes that all plan files may take together. Above this
        limit, the least recently used are removed. Default 1 GiB.

    Raises:
      ValueError: ``limit_bytes`` is negative.
      TypeError: ``limit_bytes`` is not an int, or ``directory`` is not a path.
    """
    _check_limit(limit_bytes)
    _check_directory(directory)
    folder = None if directory is None else Path(directory).expanduser().absolute()
    cache.configure(cache.Settings(directory=folder, limit_bytes=limit_bytes))
    choices.table().add(choices.kept())
    own.forget()
    forget_decisions()


def _check_limit(limit_bytes: object) -> None:
    refusal = (
        f"set_cache: limit_bytes={limit_bytes!r} is not a number of bytes. Pass an int "
        "that is 0 or more, for example 1 << 30 for 1 GiB."
    )
    if not isinstance(limit_bytes, int) or isinstance(limit_bytes, bool):
        raise TypeError(refusal)
    if limit_bytes < 0:
        raise ValueError(refusal)


def _check_directory(directory: object) -> None:
    if not isinstance(directory, str | Path | None):
        raise TypeError(
            f"set_cache: directory={directory!r} is not a path. Pass a str or a "
            "pathlib.Path, or None to keep nothing."
        )


def clear_cache(*, disk: bool = False) -> None:
    """Forget this process's plans; with ``disk``, also the contents of the cache
    folder.

    Compiled functions keep the plans that they have. The process keeps its choices.
    What was calibrated stays: ``jax-cudnn calibrate --forget`` removes it.
    """
    native.clear_cache()
    forget_decisions()
    if disk:
        native.clear_plan_store()
        for path in choices.kept_files():
            path.unlink(missing_ok=True)


def cache_info() -> CacheInfo:
    """Return where plans and choices are kept, and how many; see ``CacheInfo``."""
    settings = cache.settings()
    plans, plan_bytes = native.plan_store_files()
    return CacheInfo(
        directory=settings.directory,
        limit_bytes=settings.limit_bytes,
        plans=plans,
        plan_bytes=plan_bytes,
        choices=len(choices.kept()),
        stats=native.cache_stats(),
    )
