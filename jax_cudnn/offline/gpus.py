# SPDX-License-Identifier: Apache-2.0
"""Lists the GPUs that can be named, with their properties.

The values are in data/gpus/gpus.json, under the keys of cuDNN's own description of a
device (``native.device_properties``). That of the H200 was read from one; the others
have the vendor's published figures, and the H200's where there are none. Each entry
says its source. What cuDNN plans for such a description is what it would plan for the
GPU, as far as it looks at these values only.
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_cudnn.graph import Target

# The version of the file's form.
SCHEMA = 1
_FILE = Path(__file__).parent.parent / "data" / "gpus" / "gpus.json"
# Words that people leave out of a name.
_OPTIONAL_WORDS = ("nvidia", "geforce", "tesla")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuDescription:
    """A GPU that can be planned for by its name.

    ``name`` is what the CUDA driver calls it; ``also`` has other names for it.
    ``sm_version`` is ten times the compute capability. ``properties`` is cuDNN's
    description, as JSON; ``source`` says where its figures are from.
    """

    name: str
    also: tuple[str, ...]
    sm_version: int
    sm_count: int
    properties: str
    source: str

    @property
    def short_name(self) -> str:
        """The name as people say it: "H200", "RTX 4090"."""
        return self.also[0] if self.also else self.name.removeprefix("NVIDIA ")

    def target(self, cudnn_version: int) -> Target:
        """Return the GPU with a version of cuDNN, to plan for."""
        return Target(
            name=self.name,
            sm_version=self.sm_version,
            sm_count=self.sm_count,
            cudnn_version=cudnn_version,
        )


@functools.cache
def known() -> tuple[GpuDescription, ...]:
    """Return every GPU that can be named, by compute capability, smaller ones first."""
    data = json.loads(_FILE.read_text(encoding="ascii"))
    assert data["schema"] == SCHEMA
    architectures = data["architectures"]["by_sm_version"]
    found = [
        _description(
            entry, {**data["common"], **architectures[str(entry["sm_version"])]}
        )
        for entry in data["gpus"]
    ]
    return tuple(sorted(found, key=lambda gpu: (gpu.sm_version, gpu.sm_count)))


def _description(entry: dict[str, Any], shared: dict[str, Any]) -> GpuDescription:
    properties = {
        **shared,
        **entry["properties"],
        "deviceName": entry["name"],
        "deviceVer": entry["sm_version"] * 10,
    }
    return GpuDescription(
        name=entry["name"],
        also=tuple(entry["also"]),
        sm_version=entry["sm_version"],
        sm_count=properties["multiProcessorCount"],
        properties=json.dumps(properties, sort_keys=True),
        source=entry["source"],
    )


def find(name: str) -> GpuDescription:
    """Return the GPU of that name: "H200", "nvidia h200", "rtx 4090", "A100-40GB".

    Capitals, spaces, dashes and NVIDIA's family names do not matter.

    Raises:
      ValueError: no GPU of that name is known; lists those that are.
    """
    wanted = _plain(name) if isinstance(name, str) else ""
    for gpu in known():
        if wanted and wanted in map(_plain, (gpu.name, *gpu.also)):
            return gpu
    raise ValueError(
        f"device={name!r} is not a GPU that jax_cudnn knows. It knows "
        f"{', '.join(gpu.short_name for gpu in known())}."
    )


def _plain(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _OPTIONAL_WORDS)
