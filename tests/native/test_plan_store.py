# SPDX-License-Identifier: Apache-2.0
"""Tests that the plan store returns exactly what it was given, or nothing."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from jax_cudnn import native
from jax_cudnn.native._extension import extension
from tests.native.processes import run_python

pytestmark = pytest.mark.once

_LIMIT = 1 << 20
_HOUR = 3600
# Magic, checksum and the sizes of key and payload.
_HEAD_BYTES = 16 + 8 + 8 + 8


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Put the store into a folder that does not exist yet, and off again."""
    path = tmp_path / "above" / "plans"
    native.set_plan_store(path, _LIMIT)
    yield path
    native.set_plan_store(None, 0)


def _put(key: str, payload: bytes) -> None:
    extension().testing.store_put(key.encode(), payload)


def _get(key: str) -> bytes | None:
    return extension().testing.store_get(key.encode())


def _failures() -> int:
    return native.cache_stats().disk_failures


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.plan"))


def _age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def _file_of(folder: Path, key: str, payload: bytes) -> Path:
    before = set(_files(folder))
    _put(key, payload)
    (path,) = set(_files(folder)) - before
    return path


def test_what_was_put_comes_back_and_is_counted(folder: Path) -> None:
    before = native.cache_stats()
    payloads = {"a": b"", "b": b"\0\xff\n", "": b"x" * 100_000}
    assert _get("a") is None
    for key, payload in payloads.items():
        _put(key, payload)
    assert {key: _get(key) for key in payloads} == payloads
    _put("a", b"another")
    assert _get("a") == b"another"
    after = native.cache_stats()
    assert after.disk_misses - before.disk_misses == 1
    assert after.disk_hits - before.disk_hits == 4
    assert after.disk_writes - before.disk_writes == 4
    assert after.disk_failures == before.disk_failures
    assert native.plan_store_files() == (
        3, sum(path.stat().st_size for path in _files(folder))
    )  # fmt: skip


def test_the_folder_is_made_by_the_first_save_for_this_user_only(folder: Path) -> None:
    assert _get("a") is None
    assert native.plan_store_files() == (0, 0)
    native.clear_plan_store()
    assert not folder.parent.exists()
    _put("a", b"plan")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


def test_a_store_that_is_off_touches_nothing(folder: Path) -> None:
    native.set_plan_store(None, _LIMIT)
    before = native.cache_stats()
    _put("a", b"plan")
    assert _get("a") is None
    assert native.cache_stats() == before
    assert not folder.exists()


def test_clearing_leaves_the_files_of_others(folder: Path) -> None:
    _put("a", b"plan")
    (folder / "notes.txt").write_text("mine")
    (folder / "tmp-abcdef").write_text("a writer's")
    native.clear_plan_store()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert _get("a") is None


# --- damage ---------------------------------------------------------------------------


def _expect_corrupt(path: Path, damaged: bytes) -> None:
    """The damaged file answers nothing, says why, and is removed."""
    path.write_bytes(damaged)
    before = _failures()
    assert _get("key") is None
    assert _failures() == before + 1
    reason = native.cache_stats().disk_last_failure
    assert reason.startswith(f"{path}: not a whole plan file: ")
    assert not path.exists()


def test_a_file_cut_short_anywhere_is_nothing(folder: Path) -> None:
    payload = bytes(range(200))
    path = _file_of(folder, "key", payload)
    whole = path.read_bytes()
    assert len(whole) == _HEAD_BYTES + len("key") + len(payload)
    for length in range(len(whole)):
        _expect_corrupt(path, whole[:length])
    _expect_corrupt(path, whole + b"\0")
    _put("key", payload)
    assert _get("key") == payload


def test_one_flipped_bit_anywhere_is_nothing(folder: Path) -> None:
    path = _file_of(folder, "key", b"a plan of some length")
    whole = path.read_bytes()
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        _expect_corrupt(path, bytes(damaged))
    path.write_bytes(whole)
    assert _get("key") == b"a plan of some length"


@hypothesis.given(data=st.binary(max_size=200), has_head=st.booleans())
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_garbage_is_nothing(folder: Path, data: bytes, has_head: bool) -> None:
    _put("key", b"plan")
    (path,) = _files(folder)
    head = path.read_bytes()[:_HEAD_BYTES] if has_head else b""
    _expect_corrupt(path, head + data)


