"""What changed in a trainer where the adapter holds on to it: `python compat_tests/watch.py CHECKOUT…`.

Compares the code of each seam with what is recorded of it per version in `seam_digests.json`, and lists in one screen
which are different, where they are and how. It reads sources and runs none of them, so that it needs neither torch nor
an environment of the trainer. `watch.py --record CHECKOUT…` adds versions to the record. Ends with 0 if every seam is
as in a recorded version, with 1 if something is new, with 2 after a mistake.
"""

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from checkouts import MUSUBI_TUNER, PREFIX, Checkout, CheckoutError, identify  # noqa: E402
from seam_sources import Definition, Sources, watched  # noqa: E402

RECORD = HERE / "seam_digests.json"
LINES = 40  # of differences: a screen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT", help="folder of sd-scripts or musubi-tuner")
    parser.add_argument("--record", action="store_true", help="add the checkouts to the recorded versions")
    options = parser.parse_args(arguments)
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {"versions": {}, "code": {}}
    try:
        checkouts = [identify(folder) for folder in options.checkouts]
        found = [seams_of(checkout) for checkout in checkouts]
    except (CheckoutError, SyntaxError) as error:
        print(f"watch: {error}", file=sys.stderr)
        return 2
    if options.record:
        for checkout, seams in zip(checkouts, found, strict=True):
            add(record, checkout, seams)
            print(f"recorded {checkout.name}: {sum(map(bool, seams.values()))} of {len(seams)} seams are there")
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    if not record["versions"]:
        print(f"watch: nothing is recorded in {RECORD}: watch.py --record CHECKOUT…", file=sys.stderr)
        return 2
    same = True
    for checkout, seams in zip(checkouts, found, strict=True):
        lines, changed = compare(record, checkout, seams)
        print("\n".join(lines))
        same = same and not changed
    return 0 if same else 1


def seams_of(checkout: Checkout) -> dict[str, Definition | None]:
    sources = Sources(checkout.root, checkout.trainer)
    return {name: sources.find(name) for _, name in watched(checkout.trainer)}


def add(record: dict[str, Any], checkout: Checkout, seams: dict[str, Definition | None]) -> None:
    """Put a version into the record; code that several versions share is kept once."""
    places = {name: f"{code.file} {code.digest}" for name, code in seams.items() if code}
    record["versions"][checkout.name] = {"commit": checkout.commit, "date": checkout.date, "seams": places}
    every = record["code"] | {code.digest: f"({code.takes}) {' '.join(code.names)}" for code in seams.values() if code}
    used = {place.split()[1] for version in record["versions"].values() for place in version["seams"].values()}
    record["code"] = {digest: every[digest] for digest in used}


def place_in(version: dict[str, Any], seam: str) -> tuple[str, str]:
    """(file, digest) of a seam in a recorded version, empty where it has none."""
    file, _, digest = version["seams"].get(seam, "").partition(" ")
    return file, digest


def nearest(versions: dict[str, Any], seams: dict[str, Definition | None]) -> str:
    """The recorded version with the most equal seams; of several, the youngest."""

    def likeness(name: str) -> tuple[int, str, str]:
        equal = sum(code.digest == place_in(versions[name], seam)[1] for seam, code in seams.items() if code)
        return equal, versions[name]["date"], name

    return max(versions, key=likeness)


def compare(record: dict[str, Any], checkout: Checkout, seams: dict[str, Definition | None]) -> tuple[list[str], bool]:
    """(what to print, whether a seam looks as in no recorded version)."""
    musubi = checkout.trainer == MUSUBI_TUNER
    versions = {name: one for name, one in record["versions"].items() if name.startswith(PREFIX) == musubi}
    if not versions:
        return [f"{checkout.name}: no version of {checkout.trainer} is recorded"], True
    base = nearest(versions, seams)
    rows, moved, unknown = [], collections.Counter(), 0
    for subject, name in watched(checkout.trainer):
        code, (file, digest) = seams[name], place_in(versions[base], name)
        if code and code.digest == digest:
            moved[file, code.file] += file != code.file
            continue
        if not code and not digest:
            continue
        known = [v for v in versions if code and place_in(versions[v], name)[1] == code.digest]
        unknown += not known
        what = f"as in {known[-1]}" if known else difference(code, record["code"].get(digest))
        place = f"{code.file}:{code.line}" if code else f"was in {file}"
        rows.append((subject, name, place, what))
    title = f"{checkout.name} {checkout.commit[:8]} {checkout.date}".strip()
    lines = [
        f"{title}: {len(seams)} seams, {len(rows)} differ from {base} ({versions[base]['date']}), the nearest of "
        f"{len(versions)} recorded versions; {unknown} as in none of them"
    ]
    lines += [f"  {n} moved from {old} to {new}" for (old, new), n in moved.items() if n]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    shown = [
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False) if width), row[3]])
        for row in rows
    ]
    lines += shown[:LINES] + ([f"  and {len(shown) - LINES} more"] if len(shown) > LINES else [])
    return lines, unknown > 0


def difference(code: Definition | None, before: str | None) -> str:
    """In what the code of a seam differs from the recorded one."""
    if code is None:
        return "gone"
    if before is None:
        return "new here"
    took, _, names = before.removeprefix("(").partition(") ")
    now, then = (dict(name.partition(":")[::2] for name in some) for some in (code.names, names.split()))
    parts = [f"takes ({code.takes}), took ({took})"] if code.takes != took else []
    for title, some in (
        ("new", now.keys() - then.keys()),
        ("gone", then.keys() - now.keys()),
        ("changed", {name for name in now.keys() & then.keys() if now[name] != then[name]}),
    ):
        parts += [f"{title}: {', '.join(sorted(some))}"] if some else []
    return "; ".join(parts) or "another body, of the same names"


if __name__ == "__main__":
    raise SystemExit(main())
