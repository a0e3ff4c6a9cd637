#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# venv.sh DIR PYTHON [ARG...]: makes the virtual environment DIR with PYTHON unless it is
# there, then installs ARG... in it (arguments of `pip install`), with uv where it can.
#
# OFFLINE=1 serves a machine that reaches no package registry: the packages that PYTHON
# sees are seen in DIR too, and the wheels in the folder $WHEELS are added as they are.
set -euo pipefail

dir=$1 python=$2
shift 2

if [ ! -e "$dir/.made" ]; then
  if [ -z "$python" ]; then
    echo "venv.sh: no Python interpreter was found for $dir" >&2
    exit 1
  fi
  if [ -e "$dir" ] && [ ! -e "$dir/.making" ]; then
    echo "venv.sh: $dir is there, and make did not make it. make needs the folder for" \
      "an environment of its own: move or delete yours." >&2
    exit 1
  fi
  echo "== $dir: $("$python" --version), $python"
  rm -rf "$dir"
  mkdir -p "$dir"
  touch "$dir/.making"
  "$python" -m venv "$dir"
  if [ -n "${OFFLINE:-}" ]; then
    # Not --system-site-packages: PYTHON may itself be in a virtual environment, whose
    # packages that flag would leave out.
    purelib=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import site
for path in site.getsitepackages():
    print(f"import site; site.addsitedir({path!r})")' > "$purelib/parent.pth"
    "$dir/bin/python" -m pip install --quiet --no-index --no-deps \
      "${WHEELS:?set it to a folder of wheels, jax_cudnn among them}"/*.whl
  elif ! "$dir/bin/python" -m pip install --quiet uv; then
    echo "== $dir: uv could not be installed; pip does its work, more slowly" >&2
  fi
  touch "$dir/.made"
fi

if [ $# = 0 ]; then
  exit
elif [ -x "$dir/bin/uv" ]; then
  # pip goes without a cache that it cannot write, but uv stops.
  if ! { cache=$("$dir/bin/uv" cache dir) && mkdir -p "$cache" && [ -w "$cache" ]
  } 2>/dev/null; then
    export UV_CACHE_DIR=$PWD/build/uv-cache
    echo "== uv cannot write its cache; its downloads go to build/uv-cache" >&2
  fi
  "$dir/bin/uv" pip install --quiet --python "$dir/bin/python" "$@"
else
  "$dir/bin/python" -m pip install --quiet "$@"
fi