def test_another_version_of_the_form_is_nothing(folder: Path) -> None:
    path = _file_of(folder, "key", b"plan")
    whole = path.read_bytes()
    assert whole.startswith(b"jaxcudnn-plan-1\n")
    _expect_corrupt(path, whole.replace(b"plan-1", b"plan-2", 1))


def test_a_plan_for_another_key_is_not_given(folder: Path) -> None:
    ours = _file_of(folder, "cudnn 91900", b"plan")
    theirs = _file_of(folder, "cudnn 92000", b"another plan")
    theirs.replace(ours)
    before = _failures()
    assert _get("cudnn 91900") is None
    assert _failures() == before + 1
    assert native.cache_stats().disk_last_failure.endswith("a plan for another key")
    _put("cudnn 91900", b"plan")
    assert _get("cudnn 91900") == b"plan"


def test_what_others_may_write_is_not_read(folder: Path) -> None:
    path = _file_of(folder, "key", b"plan")
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert _get("key") is None
        assert "can be written by other users" in native.cache_stats().disk_last_failure
    path.chmod(0o600)
    assert _get("key") == b"plan"
    elsewhere = folder.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert _get("key") is None
    path.unlink()
    os.mkfifo(path, 0o600)
    assert _get("key") is None
    assert native.cache_stats().disk_last_failure.endswith("is not a file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_read(folder: Path) -> None:
    path = _file_of(folder, "key", b"plan")
    os.chown(path, 12345, 12345)
    assert _get("key") is None
    assert native.cache_stats().disk_last_failure.endswith("belongs to another user")


# --- size -----------------------------------------------------------------------------


def test_the_least_recently_used_go_first(folder: Path) -> None:
    payload = b"x" * 1000
    size = len("a") + len(payload) + _HEAD_BYTES
    native.set_plan_store(folder, 3 * size)
    paths = {key: _file_of(folder, key, payload) for key in "abc"}
    for age, path in zip((30, 20, 10), paths.values(), strict=True):
        _age(path, age)
    assert _get("a") == payload  # and is the youngest now
    _put("d", payload)
    assert [_get(key) is None for key in "abcd"] == [False, True, False, False]
    native.set_plan_store(folder, size)
    _put("e", payload)
    assert native.plan_store_files() == (1, size)
    assert _get("e") == payload


def test_a_plan_above_the_limit_is_not_kept(folder: Path) -> None:
    _put("small", b"plan")
    before = native.cache_stats()
    _put("large", b"x" * _LIMIT)
    after = native.cache_stats()
    assert after.disk_writes == before.disk_writes
    assert "is above the limit of 1048576 for all" in after.disk_last_failure
    assert _get("large") is None
    assert _get("small") == b"plan"


def test_temporary_files_of_killed_writers_go_after_an_hour(folder: Path) -> None:
    _put("a", b"plan")
    old, young = folder / "tmp-old", folder / "tmp-young"
    for path, age in ((old, _HOUR + 60), (young, _HOUR - 60)):
        path.write_bytes(b"half a pl")
        _age(path, age)
    _put("b", b"plan")
    assert not old.exists()
    assert young.exists()


# --- disks that do not take it --------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_a_reason_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    native.set_plan_store(tmp_path / "file" / "plans", _LIMIT)
    try:
        before = native.cache_stats()
        _put("a", b"plan")
        reason = native.cache_stats().disk_last_failure
        assert reason.startswith("mkdir ")
        assert reason.endswith("Not a directory")
        assert _get("a") is None
        native.clear_plan_store()
        assert native.plan_store_files() == (0, 0)
        after = native.cache_stats()
        assert after.disk_failures == before.disk_failures + 4
        assert after.disk_writes == before.disk_writes
    finally:
        native.set_plan_store(None, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_still_read(folder: Path) -> None:
    _put("a", b"plan")
    folder.chmod(0o500)
    before = native.cache_stats()
    _put("b", b"plan")
    folder.chmod(0o700)
    after = native.cache_stats()
    assert after.disk_failures == before.disk_failures + 1
    assert after.disk_last_failure.endswith("Permission denied")
    assert _get("a") == b"plan"


def test_a_full_disk_is_a_reason_and_leaves_nothing_behind(folder: Path) -> None:
    """No file of this process may grow past some bytes: what a full disk does."""
    _put("a", b"plan")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = native.cache_stats()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        _put("b", b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after = native.cache_stats()
    assert after.disk_failures == before.disk_failures + 1
    assert after.disk_last_failure.startswith(f"write {folder}/tmp-")
    assert after.disk_last_failure.endswith("File too large")
    assert len(list(folder.iterdir())) == 1
    assert _get("a") == b"plan"


# --- other processes ------------------------------------------------------------------

# Puts and gets what follows from the key alone, so that any wrong answer is seen. Loads
# the extension without the package, which takes longer than the work.
_WORKER = """
import importlib.util, random

def payload(key):
    return random.Random(key).randbytes(1000 * (key % 7 + 1))

def work(path, folder, limit, count, seed):
    spec = importlib.util.spec_from_file_location("_ffi", path)
    ffi = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ffi)
    ffi.set_plan_store(folder.encode(), limit)
    rng = random.Random(seed)
    print("ready", flush=True)
    for _ in range(count):
        key = rng.randrange(12)
        name = b"key %d" % key
        if rng.random() < 0.5:
            ffi.testing.store_put(name, payload(key))
        else:
            found = ffi.testing.store_get(name)
            assert found is None or found == payload(key), key
    stats = ffi.cache_stats()
    assert stats["disk_failures"] == 0, stats
    print(stats["disk_hits"], stats["disk_writes"])
"""


def _start_worker(
    folder: Path, *, limit: int, count: int, seed: int
) -> subprocess.Popen[str]:
    call = f"work({extension().__file__!r}, {str(folder)!r}, {limit}, {count}, {seed})"
    return subprocess.Popen(
        [sys.executable, "-c", f"{_WORKER}\n{call}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("limit", [_LIMIT, 20_000])
def test_eight_processes_share_a_folder(tmp_path: Path, limit: int) -> None:
    workers = [
        _start_worker(tmp_path / "plans", limit=limit, count=1000, seed=seed)
        for seed in range(8)
    ]
    for worker in workers:
        output, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors
        hits, writes = map(int, output.split()[1:])
        assert hits > 0
        assert writes > 0
    sizes = [path.stat().st_size for path in (tmp_path / "plans").iterdir()]
    assert all(path.suffix == ".plan" for path in (tmp_path / "plans").iterdir())
    # Two that saved at once may each have seen the other's file too late.
    assert sum(sizes) <= limit + 8 * max(sizes)


def test_a_killed_writer_spoils_nothing(folder: Path) -> None:
    payloads: dict[str, object] = {}
    exec(_WORKER.partition("def work")[0], payloads)
    payload = payloads["payload"]
    assert callable(payload)
    rng = random.Random(1)
    found = 0
    for seed in range(20):
        worker = _start_worker(folder, limit=_LIMIT, count=10**9, seed=seed)
        assert worker.stdout is not None
        assert worker.stderr is not None
        assert worker.stdout.readline() == "ready\n", worker.stderr.read()
        time.sleep(0.02 + rng.random() * 0.2)
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=60)
        assert worker.returncode == -signal.SIGKILL
        before = _failures()
        for key in range(12):
            kept = _get(f"key {key}")
            assert kept in (None, payload(key))
            found += kept is not None
        assert _failures() == before
    assert found > 0


def test_a_stopped_write_leaves_a_temporary_file_only(tmp_path: Path) -> None:
    """Kills the process in the middle of a write, which a limit on files marks."""
    with pytest.raises(AssertionError):  # the process was killed
        run_python(
            f"""
            import resource, signal
            from pathlib import Path
            from jax_cudnn import native
            from jax_cudnn.native._extension import extension
            native.set_plan_store(Path({str(tmp_path)!r}), 1 << 20)
            extension().testing.store_put(b"a", b"plan")
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which kills
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
            extension().testing.store_put(b"a", b"x" * 100_000)
            """
        )
    (temporary,) = tmp_path.glob("tmp-*")
    assert temporary.stat().st_size == 5000
    native.set_plan_store(tmp_path, _LIMIT)
    try:
        assert _get("a") == b"plan"
        _age(temporary, 2 * _HOUR)
        _put("b", b"plan")
        assert not temporary.exists()
    finally:
        native.set_plan_store(None, 0)
