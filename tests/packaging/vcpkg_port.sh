#!/usr/bin/env bash
# tests/packaging/vcpkg_port.sh BUILD_DIR
#
# Executes the overlay port in cmake/vcpkg-port under stand-ins for vcpkg's functions, looks at what it packages, and
# builds a consumer against that, in both configurations. Also: one version everywhere.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

port=$root/cmake/vcpkg-port/tokroute

say "one version in project(), vcpkg.json and the port"
project=$(sed -n 's/^ *VERSION \([0-9][0-9.]*\)$/\1/p' "$root/CMakeLists.txt")
[[ -n $project ]] || fail "no version in CMakeLists.txt"
for manifest in "$root/vcpkg.json" "$port/vcpkg.json"; do
  version=$(sed -n 's/^ *"version": "\([^"]*\)",\{0,1\}$/\1/p' "$manifest")
  [[ $version == "$project" ]] || fail "${manifest#"$root/"} says '$version', project() says '$project'"
done

say "the portfile, executed"
options=("-DCMAKE_CXX_COMPILER=$compiler")
for option in "${common[@]}"; do
  if [[ $option == -Dabsl_DIR=* || $option == -DCMAKE_TOOLCHAIN_FILE=* ]]; then options+=("$option"); fi
done
# portfile WORK_DIR [OPTION]
portfile() {
  quietly "the portfile" cmake "-DPORT_DIR=$port" "-DWORK_DIR=$1" "-DJOBS=$jobs" "${@:2}" \
    "-DCONFIGURE_OPTIONS=$(IFS=';' && echo "${options[*]}")" -P "$here/vcpkg_stubs.cmake"
}
portfile "$scratch/vcpkg"

package=$scratch/vcpkg/packages
for file in include/tokroute/tokroute.h lib/libtokroute.a debug/lib/libtokroute.a share/tokroute/copyright \
  share/tokroute/usage share/tokroute/tokrouteConfig.cmake share/tokroute/tokrouteTargets-debug.cmake; do
  [[ -f $package/$file ]] || fail "the package lacks $file"
done
# What vcpkg's own checks after a build complain about.
acceptable() {
  for path in debug/include debug/share lib/cmake debug/lib/cmake bin debug/bin share/licenses; do
    [[ ! -e $1/$path ]] || fail "the package has $path: $(find "$1/$path" | head -n 5)"
  done
  [[ -z $(find "$1" -type d -empty) ]] || fail "empty folders: $(find "$1" -type d -empty)"
}
acceptable "$package"
cmp -s "$root/LICENSE" "$package/share/tokroute/copyright" || fail "the copyright is not LICENSE"
if grep -rlF -e "$root" -e "$scratch" --include='*.cmake' "$package"; then fail "the files above name absolute paths"; fi

say "a consumer of the package, with the lines of its usage file"
mkdir "$scratch/consumer"
{
  printf 'cmake_minimum_required(VERSION 3.24)\nproject(usage LANGUAGES CXX)\n'
  printf 'add_executable(main "%s/find_package/main.cc" "%s/find_package/second_unit.cc")\n' "$root/tests/consumer"{,}
  printf 'target_compile_definitions(main PRIVATE TOKROUTE_CONSUMER_VERSION="%s")\n' "$project"
  sed -n 's/^  //p' "$port/usage"
} >"$scratch/consumer/CMakeLists.txt"
mv "$package" "$scratch/moved"  # As vcpkg does, into installed/<triplet>.
for type in Release Debug; do
  quietly "configure, $type" cmake -S "$scratch/consumer" -B "$scratch/consumer/$type" "${common[@]}" \
    "-DCMAKE_BUILD_TYPE=$type" "-DCMAKE_PREFIX_PATH=$scratch/moved" -DCMAKE_DISABLE_FIND_PACKAGE_xxHash=ON
  quietly "build, $type" cmake --build "$scratch/consumer/$type" --parallel "$jobs"
  quietly "run, $type" "$scratch/consumer/$type/main"
done
grep -q 'debug/lib/libtokroute.a' "$scratch/consumer/Debug/build.ninja" || fail "a Debug consumer links the release library"

if [[ $(cached TOKROUTE_BUILD_TOOLS) == ON && $(cached BUILD_SHARED_LIBS) == OFF && $(cached TOKROUTE_INSTALL) == ON ]]; then
  say "the feature \"tools\""
  portfile "$scratch/with_tools" "-DFROM_BUILD=$build"
  acceptable "$scratch/with_tools/packages"
  quietly "the packaged tool" "$scratch/with_tools/packages/tools/tokroute/tokroute-sim" --version
else
  skip "the port's feature \"tools\" (the build tree is without tools, shared, or without install rules)"
fi
say "passed"
