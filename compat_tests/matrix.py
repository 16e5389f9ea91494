"""Runs the compat suite on checkouts of trainers, each in its own environment, and writes `docs/compatibility.md`.

`python compat_tests/matrix.py CHECKOUT…`, with any Python. The environment of a checkout is the virtual environment in
it or beside it (`checkouts.py` has the rule), or the one that `--python` names. What was found is kept after every test
file, in `results/NAME.json`: a run that was stopped goes on where it was, and only what was run with other code of the
package or of the test is run again. Without a checkout, only the page is written again.
"""

import argparse
import datetime
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from checkouts import (  # noqa: E402
    MUSUBI_TUNER,
    SD_SCRIPTS,
    Checkout,
    CheckoutError,
    commit_of,
    environment_of,
    identify,
)
from matrix_page import PAGE, RESULTS, read_results, write_page  # noqa: E402
from suite_process import adapter_report, run_tests, states_of_files  # noqa: E402

ROOT = HERE.parent
SHOWN = 10  # failures of one test file


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", metavar="CHECKOUT", help="folder of a checkout")
    parser.add_argument("--python", type=Path, help="of the environment to run all of them in")
    parser.add_argument("--only", nargs="+", metavar="FILE", help="run these test files and leave the others")
    parser.add_argument("--again", action="store_true", help="run also what has a result of the code as it is")
    parser.add_argument("--minutes", type=float, default=20, help="at most, for one test file (default: %(default)s)")
    options = parser.parse_args(arguments)
    failed = 0
    try:
        for checkout, python in [environment(folder, options.python) for folder in options.checkouts]:
            failed += run_suite(checkout, python, options)
    except CheckoutError as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmatrix: stopped; what is done is kept, and the same command goes on from there", file=sys.stderr)
        return 130
    write_page(read_results())
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 1 if failed else 0


def environment(folder: str, python: Path | None) -> tuple[Checkout, Path]:
    """A checkout and the Python to run it with; all are looked up before the first is run."""
    checkout = identify(folder)
    found = python or environment_of(checkout.root)
    if found is None:
        raise CheckoutError(
            f"no environment for {checkout.root}: make one in it (venv) or beside it ({checkout.root.name}-venv), "
            "or name its Python with --python"
        )
    if not found.is_file():
        raise CheckoutError(f"--python {found}: there is no such file")
    return checkout, found


def test_files(trainer: str, only: list[str] | None) -> list[Path]:
    """The files that need a checkout of a trainer, or those of them that are named.

    Raises:
        CheckoutError: a name is none of them.
    """
    files = sorted(HERE.glob({SD_SCRIPTS: "test_*sdscripts*.py", MUSUBI_TUNER: "test_musubi_*.py"}[trainer]))
    wanted = {Path(name).name for name in only or []}
    unknown = wanted - {file.name for file in files}
    if unknown:
        raise CheckoutError(f"--only {' '.join(sorted(unknown))}: not one of {', '.join(file.name for file in files)}")
    return [file for file in files if not wanted or file.name in wanted]


def run_suite(checkout: Checkout, python: Path, options: argparse.Namespace) -> int:
    """Run what is to be run on one checkout; how many tests failed in that."""
    files, (adapter, known) = test_files(checkout.trainer, options.only), earlier_results(checkout)
    if adapter.get("code") != code_digest() or options.again:
        adapter = {**adapter_report(python, checkout.root), "code": code_digest()}
    print(
        f"{checkout.name} {checkout.commit[:8]} {checkout.date} in {python.parent.parent}: {len(files)} files",
        flush=True,
    )
    failed = 0
    for i, file in enumerate(files, 1):
        code = code_digest(file)
        if known.get(file.name, {}).get("code") == code and not options.again:
            print(f"  {i}/{len(files)} {file.name}: known from {known[file.name]['on']}", flush=True)
            continue
        print(f"  {i}/{len(files)} {file.name}: ", end="", flush=True)
        before = states_of_files(checkout.root)
        found = run_tests(python, checkout.root, [file], options.minutes * 60)
        touched = sorted(before.items() ^ states_of_files(checkout.root).items())
        if touched:
            found["failed"].append(f"wrote into the checkout: {', '.join(sorted({name for name, _ in touched}))}")
        found |= {"code": code, "on": datetime.date.today().isoformat(), "package": commit_of(ROOT)}
        save(checkout, adapter, {**earlier_results(checkout)[1], file.name: found})
        failed += len(found["failed"])
        print(f"{found['passed']} passed, {sum(found['skipped'].values())} skipped, {len(found['failed'])} failed, "
              f"{found['seconds']:.0f} s", flush=True)  # fmt: skip
        for line in found["failed"][:SHOWN] + (["…"] if len(found["failed"]) > SHOWN else []):
            print(f"    {line}", flush=True)
    save(checkout, adapter, earlier_results(checkout)[1])
    return failed


def earlier_results(checkout: Checkout) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the adapter said, what each test file did) on this commit before; another matrix may be at work on it.

    A fork whose main is a commit of sd-scripts' own has that one's results.
    """
    for place in (RESULTS / f"{checkout.name}.json", *sorted(RESULTS.glob("*.json"))):
        before = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
        if before.get("commit") == checkout.commit:
            files = {name: found for name, found in before["files"].items() if (HERE / name).is_file()}
            return before["adapter"], files
    return {}, {}


def code_digest(*tests: Path) -> str:
    """Of the package and of test files: what a result depends on here."""
    digest = hashlib.sha256()
    for file in [*sorted((ROOT / "kohya_bucket").rglob("*.py")), *tests]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def save(checkout: Checkout, adapter: dict[str, Any], files: dict[str, Any]) -> None:
    """Whole or not at all."""
    result = {"version": checkout.version, "commit": checkout.commit, "date": checkout.date, "fork": checkout.is_fork}
    result |= {"trainer": checkout.trainer, "adapter": adapter, "files": files}
    RESULTS.mkdir(exist_ok=True)
    place = RESULTS / f"{checkout.name}.json"
    partly = place.with_suffix(f".{os.getpid()}.partly")
    partly.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8", newline="\n")
    os.replace(partly, place)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped in either way, no test is left running
    raise SystemExit(main())
