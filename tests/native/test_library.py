# SPDX-License-Identifier: Apache-2.0
"""Tests that a missing, old or wrong library is an error that says so, and no crash."""

from pathlib import Path

import pytest

from tests.native.processes import run_python
from tests.native.stand_ins import compile_companions, compile_cudnn, obstacle

pytestmark = [pytest.mark.skipif(bool(obstacle()), reason=obstacle()), pytest.mark.once]


def _ask(directory: Path, expression: str) -> str:
    """Evaluate an expression over ``native`` with the directory's libraries only."""
    return run_python(
        f"""
        from jax_cudnn import native
        from jax_cudnn.native._extension import extension
        extension().set_library_directories([{str(directory)!r}])
        try:
            print({expression})
        except Exception as error:
            print(f"{{type(error).__name__}}: {{error}}")
        """
    )


def test_a_missing_cudnn_is_named_with_the_places_looked_at(tmp_path: Path) -> None:
    message = _ask(tmp_path, "native.cudnn_version()")
    assert message.startswith("LibraryError: Cannot open libcudnn.so.9, ")
    assert f"was looked for in the loader's path, {tmp_path}." in message
    assert "Install jax_cudnn with its extra cuda12 or cuda13" in message


@pytest.mark.parametrize(("version", "text"), [(90701, "9.7.1"), (100000, "10.0.0")])
def test_a_cudnn_that_cannot_be_used_is_refused(
    tmp_path: Path, version: int, text: str
) -> None:
    compile_cudnn(tmp_path, version)
    message = _ask(tmp_path, "native.cudnn_version()")
    assert message.startswith(
        f"LibraryError: cuDNN {text} ({tmp_path}/libcudnn.so.9) cannot be used: "
        "jax_cudnn needs 9.8.0 or a later 9.x."
    )


def test_a_cudnn_without_a_function_is_refused(tmp_path: Path) -> None:
    compile_cudnn(tmp_path, 91900, without="cudnnSetStream")
    message = _ask(tmp_path, "native.cudnn_version()")
    assert message == (
        f"LibraryError: {tmp_path}/libcudnn.so.9 has no function cudnnSetStream"
    )


def test_the_version_needs_no_other_library(tmp_path: Path) -> None:
    compile_cudnn(tmp_path, 91900)
    assert _ask(tmp_path, "native.cudnn_version()") == (
        f"LibraryInfo(version=91900, cuda_major=99, path='{tmp_path}/libcudnn.so.9')"
    )
    assert _ask(tmp_path, "native.cudnn_version().version_text") == "9.19.0"


@pytest.mark.parametrize(
    "missing",
    ["libcudart.so.99", "libcuda.so.1", "libcublasLt.so.99", "libnvrtc.so.99"],
)
def test_cudnn_is_not_called_without_a_library_that_it_needs(
    tmp_path: Path, missing: str
) -> None:
    compile_cudnn(tmp_path, 91900)
    compile_companions(tmp_path, without=missing)
    message = _ask(tmp_path, "native.load_libraries()")
    assert message.startswith(
        f"LibraryError: Cannot open {missing}, which jax_cudnn needs."
    )


def test_all_libraries_are_taken_from_the_directories(tmp_path: Path) -> None:
    compile_cudnn(tmp_path, 91900)
    compile_companions(tmp_path)
    names = ["libcuda.so.1", "libcublasLt.so.99", "libnvrtc.so.99", "libcudart.so.99"]
    expected = {name: f"{tmp_path}/{name}" for name in [*names, "libcudnn.so.9"]}
    assert _ask(tmp_path, "native.load_libraries()") == str(expected)


def test_a_machine_without_a_device_is_told_so(tmp_path: Path) -> None:
    compile_cudnn(tmp_path, 91900)
    compile_companions(tmp_path)
    message = _ask(tmp_path, "native.device_target()")
    assert message == (
        "LibraryError: There is no CUDA device to plan for. "
        "cudaGetDeviceCount: no device is there"
    )


def test_a_failed_load_can_be_tried_again(tmp_path: Path) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    early.mkdir()
    compile_cudnn(early, 91900)
    answers = run_python(
        f"""
        import shutil
        from jax_cudnn import LibraryError, native
        from jax_cudnn.native._extension import extension
        extension().set_library_directories([{str(late)!r}])
        try:
            native.cudnn_version()
        except LibraryError:
            print("missing")
        shutil.copytree({str(early)!r}, {str(late)!r})
        print(native.cudnn_version().version)
        """
    )
    assert answers.split() == ["missing", "91900"]


def test_threads_load_once_and_agree(tmp_path: Path) -> None:
    compile_cudnn(tmp_path, 91900)
    compile_companions(tmp_path)
    expression = (
        "len({str(p) for p in __import__('concurrent.futures').futures"
        ".ThreadPoolExecutor(8).map(lambda _: native.load_libraries(), range(64))})"
    )
    assert _ask(tmp_path, expression) == "1"
