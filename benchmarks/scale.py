"""How plans, stores and downloads grow with the number of images: the numbers of `docs/scale.md`.

    python benchmarks/scale.py [--plans 1000000 10000000 100000000] [--stores 300000 1000000 3000000]
        [--packs 4000 16000] [--items 100000 300000 1000000]

Each row is a process of its own. A plan is that of one epoch for 64 nodes with 8 ranks each, batches of 4, in the 24
buckets of real photographs' shapes; a shard holds 2,000 images of one bucket. Memory is the largest that the process
ever had, less what it had before. A store has names and captions of 55 characters each, and latents of 8 bytes, so
that what is measured is its index; columns are the part of its memory that Arrow holds. Items to pack have latents of
131,072 bytes in shards of 256, as encoders on a Ray cluster write them; mapped files are not counted in their peak.
Images to encode are what the process that gives out work on a Ray cluster holds and sends: names, captions and
geometry. Downloads are counted for three nodes, each of which keeps the `open_shards` shards that it used last.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

from dataset_memory import CAPTION, PATH, memory, resident  # noqa: E402
from local_order import downloads, mixing, store_shards, table  # noqa: E402
from origin import commit  # noqa: E402
from planning import image_sizes  # noqa: E402

if TYPE_CHECKING:
    from kohya_bucket.latents.store.latent_store import LatentStore

NODES, RANKS, BATCH, PER_SHARD, OPEN = 64, 8, 4, 2000, 64


def bucket_ids(images: int) -> np.ndarray:
    """Buckets of so many images, as often as among a million."""
    from kohya_bucket import KohyaBuckets

    few = KohyaBuckets(1024).place(image_sizes(min(images, 1_000_000))).bucket_index
    return few if images <= len(few) else np.tile(few, -(-images // len(few)))[:images]


def peak() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM"))) * 1024


def plan(images: int, order: str) -> dict[str, Any]:
    from kohya_bucket.planning import EpochPlanner

    ids = bucket_ids(images)
    options: dict[str, Any] = {"order": order}
    if order == "local":
        options |= {"shards": store_shards(ids, PER_SHARD), "open_shards": OPEN, "nodes": NODES}
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # from here on counts the peak
    before, began = memory("Rss"), time.process_time()
    planner = EpochPlanner(ids, BATCH, world_size=NODES * RANKS, **options)
    made = planner.plan(epoch=1)
    took, most = time.process_time() - began, peak() - before
    kept = sum(part.nbytes for part in (made.items, made.start, made.length, made.bucket_of_step))
    found = {"seconds": took, "peak": most, "kept": kept, "steps": made.steps}
    if order == "local" and images <= 10_000_000:
        found |= {"downloads": downloads(made, options["shards"], NODES, OPEN), "mixing": mixing(made)}
    return found


def fill(folder: Path, items: int, side: int = 1, per_shard: int = PER_SHARD) -> LatentStore:
    """A store of latents of `side` x `side` in one bucket."""
    from remote_store import BUCKET, PRINT

    from kohya_bucket.latents.space import LatentSpace
    from kohya_bucket.latents.store.entries import StoreEntry
    from kohya_bucket.latents.store.latent_store import LatentStore
    from kohya_bucket.latents.store.writer import StoreWriter, write_manifest

    latent = np.zeros((4, side, side), dtype=np.uint16)
    with StoreWriter(folder, flush_seconds=None, shard_bytes=latent.nbytes * per_shard) as writer:
        for i in range(items):
            name = PATH.format(i // 1000, i).removeprefix("/")
            entry = StoreEntry(name, PRINT, BUCKET, (0, 0, 1024, 1024), CAPTION.format(i))
            writer.add(entry, latent, space=LatentSpace(0.13025))
    found = LatentStore(folder)
    write_manifest(found)
    return found


def packed(images: int) -> dict[str, Any]:
    from kohya_bucket.latents.maintenance import pack

    with tempfile.TemporaryDirectory() as name:
        made = fill(Path(name), images, 128, 256)
        most, done = [own_memory()], threading.Event()

        def watch() -> None:
            while not done.wait(0.01):
                most.append(own_memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        began, cpu = time.perf_counter(), time.process_time()
        pack(made)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        done.set()
        watcher.join()
        shards = len(list(Path(name, "shards").iterdir()))
        return {"seconds": took, "cpu": cpu, "peak": max(most) - most[0], "shards": shards}


def own_memory() -> int:
    """Resident bytes without those of mapped files, which the system can drop."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon"))) * 1024


