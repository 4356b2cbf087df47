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

tree_of() { echo "$scratch/${1//[^A-Za-z0-9]/_}"; }
# build_and_run COMPILER FLAGS: output in TREE.out; without TREE.done it failed, and TREE.log says how.
build_and_run() {
  local tree
  tree=$(tree_of "${1##*/} $2")
  {
    cmake -S "$scratch/source" -B "$tree" "${common[@]}" "-DCMAKE_CXX_COMPILER=$1" -DCMAKE_BUILD_TYPE=None \
      "-DCMAKE_CXX_FLAGS=$2" &&
      cmake --build "$tree" --parallel 1 --target decision_digest &&
      "$tree/decision_digest" >"$tree.out" &&
      touch "$tree.done"
  } >"$tree.log" 2>&1
}

# Side by side: the program is one large unit, at which the other processors would idle.
variants=("-O0" "-O3" "-O3 -march=native")
running=0
for flags in "${variants[@]}"; do
  for one in "${compilers[@]}"; do
    if ((running >= jobs)); then
      wait -n || true
      running=$((running - 1))
    fi
    build_and_run "$one" "$flags" &
    running=$((running + 1))
  done
done
wait || true

first=
for one in "${compilers[@]}"; do
  for flags in "${variants[@]}"; do
    name="${one##*/} $flags"
    tree=$(tree_of "$name")
    [[ -f $tree.done ]] || fail "$name: $(tail -n 100 "$tree.log")"
    if [[ -z $first ]]; then
      first=$tree.out
      # Worth comparing only if decisions are made, of many kinds.
      [[ $(grep -c '#' "$first") -ge 15000 ]] || fail "few decisions: $(head -n 20 "$first")"
      for word in sticky gate_open exploration nobody_warm rerouted 'tied 3'; do
        grep -q "$word" "$first" || fail "nothing in the output says \"$word\": compare more"
      done
    elif ! cmp -s "$first" "$tree.out"; then
      diff "$first" "$tree.out" >"$log" || true
      fail "$name differs from ${compilers[0]##*/} ${variants[0]}: $(head -n 20 "$log")"
    fi
    say "$name: $(wc -l <"$tree.out") lines, $(sha256sum <"$tree.out" | cut -c1-16)"
  done
done
say "passed"
