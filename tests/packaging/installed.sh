#!/usr/bin/env bash
# tests/packaging/installed.sh BUILD_DIR
#
# What is installed, to the file; and programs that use it, moved: with every header in two units, without exceptions and
# RTTI, with AddressSanitizer against a library without it, and as a shared library.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

say "the installed files"
quietly "install" cmake --install "$build" --prefix "$scratch/installed"
mv "$scratch/installed" "$scratch/moved"
# Headers: those of the list and no others. The rest by pattern: names of libraries differ between systems.
(cd "$scratch/moved" && find . -type f -o -type l) | sed 's|^\./||' | sort >"$scratch/files"
printf '%s\n' "${headers[@]}" | sort >"$scratch/expected"
grep '^include/' "$scratch/files" >"$scratch/found" || true
# Components bring headers of their own; all must lie in the one folder.
missing=$(comm -23 "$scratch/expected" "$scratch/found")
[[ -z $missing ]] || fail "listed and not installed: $missing"
for file in $(comm -13 "$scratch/expected" "$scratch/found"); do
  [[ $file == include/tokroute/*.h && -f $root/$file ]] || fail "installed, and no header of ours: $file"
done
stray=$(grep -vE -e '^include/' -e '^lib[^/]*/([^/]+/)?libtokroute[a-z_]*\.(a|so[0-9.]*)$' -e '^bin/tokroute-[a-z-]+$' \
  -e '^lib[^/]*/([^/]+/)?cmake/tokroute/tokroute[A-Za-z]*(Config|ConfigVersion|Targets|Targets-[a-z]+)\.cmake$' \
  -e '^share/licenses/tokroute/LICENSE$' "$scratch/files" || true)
[[ -z $stray ]] || fail "also installed: $stray"

# consumer NAME PREFIX FLAGS: builds and runs consumer/ with these compiler flags.
consumer() {
  local name=$1
  say "a consumer, ${name//_/ }"
  quietly "$name, configure" cmake -S "$here/consumer" -B "$scratch/$name" "${common[@]}" "-DCMAKE_PREFIX_PATH=$2" \
    "-DCMAKE_CXX_FLAGS=$3" -DCMAKE_CXX_FLAGS_RELEASE=-O1
  quietly "$name, build" cmake --build "$scratch/$name" --parallel "$jobs"
  quietly "$name, run" "$scratch/$name/smoke"
}
consumer without_exceptions_and_RTTI "$scratch/moved" "-fno-exceptions -fno-rtti -Wall -Wextra -Werror"
if echo 'int main() {}' | "$compiler" -x c++ -fsanitize=address,undefined -o "$scratch/probe" - 2>/dev/null; then
  consumer with_AddressSanitizer "$scratch/moved" "-fsanitize=address,undefined -fno-sanitize-recover=all"
else
  skip "a consumer with AddressSanitizer ($compiler has none here)"
fi

say "a shared library"
quietly "shared, configure" cmake -S "$root" -B "$scratch/shared" "${common[@]}" -DBUILD_SHARED_LIBS=ON \
  -DTOKROUTE_BUILD_TESTS=OFF -DTOKROUTE_BUILD_BENCHMARKS=OFF -DTOKROUTE_BUILD_EXAMPLES=OFF -DTOKROUTE_BUILD_TOOLS=OFF \
  -DTOKROUTE_BUILD_FUZZERS=OFF "-DCMAKE_INSTALL_PREFIX=$scratch/shared_installed"
quietly "shared, build and install" cmake --build "$scratch/shared" --parallel "$jobs" --target install
[[ -z $(find "$scratch/shared_installed" -name '*.a') ]] || fail "a static library where a shared one was asked for"
mv "$scratch/shared_installed" "$scratch/shared_moved"
consumer with_a_shared_library "$scratch/shared_moved" ""
say "passed"