def store(images: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        few, many = Path(name) / "few", Path(name) / "many"
        fill(few, 10)
        fill(many, images)
        size = sum(path.stat().st_size for path in many.glob("*.parquet"))
        return row("opened", str(few), str(many)) | {"manifest": size}


def opened(few: str, many: str) -> dict[str, Any]:
    import pyarrow as pa

    from kohya_bucket import BucketedLatentDataset

    BucketedLatentDataset(few).__getitems__([0])  # so that all modules are loaded
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # from here on counts the peak
    before, began, cpu = resident(), time.perf_counter(), time.process_time()
    held, columns = memory("Rss"), pa.total_allocated_bytes()
    dataset = BucketedLatentDataset(many)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    dataset.__getitems__([0, len(dataset) - 1])
    columns = pa.total_allocated_bytes() - columns
    return {"seconds": took, "cpu": cpu, "memory": resident() - before, "columns": columns, "peak": peak() - held}


def handing_out(images: int) -> dict[str, Any]:
    """What the process that gives out work on a Ray cluster needs: all items, cut into pieces and packed up."""
    from kohya_bucket import KohyaBuckets
    from kohya_bucket.images.origins import Origins
    from kohya_bucket.latents.items import EncodeOptions, LatentItems
    from kohya_bucket.latents.on_ray import _pieces

    sizes = image_sizes(images)
    paths = [f"s3://bucket{PATH.format(i // 1000, i)}" for i in range(10)]
    before = resident()
    paths = [f"s3://bucket{PATH.format(i // 1000, i)}" for i in range(images)]
    captions = [CAPTION.format(i) for i in range(images)]
    placed = KohyaBuckets(1024).place(sizes)
    sources = [path.removeprefix("s3://bucket/") for path in paths]
    whole = np.zeros(images, dtype=np.int64)
    wanted = LatentItems(
        EncodeOptions("vae"), Origins.named(paths), sources, sizes, placed.bucket_sizes, placed.resized_sizes,
        (placed.resized_sizes - placed.bucket_sizes) // 2, placed.crop_ltrb, captions, whole, whole,
    )  # fmt: skip
    held, began = resident() - before, time.process_time()
    sent = [len(pickle.dumps(piece, protocol=5)) for piece in _pieces(wanted, 8)]
    return {"memory": held, "cpu": time.process_time() - began, "pieces": len(sent), "sent": sum(sent)}


def row(part: str, *of: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--part", part, "--of", *of], check=True, stdout=subprocess.PIPE
    ).stdout
    print(part, *of, done.decode().strip(), file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(done)
    return found


def plans(counts: list[int]) -> str:
    lines = []
    for images in counts:
        for order in ("shuffled", "local"):
            found = row("plan", str(images), order)
            read = f"{NODES * found['downloads']:.2f}" if "downloads" in found else ""
            mixed = f"{found['mixing']:.2f}" if "mixing" in found else ""
            lines.append([f"{images:,}", order, f"{found['seconds']:.2f}", f"{found['peak'] / 1e6:,.0f}",
                          f"{found['kept'] / 1e6:,.0f}", read, mixed])  # fmt: skip
    header = ["images", "order", "s of CPU", "peak, MB", "kept, MB", "downloads of a shard by all nodes", "mixing"]
    return table(header, lines)


def stores(counts: list[int]) -> str:
    lines = []
    for images in counts:
        found = row("store", str(images))
        sizes = [f"{found[name] / 1e6:,.0f}" for name in ("manifest", "memory", "columns", "peak")]
        lines.append([f"{images:,}", f"{found['seconds']:.1f}", f"{found['cpu']:.1f}", *sizes])
    header = [
        "items of a store",
        "opening, s",
        "s of CPU",
        "manifest, MB",
        "in memory, MB",
        "of it columns, MB",
        "peak, MB",
    ]
    return table(header, lines)


def packs(counts: list[int]) -> str:
    lines = []
    for images in counts:
        found = row("pack", str(images))
        lines.append([f"{images:,}", f"{found['shards']:,}", f"{found['seconds']:.1f}", f"{found['cpu']:.1f}",
                      f"{found['peak'] / 1e6:,.0f}"])  # fmt: skip
    header = ["items packed", "into shards", "s", "s of CPU", "peak, MB"]
    return table(header, lines)


def handed_out(counts: list[int]) -> str:
    lines = []
    for images in counts:
        found = row("handing_out", str(images))
        sizes = [f"{found[name] / 1e6:,.0f}" for name in ("memory", "sent")]
        lines.append([f"{images:,}", f"{found['pieces']:,}", f"{found['cpu']:.1f}", *sizes])
    header = ["images to encode", "pieces of work", "cutting and packing them, s of CPU", "in memory, MB", "sent, MB"]
    return table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, nargs="*", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--stores", type=int, nargs="*", default=[300_000, 1_000_000, 3_000_000])
    parser.add_argument("--packs", type=int, nargs="*", default=[4_000, 16_000])
    parser.add_argument("--items", type=int, nargs="*", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--part", choices=["plan", "store", "opened", "handing_out", "pack"], help=argparse.SUPPRESS)
    parser.add_argument("--of", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "plan":
        print(json.dumps(plan(int(args.of[0]), args.of[1])))
    elif args.part == "opened":
        print(json.dumps(opened(*args.of)))
    elif args.part:
        part = {"handing_out": handing_out, "pack": packed, "store": store}[args.part]
        print(json.dumps(part(int(args.of[0]))))
    else:
        said = " ".join(__doc__.split("\n\n")[2].split())
        parts = ["# Scale", plans(args.plans), stores(args.stores), packs(args.packs), handed_out(args.items)]
        parts.append(f"{said} Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores; "
                     f"commit {commit()}.")  # fmt: skip
        text = "\n\n".join(part for part in parts if part) + "\n"
        (REPO / "benchmarks" / "results" / "scale.md").write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
