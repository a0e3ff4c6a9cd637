#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# install.sh DIR PYTHON EXTRAS [REQUIREMENT...]: builds jax_cudnn[EXTRAS] and installs it,
# with the REQUIREMENTs, in the virtual environment DIR, which PYTHON makes if need be.
# EDITABLE and WERROR go to build_wheel.sh; with OFFLINE=1 nothing is built, and the
# wheel of jax_cudnn has to be among $WHEELS (see venv.sh).
set -euo pipefail
cd "$(dirname "$0")/../.."

dir=$1 python=$2 extras=$3
shift 3

if [ -n "${OFFLINE:-}" ]; then
  [ ! -e "$dir/.made" ] || rm -rf "$dir"
  scripts/setup/venv.sh "$dir" "$python"
  exit
fi
name=${dir#.}
download() { # installs what jax_cudnn[EXTRAS] and the REQUIREMENTs need
  scripts/setup/venv.sh "$dir" "$python"
  local listed needs
  listed=$("$dir/bin/python" -c "import sys, tomllib
project = tomllib.load(open('pyproject.toml', 'rb'))['project']
extras = project['optional-dependencies']
needs = [*project['dependencies'], *(x for name in sys.argv[1:] for x in extras[name])]
print(*needs, sep='\n')" ${extras//,/ })
  mapfile -t needs <<<"$listed"
  scripts/setup/venv.sh "$dir" "$python" "${needs[@]}" "$@"
}
# The network is busy with that while the compiler works.
trap wait EXIT
download "$@" &
downloading=$!
scripts/setup/build_wheel.sh "$name" "$python"
wait "$downloading"
wheel=$(echo "build/wheels/$name"/*.whl)
# First the file that was just built, whatever its version, then what it says it needs.
scripts/setup/venv.sh "$dir" "$python" --no-deps --force-reinstall "$wheel"
scripts/setup/venv.sh "$dir" "$python" "$wheel[$extras]" "$@"
