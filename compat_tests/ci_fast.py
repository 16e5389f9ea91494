"""The fast part of the compat suite on the newest checkout of sd-scripts on this machine: what `.ci/run` runs of it.

Looks for checkouts with an environment (`checkouts.py`) in `$KOHYA_BUCKET_CHECKOUTS` or in
`~/.cache/kohya_bucket/checkouts`. Where there is none it says so, and ends well.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from checkouts import checkouts_folder, environment_of, newest  # noqa: E402
from suite_process import run_tests  # noqa: E402

SECONDS = 480  # at most; about a minute with a core of its own
# Measured at v0.11.1 on two cores; the last is a training run by the launcher.
FAST = (
    "test_sdscripts_buckets.py",
    "test_sdscripts_defects.py",
    "test_sdscripts_records.py",
    "test_sdscripts_validation.py",
    "test_sdscripts_training.py::test_every_image_once_in_each_epoch",
)


def main() -> int:
    folder = checkouts_folder()
    checkout = newest(folder)
    python = environment_of(checkout.root) if checkout else None
    if checkout is None or python is None:
        print(f"no checkout of sd-scripts with an environment in {folder}: nothing is run against the real code")
        return 0
    print(f"sd-scripts {checkout.name} ({checkout.commit[:8]}, {checkout.date}) with {python}", flush=True)
    found = run_tests(python, checkout.root, [HERE / test for test in FAST], SECONDS)
    if not found["runs"]:
        found["failed"].append(f"nothing was trained: {'; '.join(found['skipped'])}")
    skipped = sum(found["skipped"].values())
    counts = f"{found['passed']} passed, {skipped} skipped, {len(found['failed'])} failed"
    print("\n".join([f"{counts} in {found['seconds']:.0f} s", *found["failed"]]))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
