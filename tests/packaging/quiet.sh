#!/usr/bin/env bash
# tests/packaging/quiet.sh BUILD_DIR
#
# 10,000 decisions, first tokens and ends make no system call at all: no file, no socket, no thread, no lock that waits,
# no memory. Seen twice: by strace, and by a kernel that kills the process for any call but read, write and exit.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ $(uname -s) != Linux ]]; then
  skip "everything (needs Linux)"
  exit 0
fi
quietly "install" cmake --install "$build" --prefix "$scratch/installed"
mkdir "$scratch/source"
cat >"$scratch/source/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.24)
project(quiet LANGUAGES CXX)
find_package(tokroute REQUIRED)
add_executable(ten_thousand_decisions "$here/ten_thousand_decisions.cc")
target_link_libraries(ten_thousand_decisions PRIVATE tokroute::tokroute)
CMAKE
quietly "configure" cmake -S "$scratch/source" -B "$scratch/build" "${common[@]}" "-DCMAKE_PREFIX_PATH=$scratch/installed"
quietly "build" cmake --build "$scratch/build"
program=$scratch/build/ten_thousand_decisions

say "confined by the kernel"
if "$program" confined 2>"$log"; then
  # A guard that would let everything through guards nothing.
  if ("$program" confined-open; exit $?) 2>/dev/null; then fail "opening a file goes unnoticed when confined"; fi
elif grep -q 'cannot be confined' "$log"; then
  skip "confinement (this kernel or container does not allow seccomp)"
else
  fail "killed, or not all were routed: $(cat "$log")"
fi

# between MODE: the system calls between the marks, one per line.
between() {
  strace -f -o "$scratch/trace" "$program" "$@" 2>/dev/null || fail "the program fails under strace"
  grep -q 'write(2, "BEGIN' "$scratch/trace" && grep -q 'write(2, "END' "$scratch/trace" || fail "a mark is missing"
  sed -e '1,/write(2, "BEGIN/d' -e '/write(2, "END/,$d' "$scratch/trace"
}
if command -v strace >/dev/null && strace -f -o /dev/null true 2>/dev/null; then
  say "watched by strace"
  calls=$(between)
  [[ -z $calls ]] || fail "system calls while deciding: $(head -n 20 <<<"$calls")"
  grep -q 'open' <<<"$(between open)" || fail "opening a file goes unnoticed by strace"
  grep -q 'clone' <<<"$(between thread)" || fail "starting a thread goes unnoticed by strace"
else
  skip "strace (it is missing, or may not trace here)"
fi
say "passed"
