#!/usr/bin/env bash
# cmake/install-deps.sh GROUP
#
# Installs what is missing on Debian and Ubuntu; says what to do elsewhere. Groups:
#   build  compiler, CMake, and the libraries for the library, tests, benchmarks, examples and tools
#   ci     the same, Clang 19, and what tests/packaging wants: Clang 16, a compiler for ARM64, strace
set -euo pipefail

packages=(g++ cmake ninja-build pkg-config libabsl-dev libxxhash-dev libgtest-dev libgmock-dev libbenchmark-dev
  nlohmann-json3-dev libcli11-dev)
# Wanted where the distribution has them: a check that lacks one says that it is skipped.
optional=()
case "${1:-}" in
  build) ;;
  ci)
    packages+=(clang-19 libclang-rt-19-dev)
    optional+=(clang-16 g++-aarch64-linux-gnu strace)
    ;;
  *)
    echo "usage: $0 build|ci" >&2
    exit 2
    ;;
esac

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  cat <<'MESSAGE'
Not a Debian or Ubuntu system: nothing is installed. You need a C++20 compiler (GCC 12, Clang 16 or later), CMake 3.24
or later, Ninja, and abseil, xxHash, GoogleTest, Google Benchmark, nlohmann-json and CLI11. With vcpkg, whose manifest
vcpkg.json lists the libraries:
  export CMAKE_TOOLCHAIN_FILE="$VCPKG_ROOT/scripts/buildsystems/vcpkg.cmake"
  cmake --preset release -DVCPKG_MANIFEST_FEATURES="tests;benchmarks;tools"
MESSAGE
  exit 0
fi

installed() {
  [[ $(dpkg-query -W -f='${Status}' "$1" 2>/dev/null || true) == "install ok installed" ]]
}
missing=()
for package in "${packages[@]}" "${optional[@]}"; do
  if ! installed "$package"; then missing+=("$package"); fi
done
if [[ ${#missing[@]} -eq 0 ]]; then exit 0; fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "Missing: ${missing[*]}. Install them as root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q
# Only now does apt know what there is.
wanted=()
for package in "${missing[@]}"; do
  if [[ " ${optional[*]} " == *" $package "* ]] && ! apt-cache show "$package" >/dev/null 2>&1; then
    echo "Not in this distribution, done without: $package"
  else
    wanted+=("$package")
  fi
done
if [[ ${#wanted[@]} -eq 0 ]]; then exit 0; fi
echo "Installing: ${wanted[*]}"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${wanted[@]}"
