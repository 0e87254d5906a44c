#!/usr/bin/env bash
# All tests that need no GPU; `make test` runs this. First what they need, in the background where it
# leaves the processor free, then all tests in as many workers as keep two cores busy: those on Slurm
# mostly wait. Each part's output comes in one piece.
# Usage: tests/all.sh [options of pytest]
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$logs"' EXIT
failed=0

make --no-print-directory system-packages >"$logs/packages" 2>&1 &
packages=$!
make --no-print-directory test-exports >"$logs/exports" 2>&1 &
exports=$!
make --no-print-directory demo-model || exit
python tests/fetch_tokenizers.py || exit
wait "$packages" || failed=1
tail -n 20 "$logs/packages"
wait "$exports" || failed=1
cat "$logs/exports"
if [ "$failed" != 0 ]; then echo "the exports or the packages failed, see above; all other tests follow" >&2; fi

python -m pytest -n 3 --durations=20 "$@" \
    tests/unit tests/browser tests/workflow tests/server tests/cluster tests/containers || failed=1
exit "$failed"
