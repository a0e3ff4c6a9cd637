# SPDX-License-Identifier: Apache-2.0
"""`plans.set_cache` and its like: what is kept between processes, and where."""

from dataclasses import dataclass
from pathlib import Path

from jax_cudnn import cache, choices, native
from jax_cudnn.lowering.decision import forget_decisions


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheInfo:
    """What ``cache_info`` found.

    ``directory`` is the cache folder, None where nothing is kept; ``plans`` and
    ``plan_bytes`` are the plan files in it, ``choices`` the measured choices.
    ``stats`` counts, since the process began, plans built, found and kept.
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

    Goes before the environment variables ``JAX_CUDNN_CACHE_DIR`` (a folder, or "off")
    and ``JAX_CUDNN_CACHE_LIMIT`` (bytes), and the default: the user's cache folder as
    platformdirs names it (``~/.cache/jax_cudnn``). Choices that the folder has are
    used at once. The folder is made when there is something to keep.

    The folder may be shared by processes that run at once. Its plans hold native code:
    files that belong to other users, or that they may write, are not read.

    Args:
      directory: the folder; None keeps nothing between processes.
      limit_bytes: what plan files may take together. Above that, those go that were
        not used for longest. Default 1 GiB.

    Raises:
      ValueError: ``limit_bytes`` is negative.
      TypeError: it is not an int, or ``directory`` not a path.
    """
    _check_limit(limit_bytes)
    _check_directory(directory)
    folder = None if directory is None else Path(directory).expanduser().absolute()
    cache.configure(cache.Settings(directory=folder, limit_bytes=limit_bytes))
    choices.table().add(choices.kept())


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
    """Forget this process's plans; with ``disk``, what the cache folder holds too.

    Compiled functions keep the plans that they have, and the process its choices.
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
