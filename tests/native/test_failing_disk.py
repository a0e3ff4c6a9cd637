# SPDX-License-Identifier: Apache-2.0
"""Tests the cache after a process was killed, or the disk full, at any step.

The steps are the calls that change the disk. A library that is preloaded counts them,
and fails at a chosen one.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from jax_cudnn.native._extension import extension
from tests.native.processes import run_python

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
]

# Tries an action on a fresh folder with a fault at each of its steps, in a process of
# its own, and then checks what there is. Prints how many steps there are.
_EACH_STEP = """
import ctypes, os, shutil, signal, sys, time
from pathlib import Path

disk = ctypes.CDLL({library!r})
folder = Path({folder!r})
FULL, KILLED = 1, 2  # as failing_disk.c counts them

def attempt(action, how, step):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            disk.arm(how, step)
            action()
            status = 100 + disk.disarm()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]

def each_step(prepare, action, check):
    for is_first in (True, False):
        for how in (FULL, KILLED):
            print(steps_of(how, is_first, prepare, action, check))

def steps_of(how, is_first, prepare, action, check):
    for step in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        prepare(is_first)
        status = attempt(action, how, step)
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        steps = None if is_killed else os.WEXITSTATUS(status) - 100
        assert is_killed or steps >= 0, status
        has_fault = is_killed or steps > step
        assert has_fault or steps == step
        assert is_killed == (has_fault and how == KILLED), (step, status)
        temporaries = list(folder.glob("tmp-*"))
        assert not temporaries or is_killed, "who goes on removes them"
        check(is_first, has_fault)
        if not has_fault:
            return steps
    raise AssertionError("it has no end")
"""

# Needs the extension alone: the package takes longer to import than all of the work.
_PLANS = """
import importlib.util

spec = importlib.util.spec_from_file_location("_ffi", {extension!r})
ffi = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ffi)
OLD, NEW, OTHER = b"an old plan", b"x" * 5000, b"another plan"
put, get = ffi.testing.store_put, ffi.testing.store_get

def configure(limit):
    ffi.set_plan_store(str(folder).encode(), limit)

def prepare(is_first):
    configure(1 << 20)
    if is_first:
        return
    put(b"other", OTHER)
    old = time.time() - 60
    for path in folder.iterdir():
        os.utime(path, (old, old))
    put(b"key", OLD)

def save():
    configure(len(NEW) + 50)  # so that the other plan has to go
    put(b"key", NEW)

def check(is_first, has_fault):
    before = ffi.cache_stats()["disk_failures"]
    found = get(b"key")
    assert found == NEW or (has_fault and found == (None if is_first else OLD)), found
    other = None if is_first else OTHER
    assert get(b"other") == other or (found == NEW and get(b"other") is None)
    long_ago = time.time() - 7200
    for path in folder.glob("tmp-*"):
        os.utime(path, (long_ago, long_ago))
    configure(1 << 20)
    put(b"key", NEW)
    assert get(b"key") == NEW
    assert ffi.cache_stats()["disk_failures"] == before
    assert not list(folder.glob("tmp-*"))

each_step(prepare, save, check)
"""

_CHOICES = """
from jax_cudnn import choices, plans
from jax_cudnn.choices import Choice, Key

FIRST, SECOND, THIRD = (
    {{Key("GPU", number, "g" * 100): Choice(op="", operands="", implementation="xla")}}
    for number in range(3)
)
plans.set_cache(folder)

def prepare(is_first):
    if not is_first:
        choices.remember(FIRST)

def remember():
    choices.remember(SECOND)

def check(is_first, has_fault):
    old = {{}} if is_first else FIRST
    assert choices.kept() == old | SECOND or (has_fault and choices.kept() == old)
    kept = choices.kept()
    choices.remember(THIRD)
    assert choices.kept() == kept | THIRD
    names = {{path.name for path in folder.iterdir()}}
    assert names == {{"lock", choices.kept_file().name}}

each_step(prepare, remember, check)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the disk that fails."""
    path = tmp_path_factory.mktemp("library") / "failing_disk.so"
    source = Path(__file__).parent / "programs" / "failing_disk.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source, "-ldl"], check=True)
    return path


@pytest.mark.parametrize(
    ("program", "least_steps"),
    # A folder to make or an old plan to remove, a file, its bytes, their way to the
    # disk, and its name.
    [(_PLANS, 5), (_CHOICES, 4)],
    ids=["plans", "choices"],
)
def test_a_fault_at_any_step_leaves_the_cache_usable(
    tmp_path: Path, library: Path, program: str, least_steps: int
) -> None:
    values = {
        "library": str(library),
        "folder": str(tmp_path / "above" / "cache"),
        "extension": str(extension().__file__),
    }
    output = run_python(
        (_EACH_STEP + program).format(**values),
        LD_PRELOAD=str(library),
        JAX_PLATFORMS="cpu",
    )
    assert len(steps := output.split()) == 4
    assert all(int(count) >= least_steps for count in steps), steps
