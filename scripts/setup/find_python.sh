#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints an interpreter for the first of the given versions (find_python.sh 3.13 3.12)
# that runs and can make virtual environments; prints nothing where there is none.
# A name on PATH is tried, not trusted: a pyenv shim may exist and refuse to run.
set -euo pipefail

runs() { # INTERPRETER VERSION
  "$1" -c "import ensurepip, sys, venv
sys.exit('%d.%d' % sys.version_info[:2] != '$2')" 2>/dev/null
}

pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "${HOME:-}/.pyenv")}
for version in "$@"; do
  for python in "python$version" python3 "$pyenv_root/versions/$version".*/bin/python; do
    if runs "$python" "$version"; then
      # The interpreter itself, so that a shim's later change of mind does not matter.
      "$python" -c 'import sys; print(sys.executable)'
      exit 0
    fi
  done
done
