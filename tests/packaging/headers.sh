#!/usr/bin/env bash
# tests/packaging/headers.sh BUILD_DIR
#
# Compiles every public header, a program that uses them, and where it matters the sources, as others would: without
# exceptions and RTTI, with an abseil whose string_view is the standard one, with Clang 16, and for ARM64. Syntax only:
# programs that run are in installed.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

find_dependency_includes
# The two dependencies alone: a cross compiler must not be shown the other headers that lie beside them.
mkdir "$scratch/dependencies"
ln -s "$absl_include/absl" "$scratch/dependencies/absl"
ln -s "$xxhash_include/xxhash.h" "$scratch/dependencies/xxhash.h"
one_unit "$scratch/all_headers.cc"
consumers=("$scratch/all_headers.cc" "$here/consumer/smoke.cc")
all=("${consumers[@]}" "${sources[@]/#/"$root/"}")

# compiles WHAT FILES... -- COMPILER FLAGS...: each of the files, several at a time.
compiles() {
  local what=$1 files=()
  shift
  while [[ $1 != -- ]]; do
    files+=("$1")
    shift
  done
  shift
  say "$what: ${#files[@]} units, the ${#headers[@]} headers in one of them"
  printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$jobs" "$@" -std=c++20 -fsyntax-only -Wall -Wextra -Werror \
    "-I$root/include" "-I$root/src" -isystem "$scratch/dependencies" >"$log" 2>&1 || fail "$what: $(head -n 100 "$log")"
}

compiles "no exceptions, no RTTI" "${all[@]}" -- "$compiler" -fno-exceptions -fno-rtti

# Newer abseils, and vcpkg's, have the standard types under their names.
mkdir -p "$scratch/std_aliases/absl/base"
sed -E 's/^(#define ABSL_OPTION_USE_STD_(ANY|OPTIONAL|STRING_VIEW|VARIANT|ORDERING)) [0-9]+/\1 1/' \
  "$absl_include/absl/base/options.h" >"$scratch/std_aliases/absl/base/options.h"
cat >"$scratch/is_standard.cc" <<'CC'
#include <string_view>
#include <type_traits>
#include "absl/strings/string_view.h"
static_assert(std::is_same_v<absl::string_view, std::string_view>);
CC
compiles "abseil with standard types" "$scratch/is_standard.cc" "${all[@]}" -- "$compiler" "-I$scratch/std_aliases"

if command -v clang++-16 >/dev/null; then
  compiles "Clang 16" "${consumers[@]}" -- clang++-16
else
  skip "Clang 16 (no clang++-16 here; cmake/install-deps.sh ci installs it where there is apt)"
fi
if command -v aarch64-linux-gnu-g++ >/dev/null; then
  compiles "ARM64" "${all[@]}" -- aarch64-linux-gnu-g++
else
  skip "ARM64 (no aarch64-linux-gnu-g++ here; cmake/install-deps.sh ci installs it where there is apt)"
fi
say "passed"
