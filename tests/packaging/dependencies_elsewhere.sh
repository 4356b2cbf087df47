#!/usr/bin/env bash
# tests/packaging/dependencies_elsewhere.sh BUILD_DIR
#
# abseil and xxHash that lie elsewhere: in another prefix, as targets of the embedder, xxHash as upstream installs it and
# as a bare header. And two that must be refused: an xxHash that is too old, and an abseil that does not fit its headers.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

find_dependency_includes
system_absl=${common[*]}
if [[ $system_absl =~ -Dabsl_DIR=([^ ]+) ]]; then absl_dir=${BASH_REMATCH[1]}; else fail "the build has no absl_DIR"; fi
prefix=$(cd "$absl_include/.." && pwd)
if [[ $absl_dir != "$prefix"/*/cmake/absl ]]; then
  skip "abseil in $absl_dir is not laid out as one prefix, so no copy of it is made"
  exit 0
fi

# A copy of the installed abseil, as another prefix has it. Its package finds itself from where it lies.
library_path=${absl_dir#"$prefix/"}
library_path=${library_path%/cmake/absl}
copy=$scratch/abseil
mkdir -p "$copy/include" "$copy/$library_path/cmake"
cp -r "$absl_include/absl" "$copy/include/"
cp -r "$absl_dir" "$copy/$library_path/cmake/"
cp -a "$prefix/$library_path"/libabsl_* "$copy/$library_path/"

# xxHash as a bare header, as upstream's package, and an old one.
mkdir -p "$scratch/bare/include" "$scratch/old/include" "$scratch/upstream-source"
cp "$xxhash_include/xxhash.h" "$scratch/bare/include/"
sed 's/\(define *XXH_VERSION_MINOR *\)[0-9]*/\17/' "$xxhash_include/xxhash.h" >"$scratch/old/include/xxhash.h"
cp "$xxhash_include/xxhash.h" "$scratch/upstream-source/"
cat >"$scratch/upstream-source/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.24)
project(xxHash VERSION 0.8.2 LANGUAGES CXX)
include(CMakePackageConfigHelpers)
file(WRITE "${PROJECT_BINARY_DIR}/xxhash.cc" "#define XXH_STATIC_LINKING_ONLY\n#define XXH_IMPLEMENTATION\n#include \"xxhash.h\"\n")
add_library(xxhash STATIC "${PROJECT_BINARY_DIR}/xxhash.cc")
target_include_directories(xxhash PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:include>)
install(TARGETS xxhash EXPORT xxHashTargets ARCHIVE DESTINATION lib)
install(FILES xxhash.h DESTINATION include)
install(EXPORT xxHashTargets NAMESPACE xxHash:: DESTINATION lib/cmake/xxHash)
file(WRITE "${PROJECT_BINARY_DIR}/xxHashConfig.cmake" "include(\"\${CMAKE_CURRENT_LIST_DIR}/xxHashTargets.cmake\")\n")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/xxHashConfigVersion.cmake" COMPATIBILITY AnyNewerVersion)
install(FILES "${PROJECT_BINARY_DIR}/xxHashConfig.cmake" "${PROJECT_BINARY_DIR}/xxHashConfigVersion.cmake"
        DESTINATION lib/cmake/xxHash)
CMAKE
quietly "xxHash, configure" cmake -S "$scratch/upstream-source" -B "$scratch/upstream-build" -G Ninja \
  "-DCMAKE_CXX_COMPILER=$compiler" "-DCMAKE_INSTALL_PREFIX=$scratch/upstream"
quietly "xxHash, install" cmake --build "$scratch/upstream-build" --target install

# Nothing of the system's may be found by default, else the wrong copy would pass unnoticed.
elsewhere=(-G Ninja "-DCMAKE_MAKE_PROGRAM=$(command -v ninja)" -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_COMPILER=$compiler" "-DTOKROUTE_SOURCE_DIR=$root"
  -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF -DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=OFF)
embedder() {
  local name=$1
  shift
  quietly "$name, configure" cmake -S "$here/dependencies_elsewhere" -B "$scratch/$name" "${elsewhere[@]}" "$@"
}
# uses NAME SOURCE HEADER PATH: the library's SOURCE is compiled with HEADER of PATH.
uses() {
  local object=tokroute/CMakeFiles/tokroute.dir/src/$2.o
  [[ -f $scratch/$1/$object ]] || quietly "$1, build" ninja -C "$scratch/$1" "$object"
  # To a file: with pipefail, a grep that stops reading early makes ninja's broken pipe the result.
  ninja -C "$scratch/$1" -t deps "$object" >"$log"
  grep -qF -- "$4/$3" "$log" || fail "$1: $3 is not taken from ${4#"$scratch/"}: $(grep -F "/$3" "$log")"
}

say "abseil in another prefix, xxHash as upstream installs it"
embedder prefixes "-DCMAKE_PREFIX_PATH=$copy;$scratch/upstream"
quietly "prefixes, build" cmake --build "$scratch/prefixes" --parallel "$jobs"
uses prefixes policy.cc absl/status/status.h "$copy/include"
uses prefixes prefix/block_key.cc xxhash.h "$scratch/upstream/include"
"$scratch/prefixes/consumer" >/dev/null || fail "prefixes: the consumer does not run"

say "xxHash as a bare header, in a prefix and named"
embedder bare_prefix "-DCMAKE_PREFIX_PATH=$copy;$scratch/bare"
uses bare_prefix prefix/block_key.cc xxhash.h "$scratch/bare/include"
embedder bare_named "-DCMAKE_PREFIX_PATH=$copy" "-DxxHash_INCLUDE_DIR=$scratch/bare/include"
uses bare_named prefix/block_key.cc xxhash.h "$scratch/bare/include"

if compgen -G "$copy/$library_path/libabsl_*.a" >/dev/null; then
  say "both as targets of the embedder, and installed together with it"
  # Looking for either package would now be an error.
  embedder targets -DABSEIL=targets "-DABSEIL_INCLUDE=$copy/include" "-DABSEIL_LIBRARIES=$copy/$library_path" \
    -DCMAKE_DISABLE_FIND_PACKAGE_absl=ON -DXXHASH=targets "-DXXHASH_DIRECTORY=$scratch/bare/include" \
    -DCMAKE_DISABLE_FIND_PACKAGE_xxHash=ON -DTOKROUTE_INSTALL=ON "-DCMAKE_INSTALL_PREFIX=$scratch/together"
  quietly "targets, build and install" cmake --build "$scratch/targets" --parallel "$jobs" --target install
  uses targets policy.cc absl/status/status.h "$copy/include"
  uses targets prefix/block_key.cc xxhash.h "$scratch/bare/include"
  "$scratch/targets/consumer" >/dev/null || fail "targets: the consumer does not run"
  mv "$scratch/together" "$scratch/together_moved"
  quietly "together, configure" cmake -S "$root/tests/consumer/find_package" -B "$scratch/together_consumer" \
    "${elsewhere[@]}" "-DCMAKE_PREFIX_PATH=$scratch/together_moved"
  quietly "together, build" cmake --build "$scratch/together_consumer" --parallel "$jobs"
  "$scratch/together_consumer/consumer" >/dev/null || fail "together: the consumer does not run"
else
  skip "abseil as targets of the embedder (no static abseil is installed)"
fi

# refused NAME WORDS OPTION...: configuring fails, and says why.
refused() {
  local name=$1 words=$2
  shift 2
  say "$name is refused"
  if cmake -S "$here/dependencies_elsewhere" -B "$scratch/$name" "${elsewhere[@]}" "$@" >"$log" 2>&1; then
    fail "$name was accepted"
  fi
  # CMake wraps its messages, hence one line.
  tr -s ' \n' ' ' <"$log" | grep -qF -- "$words" || fail "$name fails for another reason: $(cat "$log")"
}
refused old_xxhash 'required is at least "0.8"' "-DCMAKE_PREFIX_PATH=$copy;$scratch/old"

# The libraries stay as they are, and the headers now say otherwise: what a C++20 build sees of an abseil built as C++14.
if grep -q '^#define ABSL_OPTION_USE_STD_STRING_VIEW 0' "$copy/include/absl/base/options.h"; then
  sed -i 's/^\(#define ABSL_OPTION_USE_STD_STRING_VIEW\) 0/\1 1/' "$copy/include/absl/base/options.h"
  refused unfit_abseil 'compiled with other options' "-DCMAKE_PREFIX_PATH=$copy;$scratch/bare"
else
  skip "an abseil with a string_view of its own behind headers without one (the installed one has none)"
fi
say "passed"
