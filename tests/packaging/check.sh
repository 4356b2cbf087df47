#!/usr/bin/env bash
# tests/packaging/check.sh BUILD_DIR
#
# That tokroute builds, installs and decides alike wherever it is embedded. Runs every check of this folder on a
# configured and built tree (tests/consumer/check.sh covers the plain consumers), and says at the end what was left out.
# The two shared objects with hidden visibility are a ctest, hidden_visibility_test.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export TOKROUTE_SKIPPED_FILE=$scratch/skipped
: >"$TOKROUTE_SKIPPED_FILE"
for part in installed dependencies_elsewhere vcpkg_port headers quiet determinism; do
  started=$SECONDS
  "$here/$part.sh" "$build" || fail "$part"
  say "$part took $((SECONDS - started)) s"
done
if [[ -s $TOKROUTE_SKIPPED_FILE ]]; then
  say "passed, but these were SKIPPED:"
  sed 's/^/  /' "$TOKROUTE_SKIPPED_FILE"
else
  say "passed, nothing was skipped"
fi
