# SPDX-License-Identifier: Apache-2.0
"""`plans.log`: one switch for the log of the package, its C++ side and cuDNN."""

import logging

from jax_cudnn import native

_LOGGER = logging.getLogger("jax_cudnn")
_CUDNN_LOGGER = logging.getLogger("jax_cudnn.cudnn")
_FORMAT = "%(levelname)s %(name)s: %(message)s"

# Ours, where we had to add one.
_handler: logging.Handler | None = None


def log(level: int | str | None = "DEBUG", *, cudnn: bool = False) -> None:
    """Log what jax_cudnn does, through Python's ``logging``.

    The logger "jax_cudnn" says at INFO which calls run with XLA, and why. At DEBUG it
    says what is planned: plans that are not in the cache, candidates that fail or are
    not allowed, with cuDNN's reasons, and the plans that were built, with their times
    and workspaces. Without this function, the configuration of ``logging`` decides
    which lines of the Python side are shown, and the C++ side is silent.

    A handler that writes to stderr is added only where no handler would see the lines:
    programs that configure ``logging`` keep their configuration.

    Args:
      level: the lowest level to log, a name or number of ``logging``. Default "DEBUG".
        None undoes this: the C++ side is silent again, and the level of the logger is
        unset.
      cudnn: whether to log cuDNN's own messages too, as logger "jax_cudnn.cudnn".
        cuDNN's warnings and errors are logged at these levels. At DEBUG, every call of
        cuDNN's API is logged, including calls by other code in the process, which takes
        time in each launch. Default False.

    Raises:
      ValueError: ``level`` is not a level of ``logging``.
      LibraryError: ``cudnn`` is requested and there is no libcudnn.

    Example:
      >>> from jax_cudnn import plans
      >>> plans.log("INFO")
      >>> plans.log(None)
    """
    if level is None:
        native.set_log_sink(None)
        _LOGGER.setLevel(logging.NOTSET)
        _remove_handler()
        return
    try:
        number = logging.Logger(_LOGGER.name, level).level
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"plans.log: {level!r} is not a level of logging. Pass DEBUG, INFO, "
            "WARNING, ERROR or CRITICAL, or a number; None undoes it."
        ) from error
    native.set_log_sink(_write, number, cudnn=cudnn)
    _LOGGER.setLevel(number)
    if not _LOGGER.hasHandlers():
        _add_handler()


def _write(level: int, text: str, source: str) -> None:
    (_CUDNN_LOGGER if source == "cudnn" else _LOGGER).log(level, "%s", text)


def _add_handler() -> None:
    global _handler
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter(_FORMAT))
    _LOGGER.addHandler(_handler)


def _remove_handler() -> None:
    global _handler
    if _handler is not None:
        _LOGGER.removeHandler(_handler)
        _handler = None
