#!/usr/bin/env bash
# examples/demo.sh [ARGUMENT...]
#
# From a fresh clone to a routed trace: installs what is missing, builds the simulator, replays the trace built into it.
# Arguments are passed on to `tokroute-sim replay`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/cmake/install-deps.sh" build

# Quiet unless something goes wrong, so that what you see is the demo. File arguments stay relative to your directory.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "Building tokroute-sim (a minute or so the first time) ..." >&2
if ! (cd "$root" && cmake --preset release &&
  cmake --build --preset release --parallel "${TOKROUTE_JOBS:-$(nproc 2>/dev/null || echo 2)}" --target tokroute-sim) \
  >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
"$root/build/release/bin/tokroute-sim" replay "$@"
