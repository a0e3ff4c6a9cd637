#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh SECONDS PYTHON: builds the targets of tests/fuzz with clang ($CXX, or else
# clang++), in build/fuzz, and lets each search for an equal part of SECONDS, starting
# from tests/corpus and the golden graphs. What breaks a reader is kept in build/fuzz,
# as TARGET-crash-* or TARGET-timeout-*.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=$1 python=$2
venv=.venv-fuzz
targets=(json graph score_mod request plan_file store)
if ((seconds < ${#targets[@]})); then
  echo "fuzz.sh: $seconds seconds are fewer than the ${#targets[@]} targets" >&2
  exit 2
fi

mapfile -t needs < <("$python" -c "import tomllib
project = tomllib.load(open('pyproject.toml', 'rb'))
print(*project['build-system']['requires'], 'cmake', sep='\n')")
scripts/setup/venv.sh "$venv" "$python" "${needs[@]}"
mkdir -p build
{
  "$venv/bin/cmake" -S . -B build/fuzz -DJAX_CUDNN_FUZZ=ON -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_CXX_COMPILER="${CXX:-clang++}" -DPython_EXECUTABLE="$PWD/$venv/bin/python" &&
    "$venv/bin/cmake" --build build/fuzz -j 2
} >build/fuzz.log 2>&1 || {
  cat build/fuzz.log >&2
  exit 1
}

failed=()
for target in "${targets[@]}"; do
  corpus=tests/corpus/$target found=build/fuzz/found/$target log=build/fuzz/$target.log
  mkdir -p "$found"
  # Golden graphs and their kin are within these bytes.
  "build/fuzz/$target" -max_total_time=$((seconds / ${#targets[@]})) -max_len=4096 \
    -dict=tests/fuzz/words.dict -artifact_prefix="build/fuzz/$target-" -timeout=10 \
    "$found" "$corpus" tests/golden >"$log" 2>&1 || failed+=("$target")
  sed -nE "s/^#([0-9]+)\tDONE +cov: ([0-9]+) ft: ([0-9]+) .*/\1 inputs, \2 edges, \3 features/p" \
    "$log" | sed "s/^/$target: /"
done
for target in "${failed[@]}"; do
  echo "fuzz.sh: $target failed; see build/fuzz/$target.log" >&2
  tail -n 40 "build/fuzz/$target.log" >&2
done
[ ${#failed[@]} = 0 ]
