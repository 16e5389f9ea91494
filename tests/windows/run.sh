#!/usr/bin/env bash
# The tests by a CPython for Windows under Wine: run.sh [quick]   `quick` is a few minutes of it.
# $KOHYA_BUCKET_WINDOWS is the folder with that Python, by default ~/.cache/kohya_bucket/windows; it is made where it is absent.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
export WIN="${KOHYA_BUCKET_WINDOWS:-$HOME/.cache/kohya_bucket/windows}"
cd "$here/../.."
[ -e "$WIN/python/Lib/site-packages/pytest" ] || "$here/setup.sh" "$WIN" || exit
PYTHONPATH="Z:$(pwd | tr / '\\')" # also of the processes that tests start
export PYTHONPATH
if [ "${1:-}" = quick ]; then # sizes, plan, store: written, read, packed, verified, pruned, by several processes
  parts=("tests/windows tests/images/test_metadata_cache.py tests/latents/test_latent_store.py
    tests/latents/test_maintenance.py tests/planning/test_plan_placements.py tests/cli/test_plan.py")
else
  # a process for each file: torch, used after hundreds of tests in one, ends the process at times there
  mapfile -t parts < <(find tests -name 'test_*.py' | sort)
fi
failed=0
for part in "${parts[@]}"; do
  echo "== $part"
  # shellcheck disable=SC2086
  "$here/python.sh" -m pytest $part -m "not slow and not weekly" --timeout 600 --tb=short
  status=$?
  [ "$status" = 0 ] || [ "$status" = 5 ] || failed=1 # 5: no test there
done
exit "$failed"
