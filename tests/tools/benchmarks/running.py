# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark in a process of its own."""

import os
import subprocess

from tests.common import forked


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    module, *flags = arguments
    return forked.run(module, *flags, environment=environment, warnings_are="default")
