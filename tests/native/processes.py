# SPDX-License-Identifier: Apache-2.0
"""Runs pieces of Python in fresh processes, to test what happens once per process."""

import os
import subprocess
import sys
import textwrap


def run_python(source: str, **environment: str) -> str:
    """Run the source and return what it prints, stripped."""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
