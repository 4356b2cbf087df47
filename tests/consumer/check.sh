#!/usr/bin/env bash
# tests/consumer/check.sh BUILD_DIR
#
# Installs a built tree to a scratch prefix, moves the prefix, and then uses tokroute as outside projects do: with
# find_package, with add_subdirectory, and with two requests that must be refused.
set -euo pipefail

if [[ $# -ne 1 || ! -f $1/CMakeCache.txt ]]; then
  echo "usage: $0 BUILD_DIR (a configured and built tree)" >&2
  exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$(cd "$1" && pwd)
jobs=${TOKROUTE_JOBS:-$(nproc 2>/dev/null || echo 2)}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() {
  echo "consumer check: FAILED: $*" >&2
  exit 1
}

# The consumers are built by the compiler that built the library, and find absl where it did.
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
common=(-G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_COMPILER=$(cached CMAKE_CXX_COMPILER)")
for variable in absl_DIR CMAKE_TOOLCHAIN_FILE; do
  value=$(cached "$variable")
  if [[ -n $value && $value != *-NOTFOUND ]]; then common+=("-D$variable=$value"); fi
done

echo "consumer check: install, then move the prefix"
cmake --install "$build" --prefix "$scratch/installed" >"$scratch/log" 2>&1 || fail "install: $(cat "$scratch/log")"
mv "$scratch/installed" "$scratch/moved"
for path in "$root" "$build" "$scratch"; do
  if grep -rFl --include='*.cmake' -e "$path" "$scratch/moved"; then
    fail "the files above name $path, so the package is not relocatable"
  fi
done
[[ -n $(find "$scratch/moved" -name LICENSE) ]] || fail "no licence file is installed"

echo "consumer check: find_package"
# With xxHash hidden: an installed tokroute must not need it.
cmake -S "$here/find_package" -B "$scratch/find_package" "${common[@]}" "-DCMAKE_PREFIX_PATH=$scratch/moved" \
  -DCMAKE_DISABLE_FIND_PACKAGE_xxHash=ON >"$scratch/log" 2>&1 || fail "configure: $(cat "$scratch/log")"
cmake --build "$scratch/find_package" --parallel "$jobs" >"$scratch/log" 2>&1 || fail "build: $(cat "$scratch/log")"
"$scratch/find_package/consumer" || fail "the find_package consumer does not run"

echo "consumer check: add_subdirectory"
cmake -S "$here/add_subdirectory" -B "$scratch/add_subdirectory" "${common[@]}" "-DTOKROUTE_SOURCE_DIR=$root" \
  >"$scratch/log" 2>&1 || fail "configure: $(cat "$scratch/log")"
cmake --build "$scratch/add_subdirectory" --parallel "$jobs" >"$scratch/log" 2>&1 || fail "build: $(cat "$scratch/log")"
"$scratch/add_subdirectory/consumer" || fail "the add_subdirectory consumer does not run"

# refused PROJECT WORDS: configuring PROJECT fails, and says why.
refused() {
  echo "consumer check: $1 is refused"
  if cmake -S "$here/$1" -B "$scratch/$1" "${common[@]}" "-DCMAKE_PREFIX_PATH=$scratch/moved" >"$scratch/log" 2>&1; then
    fail "$1 was accepted"
  fi
  # CMake wraps its messages, hence one line.
  tr -s ' \n' ' ' <"$scratch/log" | grep -qF -- "$2" || fail "$1 fails for another reason: $(cat "$scratch/log")"
}
refused wrong_version 'compatible with requested version "99.0"'
refused unknown_component 'has no component "nonesuch"'

echo "consumer check: passed"
