#!/usr/bin/env bash
# tests/run.sh [--deps-only | --all]
#
# Installs what is missing, builds the release preset, and runs the tests and the packaging check.
#   --deps-only  install the packages and stop
#   --all        the heavy tests too
# TOKROUTE_JOBS limits parallelism; the default is one job per processor.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
jobs=${TOKROUTE_JOBS:-$(nproc 2>/dev/null || echo 2)}
deps_only=false
all=false
for argument in "$@"; do
  case "$argument" in
    --deps-only) deps_only=true ;;
    --all) all=true ;;
    *)
      echo "usage: $0 [--deps-only | --all]" >&2
      exit 2
      ;;
  esac
done

"$root/cmake/install-deps.sh" build
if $deps_only; then exit 0; fi

cd "$root"
build=build/release
cmake --preset release
cmake --build --preset release --parallel "$jobs"

selection=()
if ! $all; then
  selection=(-LE '^heavy$')
  left_out=$(ctest --test-dir "$build" -N -L '^heavy$' | sed -n 's/^ *Test *#[0-9]*: //p')
fi
log=$build/Testing/suite.log
mkdir -p "$build/Testing"
ctest --test-dir "$build" --output-on-failure --no-tests=error --parallel "$jobs" "${selection[@]}" 2>&1 | tee "$log"

tests/consumer/check.sh "$build"

echo
if [[ -n ${left_out:-} ]]; then echo "Heavy tests left out (run them with --all):" ${left_out}; fi
# Once more, since the packaging check came in between.
grep -E 'tests passed,.* tests failed out of' "$log" | tail -n 1
