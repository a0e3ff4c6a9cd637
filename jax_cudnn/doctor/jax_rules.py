# SPDX-License-Identifier: Apache-2.0
"""The doctor's rules about jax_cudnn's package, JAX and the environment."""

import re
from collections.abc import Iterator

from jax_cudnn.doctor.finding import Finding, extra
from jax_cudnn.doctor.machine import Facts
from jax_cudnn.errors import install_command

# What pyproject.toml asks for.
_OLDEST_JAX = (0, 10)


def package(facts: Facts) -> Iterator[Finding]:
    """Say why jax_cudnn cannot be imported."""
    causes = [*_jax_import(facts), *_extension(facts)]
    yield from causes
    if facts.import_error and not causes:
        yield Finding(
            severity="error",
            name="import-error",
            what=f"jax_cudnn cannot be imported: {facts.import_error}",
            fix="Install it again, with what it needs: "
            f"{install_command(options='--force-reinstall')}. If that does not help, "
            "report it.",
        )


def _jax_import(facts: Facts) -> Iterator[Finding]:
    oldest = ".".join(map(str, _OLDEST_JAX))
    if not facts.jax:
        yield Finding(
            severity="error",
            name="no-jax",
            what="JAX is not installed for this Python.",
            fix=install_command(extra(facts)),
        )
    elif _release(facts.jax) < _OLDEST_JAX:
        yield Finding(
            severity="error",
            name="old-jax",
            what=f"JAX {facts.jax} is older than {oldest}, the oldest that jax_cudnn "
            "works with.",
            fix=f'pip install --upgrade "jax[{extra(facts)}]"',
        )
    elif facts.jax_import_error:
        yield Finding(
            severity="error",
            name="jax-import",
            what=f"JAX {facts.jax} (jaxlib {facts.jaxlib or 'not installed'}) cannot "
            f"be imported: {facts.jax_import_error}",
            fix=f'pip install --upgrade "jax[{extra(facts)}]" jaxlib',
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _extension(facts: Facts) -> Iterator[Finding]:
    if facts.extension_error:
        yield Finding(
            severity="error",
            name="no-extension",
            what=facts.extension_error,
            fix=facts.extension_fix,
        )


_UNSET_PLATFORMS = "Unset JAX_PLATFORMS, or set it to cuda,cpu."


def no_backend(facts: Facts) -> Iterator[Finding]:
    """Say why JAX runs nothing on a machine without a GPU."""
    is_known = facts.jax_error and not facts.jax_import_error
    if facts.has_gpu or facts.jax_backends or not is_known:
        return
    if platforms := dict(facts.environment).get("JAX_PLATFORMS", ""):
        what = (
            f"JAX_PLATFORMS={platforms!r} leaves JAX nothing to run on: there is no "
            f"such device here ({facts.jax_error})."
        )
        fix = _UNSET_PLATFORMS
    else:
        what = f"JAX {facts.jax} finds nothing to run on: {facts.jax_error}"
        fix = f'pip install --upgrade "jax[{extra(facts)}]" jaxlib'
    yield Finding(severity="error", name="no-backend", what=what, fix=fix)


def jax_devices(facts: Facts) -> Iterator[Finding]:
    """Say why JAX does not see the GPU."""
    has_gpu = facts.driver and facts.driver.gpus
    if not has_gpu or facts.jax_gpu_count or facts.jax_import_error:
        return
    platforms = dict(facts.environment).get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        what = f"JAX_PLATFORMS={platforms!r} keeps JAX from the GPU."
        fix = _UNSET_PLATFORMS
    elif not facts.jax_cuda_majors:
        what = f"JAX {facts.jax} has no CUDA plugin, so it sees no GPU."
        fix = install_command(extra(facts))
    else:
        what = (
            f"JAX {facts.jax} sees no GPU: {facts.jax_error or 'it does not say why'}"
        )
        fix = f'pip install --upgrade "jax[{extra(facts)}]"'
    yield Finding(severity="error", name="jax-without-cuda", what=what, fix=fix)


def jax_parts(facts: Facts) -> Iterator[Finding]:
    """Say which of JAX's packages do not fit together."""
    parts = [x for x in facts.packages if x[0].startswith("jax-cuda")]
    release = facts.jaxlib.split(".")[:3]
    wrong = [
        f"{name} {version}"
        for name, version in parts
        if facts.jaxlib and version.split(".")[:3] != release
    ]
    if wrong:
        yield Finding(
            severity="warning",
            name="jax-parts",
            what=f"jaxlib is {facts.jaxlib}, but {', '.join(wrong)} is installed.",
            fix=f'pip install --upgrade "jax[{extra(facts)}]"',
        )
    if len(facts.jax_cuda_majors) > 1:
        majors = " and ".join(map(str, facts.jax_cuda_majors))
        yield Finding(
            severity="warning",
            name="jax-parts",
            what=f"JAX's plugins for CUDA {majors} are both installed.",
            fix="pip uninstall those of the version that is not wanted.",
        )


def environment(facts: Facts) -> Iterator[Finding]:
    """Say which environment variables change results or times."""
    environment = dict(facts.environment)
    if (override := environment.get("NVIDIA_TF32_OVERRIDE")) is not None:
        shown = (
            "f32 matmuls are not rounded to TF32, whatever the program requests, and "
            "are several times slower"
            if override == "0"
            else "f32 matmuls are rounded to TF32, whatever the program asks for"
        )
        yield Finding(
            severity="warning",
            name="tf32-override",
            what=f"NVIDIA_TF32_OVERRIDE={override}: {shown}.",
            fix="Unset it, and use jax.default_matmul_precision or precision=.",
        )
    if environment.get("CUDNN_LOGLEVEL_DBG", "0") != "0":
        yield Finding(
            severity="note",
            name="cudnn-log",
            what=f"CUDNN_LOGLEVEL_DBG={environment['CUDNN_LOGLEVEL_DBG']}: cuDNN "
            "writes a log, which slows each call.",
            fix="Unset it when nothing is being looked for.",
        )


def unread(facts: Facts) -> Iterator[Finding]:
    """Say which facts could not be read."""
    for what, error in facts.unread:
        is_closed = error.startswith(PermissionError.__name__)
        yield Finding(
            severity="warning",
            name="unread",
            what=f"{what[0].upper()}{what[1:]} could not be read: {error}",
            fix="Let this user read it. The rest of this text is as it should be."
            if is_closed
            else "Report it with this text; the rest of it is as it should be.",
        )
