# Sourced by the scripts of this folder: where things are, how to fail, and what was left out.
#
# Each script takes BUILD_DIR, a configured and built tree. What it makes lies in $scratch, which goes when it ends.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
check=$(basename "$0" .sh)
jobs=${TOKROUTE_JOBS:-$(nproc 2>/dev/null || echo 2)}
# Where check.sh gathers what was left out; on its own a script only prints it.
skipped_file=${TOKROUTE_SKIPPED_FILE:-/dev/null}

if [[ $# -ne 1 || ! -f $1/CMakeCache.txt ]]; then
  echo "usage: $0 BUILD_DIR (a configured and built tree)" >&2
  exit 2
fi
build=$(cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
log=$scratch/log

say() { echo "$check: $*"; }
fail() {
  echo "$check: FAILED: $*" >&2
  exit 1
}
# Never silently: a check that did not run is not one that passed.
skip() {
  say "SKIPPED: $*"
  echo "$check: $*" >>"$skipped_file"
}

# quietly WHAT COMMAND...: shows the command's output only if it fails.
quietly() {
  local what=$1
  shift
  "$@" >"$log" 2>&1 || fail "$what: $(head -n 100 "$log")"
}

cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
compiler=$(cached CMAKE_CXX_COMPILER)
# Outside projects are built by the compiler that built the library, and find absl where it did.
common=(-G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_COMPILER=$compiler")
for variable in absl_DIR CMAKE_TOOLCHAIN_FILE; do
  value=$(cached "$variable")
  if [[ -n $value && $value != *-NOTFOUND ]]; then common+=("-D$variable=$value"); fi
done

# The library as CMakeLists.txt lists it.
listed() { sed -n "/^set($1\$/,/)/p" "$root/CMakeLists.txt" | grep -oE "(include|src)/[A-Za-z0-9_/]+\.(h|cc)"; }
mapfile -t headers < <(listed TOKROUTE_PUBLIC_HEADERS)
mapfile -t sources < <(listed TOKROUTE_SOURCES)
[[ ${#headers[@]} -gt 10 && ${#sources[@]} -gt 5 ]] || fail "the lists in CMakeLists.txt are not found"

# one_unit FILE: a translation unit that includes every public header.
one_unit() { printf '#include "%s"\n' "${headers[@]#include/}" >"$1"; }

# The folders that hold absl/ and xxhash.h, as the build found them.
absl_include=
xxhash_include=
find_dependency_includes() {
  mkdir -p "$scratch/where"
  cat >"$scratch/where/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.24)
project(where LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "${TOKROUTE_MODULES}")
find_package(absl REQUIRED CONFIG)
find_package(xxHash REQUIRED)
foreach(target IN ITEMS absl::status xxHash::xxhash)
  get_target_property(path ${target} INTERFACE_INCLUDE_DIRECTORIES)
  list(GET path 0 path)
  message(STATUS "where ${target}=${path}")
endforeach()
CMAKE
  quietly "looking for absl and xxHash" cmake -S "$scratch/where" -B "$scratch/where/build" "${common[@]}" \
    "-DTOKROUTE_MODULES=$root/cmake"
  absl_include=$(sed -n 's/^-- where absl::status=//p' "$log")
  xxhash_include=$(sed -n 's/^-- where xxHash::xxhash=//p' "$log")
  [[ -f $absl_include/absl/status/status.h ]] || fail "no absl/status/status.h in '$absl_include'"
  [[ -f $xxhash_include/xxhash.h ]] || fail "no xxhash.h in '$xxhash_include'"
}
