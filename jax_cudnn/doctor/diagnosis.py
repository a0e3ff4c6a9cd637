# SPDX-License-Identifier: Apache-2.0
"""`plans.doctor`: says whether this machine can use cuDNN, and what to do if not."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_cudnn.columns import Block, Heading, Page, Rows, Text
from jax_cudnn.doctor.finding import Finding
from jax_cudnn.doctor.findings import examine
from jax_cudnn.doctor.machine import Facts, gather
from jax_cudnn.native import version_text

# The version of what `Diagnosis.to_json` returns. A change of meaning raises it.
SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Diagnosis(Page):
    """The result of ``doctor``: facts and what they mean; ``str`` of it is a page."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def is_usable(self) -> bool:
        """Whether calls can run on cuDNN here."""
        return self.facts.has_gpu and not self._errors

    @property
    def exit_status(self) -> int:
        """1 where something keeps cuDNN from a GPU that is there, or jax_cudnn or JAX
        from running; 0 otherwise.
        """
        return 1 if self._errors else 0

    @property
    def verdict(self) -> str:
        """Whether cuDNN can be used, in a sentence."""
        if self._errors:
            names = ", ".join(finding.name for finding in self._errors)
            if not self.facts.has_gpu:
                return f"jax_cudnn cannot be used here: {names}."
            return f"cuDNN cannot be used on this machine's GPU: {names}."
        if self.is_usable:
            return "cuDNN can be used."
        return "No NVIDIA GPU here: every call runs on XLA."

    @property
    def _errors(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.severity == "error")

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for ``json.dumps``."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "is_usable": self.is_usable,
            "findings": [dataclasses.asdict(each) for each in self.findings],
            "facts": dataclasses.asdict(self.facts),
        }

    def _blocks(self) -> Iterator[Block]:
        yield Rows(tuple(_rows(self.facts)))
        yield Text("")
        yield Heading(self.verdict)
        for finding in self.findings:
            yield Text("")
            yield Text(f"{finding.severity}: {finding.what}")
            yield Text(f"  fix: {finding.fix}")


def doctor() -> Diagnosis:
    """Return what is on this machine for cuDNN under JAX, and what is wrong with it.

    Looks at the system, GPUs, driver, JAX and its CUDA plugin, cuDNN and what it needs,
    and the environment variables that matter. Starts JAX's backends and opens cuDNN;
    runs nothing on a GPU. What cannot be read is one of the findings. ``jax-cudnn
    doctor`` prints it, also where jax_cudnn or JAX cannot be imported.

    Example:
      >>> from jax_cudnn import plans
      >>> diagnosis = plans.doctor()
      >>> diagnosis.is_usable or diagnosis.verdict != ""
      True
    """
    facts = gather()
    return Diagnosis(facts=facts, findings=examine(facts))


# --- the page -------------------------------------------------------------------------


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    driver, cudnn = facts.driver, facts.cudnn
    if facts.system is not None:
        yield "system", str(facts.system)
    for gpu in driver.gpus if driver else ():
        memory = gpu.memory_bytes / 2**30
        yield "GPU", f"{gpu.name}, sm_{gpu.sm_version}, {memory:.0f} GiB"
    if not (driver and driver.gpus):
        yield "GPU", "none"
    yield "driver", _driver_text(facts)
    jax, jaxlib = facts.jax or "not installed", facts.jaxlib or "not installed"
    yield "JAX", f"{jax}, jaxlib {jaxlib}, Python {facts.python}"
    if not facts.jax_import_error:
        yield "JAX backends", ", ".join(facts.jax_backends) or "none"
    if facts.jax_error:
        says = facts.jax_error.splitlines()[0]
        yield "JAX on CUDA", says if facts.jax_cuda_majors else "no plugin for CUDA"
    if cudnn is None:
        why = "does not load" if facts.cudnn_files else "not found"
        yield "cuDNN", "not tried" if facts.extension_error else why
    else:
        version, cuda = version_text(cudnn.version), cudnn.cuda_major
        yield "cuDNN", f"{version} for CUDA {cuda}, {cudnn.path}"
        yield "cuDNN's libraries", ", ".join(cudnn.sublibraries) or "none"
    for other in facts.cudnn_files[1 if cudnn else 0 :]:
        version = version_text(other.version) if other.version else "does not load"
        name = "another cuDNN" if cudnn else "a cuDNN"
        yield name, f"{version}, {other.path}"
    yield from facts.companions
    yield "jax_cudnn", f"{facts.jax_cudnn}, {facts.location}"
    if not facts.extension_error:
        header = version_text(facts.header_version)
        api = ".".join(map(str, facts.ffi_api))
        yield "", f"compiled against cuDNN {header},"
        yield "", f"cudnn-frontend {facts.frontend}, XLA FFI {api}"
    for name, version in facts.packages:
        yield name, version
    yield from facts.environment


def _driver_text(facts: Facts) -> str:
    driver = facts.driver
    if driver is None:
        return "none"
    major, minor = divmod(driver.cuda_version, 1000)
    newest = f"runs CUDA up to {major}.{minor // 10}"
    return ", ".join(filter(None, (driver.version, newest, driver.error)))
