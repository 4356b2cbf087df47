#!/usr/bin/env bash
# tests/packaging/determinism.sh BUILD_DIR
#
# Decisions are the same bytes with GCC and Clang, at -O0, -O3 and -O3 -march=native (where multiplications and additions
# are fused): library and program are compiled in six ways, and the output is compared.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mkdir "$scratch/source"
cat >"$scratch/source/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.24)
project(determinism LANGUAGES CXX)
add_subdirectory("$root" tokroute)
add_executable(decision_digest "$here/decision_digest.cc")
target_link_libraries(decision_digest PRIVATE tokroute::tokroute)
CMAKE

# The build's compiler, and the other one of g++ and clang++-19.
compilers=("$compiler")
other=clang++-19
if "$compiler" --version | grep -qi clang; then other=g++; fi
if command -v "$other" >/dev/null; then compilers+=("$other"); else skip "$other (not installed)"; fi

if echo | "$compiler" -march=native -dM -E -x c++ - 2>/dev/null | grep -qE '__FMA__|__ARM_FEATURE_FMA'; then
  say "-march=native fuses multiplications and additions here"
else
  skip "fused multiply-add (-march=native has none on this processor)"
fi

first=
for one in "${compilers[@]}"; do
  for flags in "-O0" "-O3" "-O3 -march=native"; do
    name="${one##*/} $flags"
    tree=$scratch/${name//[^A-Za-z0-9]/_}
    quietly "$name, configure" cmake -S "$scratch/source" -B "$tree" "${common[@]}" "-DCMAKE_CXX_COMPILER=$one" \
      -DCMAKE_BUILD_TYPE=None "-DCMAKE_CXX_FLAGS=$flags"
    quietly "$name, build" cmake --build "$tree" --parallel "$jobs" --target decision_digest
    "$tree/decision_digest" >"$tree.out" || fail "$name: the program fails"
    if [[ -z $first ]]; then
      first=$tree.out
      # Worth comparing only if decisions are made, of many kinds.
      [[ $(grep -c '#' "$first") -ge 15000 ]] || fail "few decisions: $(head -n 20 "$first")"
      for word in sticky gate_open exploration nobody_warm rerouted 'tied 3'; do
        grep -q "$word" "$first" || fail "nothing in the output says \"$word\": compare more"
      done
    elif ! cmp -s "$first" "$tree.out"; then
      fail "$name differs from ${compilers[0]##*/} -O0: $(diff "$first" "$tree.out" | head -n 20)"
    fi
    say "$name: $(wc -l <"$tree.out") lines, $(sha256sum <"$tree.out" | cut -c1-16)"
  done
done
say "passed"
