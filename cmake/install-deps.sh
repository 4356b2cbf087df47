#!/usr/bin/env bash
# cmake/install-deps.sh GROUP
#
# Installs what is missing on Debian and Ubuntu; says what to do elsewhere. Groups:
#   build  compiler, CMake, and the libraries for the library, tests, benchmarks, examples and tools
#   ci     the same, and Clang 19
set -euo pipefail

packages=(g++ cmake ninja-build pkg-config libabsl-dev libxxhash-dev libgtest-dev libgmock-dev libbenchmark-dev
  nlohmann-json3-dev libcli11-dev)
case "${1:-}" in
  build) ;;
  ci) packages+=(clang-19 libclang-rt-19-dev) ;;
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

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  if [[ $status != "install ok installed" ]]; then missing+=("$package"); fi
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
echo "Installing: ${missing[*]}"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
