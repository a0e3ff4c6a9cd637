# SPDX-License-Identifier: Apache-2.0
"""What numbers were taken with: the GPU, and versions of packages."""

import importlib.metadata
import os
import subprocess

import jax

import jax_cudnn
from benchmarks.harness.tokamax_side import tokamax
from benchmarks.harness.torch_side import torch
from jax_cudnn import native
from jax_cudnn.errors import LibraryError


def environment() -> dict[str, str]:
    """Return what the numbers were taken with."""
    versions = {
        "GPU": jax.local_devices()[0].device_kind,
        "driver": _driver(),
        "JAX": jax.__version__,
        "cuDNN": _cudnn(),
        "jax_cudnn": jax_cudnn.__version__,
    }
    if flags := os.environ.get("XLA_FLAGS"):
        versions["XLA_FLAGS"] = flags
    if torch is not None:
        versions["PyTorch"] = torch.__version__
    if tokamax is not None:
        versions["tokamax"] = importlib.metadata.version("tokamax")
    return {name: str(value) for name, value in versions.items()}


def _driver() -> str:
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
        return ", ".join(dict.fromkeys(told.split()))  # a line for each GPU
    except FileNotFoundError:
        return "none"


def _cudnn() -> str:
    try:
        return native.cudnn_version().version_text
    except LibraryError:
        return "none"
