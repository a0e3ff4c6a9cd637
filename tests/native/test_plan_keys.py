# SPDX-License-Identifier: Apache-2.0
"""Tests the keys of stored plans, and when the store asks for its settings."""

import platform
from pathlib import Path

import pytest

from tests.native.processes import run_python
from tests.native.stand_ins import compile_companions, compile_cudnn, obstacle

pytestmark = pytest.mark.once


def test_the_extension_asks_for_its_settings_when_it_needs_them(tmp_path: Path) -> None:
    output = run_python(
        f"""
        import concurrent.futures
        from pathlib import Path
        from jax_cudnn import native
        from jax_cudnn.native._extension import extension
        asked = []
        def source():
            asked.append(1)
            return Path({str(tmp_path / "plans")!r}), 1 << 20
        native.set_plan_store_source(source)
        print(len(asked), native.cache_stats().disk_misses)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            put = extension().testing.store_put
            list(pool.map(lambda i: put(b"%d" % i, b"x"), range(8)))
        print(len(asked), native.plan_store_files()[0])
        """
    )
    assert output.split() == ["0", "0", "1", "8"]


def test_a_source_that_fails_turns_the_store_off() -> None:
    output = run_python(
        """
        from jax_cudnn import native
        from jax_cudnn.native._extension import extension
        def source():
            raise ValueError("no idea")
        native.set_plan_store_source(source)
        extension().testing.store_put(b"a", b"plan")
        print(extension().testing.store_get(b"a"))
        print(native.cache_stats().disk_failures)
        print(native.cache_stats().disk_last_failure)
        """
    )
    lines = output.splitlines()
    assert lines[:2] == ["None", "1"]
    assert lines[2] == "no plans are stored: no idea"


# Reads plan files whose keys are that of the stand-ins but for the fields of a case. A
# key that is equal gets as far as its graph, which is none.
_READ = """
from pathlib import Path
from jax_cudnn import GraphError, LibraryError, native
from jax_cudnn.graph import Target
from jax_cudnn.native._extension import extension

folder, cases = Path({folder!r}), {cases!r}
extension().set_library_directories([{libraries!r}])
native.set_plan_store(folder, 1 << 20)
gpu = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=91900)
build = native.build_info()
for changes in cases:
    fields = dict(
        gpu=gpu.name, sm_version=90, sm_count=132, cudnn_version=91900, cuda_major=99,
        cublaslt_version=990102, nvrtc_version=99030, driver_version=0,
        cpu=build.cpu, frontend_version=build.frontend_version, builder=build.builder,
        settings="", request="", graph="none",
    ) | changes
    key = "".join(f"{{k}} {{len(str(v))}}:{{v}}\\n" for k, v in fields.items())
    native.clear_plan_store()
    extension().testing.store_put(key.encode(), b"")
    (path,) = folder.glob("*.plan")
    try:
        native.import_plan_offline(path.read_bytes(), gpu, "")
    except GraphError:
        print("equal")
    except LibraryError as error:
        print(str(error).partition("\\n  - ")[2])
"""


def _differences(tmp_path: Path, *cases: dict[str, int | str]) -> list[str]:
    """Return what is said to the key of each case, which needs the stand-ins."""
    source = _READ.format(
        folder=str(tmp_path / "plans"), libraries=str(tmp_path), cases=cases
    )
    return run_python(source).splitlines()


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_a_plan_is_for_the_libraries_and_the_cpu_of_its_process(tmp_path: Path) -> None:
    compile_cudnn(tmp_path, 91900)
    compile_companions(tmp_path)
    other_cpu, cpu = "riscv64", platform.machine()
    assert _differences(
        tmp_path,
        {},
        {"cublaslt_version": 990200},
        {"nvrtc_version": 99040},
        {"cpu": other_cpu},
    ) == [
        "equal",
        "cuBLASLt: made for 99.2.0, this is 99.1.2",
        "NVRTC: made for 99.4, this is 99.3",
        f"CPU: made for {other_cpu}, this is {cpu}",
    ]


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_a_library_that_does_not_tell_its_version_has_none(tmp_path: Path) -> None:
    compile_cudnn(tmp_path, 91900)
    compile_companions(tmp_path, tell_versions=False)
    silent: dict[str, int | str] = {"cublaslt_version": 0, "nvrtc_version": 0}
    assert _differences(tmp_path, silent, {**silent, "nvrtc_version": 99030}) == [
        "equal",
        "NVRTC: made for 99.3, this is an unknown one",
    ]
