# SPDX-License-Identifier: Apache-2.0
"""Tests that the cache is where the user says, and untouched before it is needed."""

from pathlib import Path

import pytest

from jax_cudnn import cache, plans
from tests.native.processes import run_python

pytestmark = pytest.mark.once

_ASK = """
from jax_cudnn import plans
info = plans.cache_info()
print(info.directory, info.limit_bytes)
"""


def _ask(directory: str = "", limit: str = "", **environment: str) -> str:
    return run_python(
        _ASK,
        JAX_CUDNN_CACHE_DIR=directory,
        JAX_CUDNN_CACHE_LIMIT=limit,
        **environment,
    )


def test_the_default_is_the_user_s_cache_folder(tmp_path: Path) -> None:
    found = _ask(XDG_CACHE_HOME=str(tmp_path))
    assert found == f"{tmp_path}/jax_cudnn {1 << 30}"
    assert not list(tmp_path.iterdir()), "asking makes nothing"
    found = _ask(XDG_CACHE_HOME="", HOME=str(tmp_path))
    assert found == f"{tmp_path}/.cache/jax_cudnn {1 << 30}"


def test_the_environment_names_a_folder_and_a_limit(tmp_path: Path) -> None:
    assert _ask(f"{tmp_path}/here", "12345") == f"{tmp_path}/here 12345"
    assert _ask("~/there", HOME=str(tmp_path)) == f"{tmp_path}/there {1 << 30}"


@pytest.mark.parametrize("off", ["off", "OFF"])
def test_the_environment_turns_it_off(off: str) -> None:
    assert _ask(off) == f"None {1 << 30}"


def test_a_limit_that_is_no_number_is_said_and_ignored() -> None:
    head = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
"""
    output = run_python(head + _ASK, JAX_CUDNN_CACHE_LIMIT="2G")
    assert output.splitlines() == [
        "WARNING JAX_CUDNN_CACHE_LIMIT='2G' is not a number of bytes; "
        "plans may take 1073741824",
        "None 1073741824",
    ]


def test_the_environment_is_read_late_and_once(tmp_path: Path) -> None:
    output = run_python(
        f"""
        import os
        import jax_cudnn
        from jax_cudnn import cache
        from jax_cudnn.native._extension import extension
        os.environ["JAX_CUDNN_CACHE_DIR"] = {str(tmp_path / "late")!r}
        extension().testing.store_put(b"key", b"plan")  # the extension asks
        os.environ["JAX_CUDNN_CACHE_DIR"] = "off"
        print(cache.settings().directory)
        print(len(list(cache.settings().plans.iterdir())))
        """
    )
    assert output.split() == [f"{tmp_path}/late", "1"]


def test_importing_and_computing_make_no_folder(tmp_path: Path) -> None:
    run_python(
        """
        import jax, jax.numpy as jnp, jax_cudnn
        x = jnp.ones((4, 4))
        jax.jit(lambda x: jax_cudnn.matmul(x, x))(x)
        jax.jit(lambda x: jax_cudnn.matmul(x, x)).trace(x).lower(
            lowering_platforms=("cuda",))
        """,
        JAX_CUDNN_CACHE_DIR=str(tmp_path / "cache"),
        JAX_PLATFORMS="cpu",
    )
    assert not list(tmp_path.iterdir())


def test_set_cache_goes_before_the_environment(tmp_path: Path) -> None:
    try:
        plans.set_cache(tmp_path / "set", limit_bytes=77)
        info = plans.cache_info()
        assert info.directory == tmp_path / "set"
        assert (info.limit_bytes, info.plans, info.plan_bytes) == (77, 0, 0)
        assert not list(tmp_path.iterdir())
    finally:
        plans.set_cache(None)
    assert plans.cache_info().directory is None
    assert plans.cache_info().limit_bytes == cache.DEFAULT_LIMIT_BYTES


def test_a_negative_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^set_cache: limit_bytes=-1 is not"):
        plans.set_cache(tmp_path, limit_bytes=-1)


def test_the_snippets_of_the_guide_run() -> None:
    page = Path(__file__).parents[2] / "docs" / "plan_files.md"
    parts = page.read_text().split("```python\n")[1:]
    snippets = [part.partition("```")[0] for part in parts]
    assert len(snippets) == 3
    # On the CPU nothing is planned, and the snippet says so.
    output = run_python("\n".join(snippets), JAX_PLATFORMS="cpu")
    assert output == "plans.warmup needs an NVIDIA GPU; JAX sees none here."
