"""Plans of very large datasets, by a table in memory and by an index on disk: the second table of `docs/scale.md`.

    python benchmarks/indexed_plans.py [--images 10000000 100000000 1000000000] [--table 100000000]

Each row is a process of its own. Images lie in the 24 buckets of real photographs' shapes, as often as among a million;
64 nodes with 8 ranks each train batches of 4. `--table` is the largest number that is planned by a table too. Opening
is everything from the files to the first batch; memory is the largest that the process had of its own, less what it had
before: pages of mapped files, which the system takes back when it needs them, do not count. Batches are those of random
steps, by one rank.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

from local_order import table  # noqa: E402
from origin import commit  # noqa: E402
from scale import BATCH, NODES, RANKS, bucket_ids  # noqa: E402

WORLD = NODES * RANKS
DRAWN = 2000
PIECE = 10_000_000


def write_ids(file: Path, images: int) -> None:
    """Bucket numbers on disk, made in pieces."""
    few = bucket_ids(min(images, PIECE)).astype(np.int16)
    ids = np.lib.format.open_memmap(file, "w+", np.int16, (images,))
    for begin in range(0, images, len(few)):
        ids[begin : begin + len(few)] = few[: images - begin]
    ids.flush()


class Memory(threading.Thread):
    """The largest memory of this process' own, looked at a hundred times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.largest = own()
        self.start()

    def run(self) -> None:
        while True:
            self.largest = max(self.largest, own())
            time.sleep(0.01)

    def used(self) -> int:
        return max(self.largest, own()) - self.before


def own() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon"))) * 1024


def index(folder: Path) -> dict[str, float]:
    from kohya_bucket.images.bucket_index import BucketIndex

    memory, began = Memory(), time.perf_counter()
    BucketIndex.write(folder / "index", np.load(folder / "ids.npy", mmap_mode="r"))
    return {"seconds": time.perf_counter() - began, "peak": memory.used()}


def by_index(folder: Path) -> dict[str, float]:
    from kohya_bucket.images.bucket_index import BucketIndex
    from kohya_bucket.planning import IndexedPlan

    memory, began = Memory(), time.perf_counter()
    plan = IndexedPlan(BucketIndex.open(folder / "index"), BATCH, WORLD, seed=1)
    plan.indices(plan.steps // 2, 7)
    return drawn(plan, time.perf_counter() - began, memory)


def by_table(folder: Path) -> dict[str, float]:
    from kohya_bucket.planning import plan_epoch

    memory, began = Memory(), time.perf_counter()
    plan = plan_epoch(np.load(folder / "ids.npy").astype(np.int32), BATCH, world_size=WORLD, seed=1, step_shapes="one")
    plan.indices(plan.steps // 2, 7)
    return drawn(plan, time.perf_counter() - began, memory)


def drawn(plan: object, opened: float, memory: Memory) -> dict[str, float]:
    steps = np.random.RandomState(0).randint(0, plan.steps, DRAWN).tolist()
    began = time.perf_counter()
    for step in steps:
        plan.indices(step, 7)
    each = (time.perf_counter() - began) / DRAWN
    began, first = time.perf_counter(), steps[0] // 2
    for step in range(first, first + min(DRAWN, plan.steps // 2)):
        plan.indices(step, 7)
    in_turn = (time.perf_counter() - began) / min(DRAWN, plan.steps // 2)
    return {"seconds": opened, "each": each, "in_turn": in_turn, "steps": plan.steps, "peak": memory.used()}


def run(kind: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", kind, str(folder)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, nargs="*", default=[10_000_000, 100_000_000, 1_000_000_000])
    parser.add_argument("--table", type=int, default=100_000_000)
    parser.add_argument("--one", nargs=2)
    options = parser.parse_args()
    if options.one:
        kinds = {"index": index, "by_index": by_index, "by_table": by_table}
        print(json.dumps(kinds[options.one[0]](Path(options.one[1]))))
        return
    written, opened = [], []
    for images in options.images:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_ids(folder / "ids.npy", images)
            found = run("index", folder)
            size = (folder / "index" / "images.bin").stat().st_size
            written.append(
                [f"{images:,}", f"{found['seconds']:.1f}", f"{found['peak'] / 1e6:,.0f}", f"{size / 1e9:.2f}"]
            )
            for kind in ["by_index", *(["by_table"] if images <= options.table else [])]:
                found = run(kind, folder)
                opened.append([
                    f"{images:,}", kind.replace("by_", "by "), f"{found['steps']:,}", f"{found['seconds']:.2f}",
                    f"{found['peak'] / 1e6:,.0f}", f"{found['each'] * 1e6:,.0f}", f"{found['in_turn'] * 1e6:,.0f}",
                ])  # fmt: skip
    heads = ["images", "planned", "steps", "opening, s", "peak, MB", "a random batch, µs", "the next batch, µs"]
    text = ["# Plans by an index on disk", table(heads, opened)]
    text += [table(["images", "writing the index, s", "peak, MB", "index, GB"], written)]
    how = " ".join(__doc__.split("\n\n")[2].split())
    text += [f"{how} Python {platform.python_version()}, numpy {np.__version__}, 2 cores; commit {commit()}."]
    out = REPO / "benchmarks" / "results" / "indexed_plans.md"
    out.write_text("\n\n".join(text) + "\n", encoding="utf-8", newline="\n")
    print("\n\n".join(text))


if __name__ == "__main__":
    main()
