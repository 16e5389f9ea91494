"""Latent stores measured side by side: sd-scripts' npz, bucketsampler's files, and this package's shards.

    python benchmarks/latents.py [--items 2000] [--table-items 1000000] [--bucketsampler DIR] [--output FILE]

SDXL latents of 1024x1024 with flips: npz hold float32, as sd-scripts writes them; shards bfloat16. Rates are items
per second, medians of several runs. "Warm" is from the page cache; "from disk" after asking the system to drop the
files from it (Linux). Every reader returns the latent or its flip, at random, in random order.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.items import compare
from kohya_bucket.latents.maintenance import check_sources, source_paths
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.names import npz_path
from kohya_bucket.trainers.sdscripts.npz.read_write import NpzLatents, read_npz, write_npz

ARCH = ARCHITECTURES["sdxl"]
BUCKET = (1024, 1024)
PRINT = Fingerprint(1, 2, "", "vae", BUCKET, BUCKET, (0, 0), "area/cv2", "bfloat16", flip=True)


def median_rate(work, n: int, runs: int = 3, before=lambda: None) -> float:
    rates = []
    for _ in range(runs):
        before()
        start = time.perf_counter()
        work()
        rates.append(n / (time.perf_counter() - start))
    return statistics.median(rates)


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Npz:
    """sd-scripts: `np.savez`, and the arrays its `load_latents_from_disk` reads."""

    name = "sd-scripts npz"

    def __init__(self, root: Path, n: int, latents: np.ndarray) -> None:
        self.root, self.n = root / "npz", n
        self.root.mkdir()
        values = torch.from_numpy(latents.view(np.int16)).view(torch.bfloat16).float().numpy()
        self.values = values
        self.paths = [npz_path(self.root / f"{i:06d}.png", BUCKET, ARCH) for i in range(n)]

    def write(self) -> None:
        for i, path in enumerate(self.paths):
            value = self.values[i % len(self.values)]
            np.savez(path, latents=value, original_size=np.array(BUCKET), crop_ltrb=np.array((0.0, 0, 1024, 1024)),
                     latents_flipped=value)  # fmt: skip

    def open(self) -> None:
        pass

    def read(self, i: int, flipped: bool):
        with np.load(self.paths[i]) as file:
            latents, _, _ = file["latents"], file["original_size"].tolist(), file["crop_ltrb"].tolist()
            other = file["latents_flipped"]
        return torch.from_numpy(other if flipped else latents)

    def gather(self, indices, flips):
        return torch.stack([self.read(i, flip) for i, flip in zip(indices, flips, strict=True)])

    def check(self) -> None:
        """Its start-up check: is every file there, with the keys it needs."""
        for path in self.paths:
            assert path.exists()
            npz = np.load(path)
            assert {"latents", "latents_flipped"} <= {key.rstrip("0123456789x").rstrip("_") for key in npz.files}
            npz.close()


class OurNpz(Npz):
    """The same files, written whole or not at all, and synced."""

    name = "npz written here"

    def __init__(self, root: Path, n: int, latents: np.ndarray) -> None:
        self.n = n
        self.root = root / "our_npz"
        self.root.mkdir()
        self.values = torch.from_numpy(latents.view(np.int16)).view(torch.bfloat16).float().numpy()
        self.paths = [npz_path(self.root / f"{i:06d}.png", BUCKET, ARCH) for i in range(n)]

    def write(self) -> None:
        for i, path in enumerate(self.paths):
            value = self.values[i % len(self.values)]
            write_npz(path, NpzLatents(value, BUCKET, (0.0, 0.0, 1024.0, 1024.0), value), BUCKET, ARCH, PRINT)

    def read(self, i: int, flipped: bool):
        item = read_npz(self.paths[i], BUCKET, ARCH)
        return torch.from_numpy(item.flipped if flipped else item.latents)


class Bucketsampler:
    """bucketsampler 0.1.0a1: one safetensors per bucket, opened for every item. It stores no flips."""

    name = "bucketsampler"

    def __init__(self, root: Path, n: int, latents: np.ndarray, package: Path) -> None:
        sys.path.insert(0, str(package))
        from bucketsampler.cache import latents as module

        self.module, self.n, self.root = module, n, root / "bucketsampler"
        self.root.mkdir()
        self.latents = torch.from_numpy(latents.view(np.int16)).view(torch.bfloat16)

    def write(self) -> None:
        import json

        from safetensors.torch import save_file

        whole = self.latents[torch.arange(self.n) % len(self.latents)].contiguous()
        save_file({"latents": whole}, self.root / "bucket_0000.safetensors")
        row = {"bucket_idx": 0, "width": 1024, "height": 1024, "count": self.n, "file": "bucket_0000.safetensors"}
        manifest = {"version": 1, "dtype": "bfloat16", "scale_factor": 0.13025, "downsample_factor": 8,
                    "latent_channels": 4, "buckets": [row], "has_captions": False}  # fmt: skip
        (self.root / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")

    def open(self) -> None:
        self.dataset = self.module.BucketedLatentDataset(self.root)

    def read(self, i: int, flipped: bool):
        return self.dataset[i]["latents"]

    def gather(self, indices, flips):
        return torch.stack([self.dataset[i]["latents"] for i in indices])

    check = None


class Shards:
    """This package's store."""

    name = "shards"

    def __init__(self, root: Path, n: int, latents: np.ndarray) -> None:
        self.root, self.n, self.latents = root / "shards", n, latents

    def write(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        space = LatentSpace(0.13025)
        with StoreWriter(self.root, flush_seconds=None) as writer:
            for i in range(self.n):
                value = self.latents[i % len(self.latents)]
                writer.add(
                    StoreEntry(f"{i:06d}.png", PRINT, BUCKET, (0, 0, 1024, 1024)), value, flipped=value, space=space
                )
        write_manifest(LatentStore(self.root))

    def open(self) -> None:
        self.store = LatentStore(self.root)

    def read(self, i: int, flipped: bool):
        return torch.from_numpy(self.store.read(i, flipped=flipped).copy().view(np.int16)).view(torch.bfloat16)

    def gather(self, indices, flips):
        return torch.from_numpy(self.store.gather(indices, flips).view(np.int16)).view(torch.bfloat16)

    def check(self) -> None:
        assert len(LatentStore(self.root)) == self.n


def measure(kind, n: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    order = random.permutation(n).tolist()
    flips = (random.random(n) < 0.5).tolist()
    out = {"write": median_rate(kind.write, n, runs=2)}

    def read() -> None:
        for i in order:
            kind.read(i, flips[i])

    def gather() -> None:
        for start in range(0, n, 8):
            kind.gather(order[start : start + 8], flips[start : start + 8])

    def cold() -> None:
        drop_cache(kind.root)
        kind.open()

    kind.open()
    read()
    out["read warm"] = median_rate(read, n)
    out["gather warm"] = median_rate(gather, n)
    out["read from disk"] = median_rate(read, n, before=cold)
    out["bytes per item"] = size_of(kind.root) / n
    if kind.check is not None:
        out["check, ms per 1000"] = 1e6 / median_rate(kind.check, n)
    return out


def check_table(root: Path, n: int) -> list[tuple[str, str]]:
    """Open and compare `n` entries with sources on disk. The shards hold one small latent per entry."""
    from kohya_bucket.buckets import KohyaBuckets
    from kohya_bucket.latents.items import EncodeOptions, LatentItems

    images = root / "images"
    for k in range(n):
        if k % 10_000 == 0:
            folder = images / f"{k // 10_000:04d}"
            folder.mkdir(parents=True)
        (folder / f"{k:07d}.png").touch()
    names = [f"{k // 10_000:04d}/{k:07d}.png" for k in range(n)]
    rule = KohyaBuckets((64, 64), 32, 128, 16)
    sizes = np.tile(np.array([(64, 64)], dtype=np.int32), (n, 1))
    wanted = LatentItems.from_placement(
        [str(images / name) for name in names], sizes, rule.place(sizes), EncodeOptions("vae"), images
    )
    small = np.zeros((10_000, 4, 1, 1), dtype=np.uint16)
    with StoreWriter(root / "many", images_root=images, flush_seconds=None, shard_bytes=8 * 25_000) as writer:
        for start in range(0, n, len(small)):
            rows = wanted.rows(range(start, min(start + len(small), n)))
            writer.add_rows(rows, small[: len(rows["source"])], space=LatentSpace())
    write_manifest(LatentStore(root / "many"))
    rows = []
    start = time.perf_counter()
    store = LatentStore(root / "many")
    opened = time.perf_counter() - start
    start = time.perf_counter()
    absent, changed = check_sources(store, source_paths(store))
    assert not absent.any()
    assert not changed.any()
    checked = time.perf_counter() - start
    rows.append((f"{n} entries in {len(store.shards)} shards: open", f"{opened:.2f} s"))
    rows.append((f"{n} entries: compare with their image files", f"{checked:.2f} s"))
    start = time.perf_counter()
    assert not compare(store, wanted).to_do.any()
    rows.append((f"{n} entries: compare with every wanted setting", f"{time.perf_counter() - start:.2f} s"))
    rows.append((f"{n} entries: open and compare with image files", f"{opened + checked:.2f} s"))
    return rows


def pipeline_idle(root: Path, n: int) -> list[tuple[str, str]]:
    """Share of the time in which a stub encoder of 50 ms a batch of 8 had nothing to do, and what bounds it.

    The bound: the same files decoded and resized on as many threads, and nothing done with them. Where these
    processors cannot decode 160 images a second, the encoder must wait for a share of the time, whatever is done.
    """
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image
    from pixel_encoding import Data, Stub

    from kohya_bucket.buckets import KohyaBuckets
    from kohya_bucket.images.resize import resize_and_crop
    from kohya_bucket.latents import precompute_latents

    out = []
    needed, workers = 8 / 0.05, os.cpu_count() or 1
    for side, target, count in ((256, 256, n), (640, 512, n), (1024, 1024, n), (1280, 1024, n // 2)):
        folder = root / f"jpg{side}"
        folder.mkdir()
        noise = np.random.default_rng(0).integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
        picture = Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)
        paths = [folder / f"{k}.jpg" for k in range(count)]
        for path in paths:
            picture.save(path, quality=90)
        sizes = np.tile(np.array([(side, side)], dtype=np.int32), (count, 1))
        placement = KohyaBuckets(target, 256, 2048).place(sizes)
        precompute_latents(Data(paths[:8], sizes[:8], KohyaBuckets(target, 256, 2048).place(sizes[:8])), Stub(),
                           root / f"first{side}")  # fmt: skip

        def bare(path, target=target):
            with Image.open(path) as image:
                image.load()
                return image.resize((target, target), Image.Resampling.BOX)

        def as_trained(path, target=target):
            with Image.open(path) as image:
                return resize_and_crop(np.asarray(image), (target, target), (target, target))

        def limit(work, paths=paths):
            with ThreadPoolExecutor(workers) as pool:
                start = time.perf_counter()
                for _ in pool.map(work, paths):
                    pass
                return len(paths) / (time.perf_counter() - start)

        # one after the other, so that all meet the same other programs on this machine
        rounds = []
        for k in range(3):
            report = precompute_latents(Data(paths, sizes, placement), Stub(), root / f"idle{side}-{k}",
                                        dtype="bfloat16")  # fmt: skip
            rate = count / report.seconds
            rounds.append((100 * report.device_idle / report.seconds, rate, limit(bare), limit(as_trained)))
        idle, rate, pillow, trained = (statistics.median(column) for column in zip(*rounds, strict=True))
        bound = max(0.0, 100 * (1 - trained / needed))
        name = f"stub VAE, 50 ms for 8: {side} px JPEG to {target} px"
        out.append((f"{name}, share of time it was idle",
                    f"{idle:.1f} % at {rate:.0f} images/s ({min(r[0] for r in rounds):.1f} to "
                    f"{max(r[0] for r in rounds):.1f})"))  # fmt: skip
        cv2 = "with" if importlib.util.find_spec("cv2") else "without"
        limits = f"{pillow:.0f}; {trained:.0f} images/s, {cv2} OpenCV: idle for {bound:.1f} % at least"
        threads = f"on {workers} threads without an encoder"
        out.append((f"{threads}: Pillow's decoder and box filter; pixels as trained", limits))
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=1500)
    parser.add_argument("--table-items", type=int, default=1_000_000)
    parser.add_argument("--pipeline-items", type=int, default=800)
    parser.add_argument("--bucketsampler", type=Path, default=os.environ.get("BUCKETSAMPLER_DIR"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "latents.md")
    parser.add_argument("--folder", type=Path, help="where to write the files that are measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="latents", dir=options.folder))
    try:
        bits = np.random.default_rng(0).standard_normal((64, 4, 128, 128), dtype=np.float32)
        latents = torch.from_numpy(bits).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        kinds = [Npz(root, options.items, latents), OurNpz(root, options.items, latents)]
        if options.bucketsampler:
            kinds.append(Bucketsampler(root, options.items, latents, options.bucketsampler))
        kinds.append(Shards(root, options.items, latents))
        found = {}
        for kind in kinds:
            found[kind.name] = measure(kind, options.items)
            shutil.rmtree(kind.root)
        facts = pipeline_idle(root, options.pipeline_items) + check_table(root, options.table_items)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    base = found["sd-scripts npz"]
    lines = [f"{options.items} SDXL latents of 1024x1024 with flips; {os.cpu_count()} cores; items/s unless said.", ""]
    names = list(base)
    lines.append("| | " + " | ".join(names) + " |")
    lines.append("| --- |" + " --- |" * len(names))
    for name, row in found.items():
        cells = ["-" if key not in row else f"{row[key]:,.1f}" if "ms" in key else f"{row[key]:,.0f}" for key in names]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    ratios = [f"{found['shards'][key] / base[key]:.2f}" for key in names]
    lines += ["| shards / sd-scripts npz | " + " | ".join(ratios) + " |", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts]
    text = "\n".join(lines) + "\n"
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(f"# Latents (`benchmarks/latents.py`)\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
