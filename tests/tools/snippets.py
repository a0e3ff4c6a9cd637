# SPDX-License-Identifier: Apache-2.0
"""Finds the snippets of a page of docs/, runs them, and returns their outcomes."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.common import forked

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = (
    "plans.md",
    "plans_reference.md",
    "performance.md",
    "sequence_parallel.md",
    "masks.md",
    "decode.md",
    "packed.md",
    "score_mods.md",
    "f8.md",
    "norms.md",
    "fuse.md",
    "pooling.md",
    "quick_start.md",
    "attention.md",
    "products.md",
    "convolutions.md",
    "export.md",
    "troubleshooting.md",
    "ragged_dot.md",
    "causal_conv1d.md",
    "reductions.md",
    "coming_from.md",
)
# Ring 5 does not run these: the first and the fourth make eight devices of the CPU, the
# second and the last need libraries that jax_cudnn does not, and the third compares f32
# results more closely than a GPU multiplies by default.
OFF_GPU = ("several_gpus.md", "recipes.md", "flax.md", "moe.md", "adapters.md")

_GPU_MARK = "# needs a GPU\n"
_CUDNN_MARK = re.compile(r"# needs cuDNN(?: (?P<major>\d+)\.(?P<minor>\d+))?\n")
_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.M | re.S
)

_PROGRAM = Path(__file__).parent / "programs" / "snippets.py"


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """A block of Python, with the block of text behind it, which is its output."""

    line: int
    code: str
    output: str | None

    @property
    def needs_gpu(self) -> bool:
        """Whether it says so in its first line."""
        return self.code.startswith(_GPU_MARK)

    @property
    def needs_cudnn(self) -> bool:
        """Whether it says so: a cuDNN that plans without a GPU."""
        return _CUDNN_MARK.match(self.code) is not None

    @property
    def cudnn_version(self) -> int:
        """The oldest cuDNN that it says it needs, as 92200 for 9.22; 0 for any."""
        found = _CUDNN_MARK.match(self.code)
        if found is None or found["major"] is None:
            return 0
        return int(found["major"]) * 10_000 + int(found["minor"]) * 100


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a snippet printed, and the traceback and type of what it raised."""

    output: str
    error: str
    kind: str


def snippets(page: Path) -> list[Snippet]:
    """Return the snippets of a page in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(
            line=text.count("\n", 0, match.start("code")),
            code=match["code"],
            output=match["output"],
        )
        for match in _BLOCK.finditer(text)
    ]


def run(page: Path, folder: Path, platforms: str) -> list[Outcome]:
    """Run all snippets of a page in a folder, where they find an empty cache."""
    environment = {
        **os.environ,
        "JAX_CUDNN_CACHE_DIR": str(folder / "cache"),
        "JAX_PLATFORMS": platforms,
        # The process that runs the tests may have memory on the GPU as well.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONIOENCODING": "utf-8",
    }
    given = json.dumps([(each.line, each.code) for each in snippets(page)])
    done = forked.run(
        _PROGRAM, str(folder), page.name, environment=environment, text=given
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(**told) for told in json.loads(done.stdout)]
