"""Sizes of images on a disk: files/s against imagesize, Pillow and bucketsampler in the same run.

    BUCKETSAMPLER_DIR=... python benchmarks/scan.py [--files 20000] [--rows 200000] [--rounds 5]

Needs imagesize 1.4.1, the version that sd-scripts pins; peers that are absent are left out. The files are small
but real: JPEG (plain, with EXIF, with a profile), PNG, and WebP in its three kinds. They lie six folders deep, as in
/home/me/datasets/photos/10_me: whoever opens by the whole path walks all of it each time.

"warm": everything lies in the page cache. "2 ms": each open sleeps for 2 ms first, like a network disk. "cache":
a cache of unchanged files brought up to date, beside the bare `os.stat` of each. In each round every contestant
runs once, taking turns over small slices of the files; ratios are medians over rounds of the ratio within a round.
Sizes are read together with the EXIF orientation, which imagesize does not look at.
Files per second of processor time say what the code costs where other programs compete for the processor.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib.util
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image, ImageCms

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from kohya_bucket.images import MetadataCache, list_images, read_sizes  # noqa: E402

Run = Callable[[list[str]], Any]
Rates = dict[str, list[tuple[float, float]]]
LATENCY_S = 0.002
SLICES = 20
KINDS = (
    "jpg", "jpg EXIF", "jpg profile", "jpg progressive", "jpg",
    "png", "png profile", "webp", "webp lossless", "webp EXIF",
)  # fmt: skip
"""The i-th file is of the kind i modulo 10."""


def make_files(folder: Path, count: int) -> list[str]:
    """`count` files of 30 different images in folders of 1000, as deep as people keep theirs."""
    folder = folder / "datasets" / "photos"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    tags = Image.Exif()
    tags[0x0112] = 6
    tags[0x010E] = "a description " * 60
    exif, icc = {"exif": tags.tobytes()}, {"icc_profile": profile}
    options_of = {"EXIF": exif, "profile": icc, "progressive": {"progressive": True}, "lossless": {"lossless": True}}
    samples = []
    for i in range(3 * len(KINDS)):
        width, height = (int(side) for side in rng.integers(100, 200, 2))
        image = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)).resize(
            (width, height)
        )
        ending, _, wish = KINDS[i % len(KINDS)].partition(" ")
        options: dict[str, Any] = options_of.get(wish, {})
        sample = folder / f"sample{i}.{ending}"
        image.save(sample, **options)
        samples.append((sample.read_bytes(), ending))
        sample.unlink()
    paths = []
    for i in range(count):
        data, ending = samples[i % len(samples)]
        where = folder / f"{i // 1000:04d}"
        if i % 1000 == 0:
            where.mkdir()
        path = where / f"image_{i:07d}.{ending}"
        path.write_bytes(data)
        paths.append(str(path))
    return paths


def link_files(folder: Path, paths: list[str], count: int) -> list[str]:
    """`count` further names for the same files, to have as many rows as asked without as many files."""
    out = []
    for i in range(count):
        where = folder / f"{i // 1000:04d}"
        if i % 1000 == 0:
            where.mkdir(parents=True)
        path = where / f"link_{i:07d}{os.path.splitext(paths[i % len(paths)])[1]}"
        os.link(paths[i % len(paths)], path)
        out.append(str(path))
    return out


@contextlib.contextmanager
def slow_opens() -> Iterator[None]:
    """Each open in this process sleeps first."""
    real_os, real = os.open, builtins.open

    def slow_os(*args: Any, **options: Any) -> Any:
        time.sleep(LATENCY_S)
        return real_os(*args, **options)

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(LATENCY_S)
        return real(*args, **options)

    os.open, builtins.open = slow_os, slow  # type: ignore[assignment]
    try:
        yield
    finally:
        os.open, builtins.open = real_os, real


def pillow(paths: list[str]) -> None:
    for path in paths:
        with Image.open(path) as image:
            assert image.size[0]


def peers() -> dict[str, tuple[Run, int]]:
    """Name -> (function, how many times fewer files it is given)."""
    out: dict[str, tuple[Run, int]] = {"Pillow, one thread": (pillow, 10)}
    try:
        import imagesize

        out[f"imagesize {imagesize.__version__ if hasattr(imagesize, '__version__') else ''}".strip()] = (
            lambda paths: [imagesize.get(path) for path in paths], 1,
        )  # fmt: skip
    except ImportError:
        print("imagesize is not installed: left out", file=sys.stderr)
    if "BUCKETSAMPLER_DIR" in os.environ:
        sys.path.insert(0, os.environ["BUCKETSAMPLER_DIR"])
        from bucketsampler.torch._source import _PathSource

        out["bucketsampler, 1 worker"] = (lambda paths: _PathSource(paths).read_all_dims(1), 10)
        out["bucketsampler, 8 workers (its default)"] = (lambda paths: _PathSource(paths).read_all_dims(8), 10)
    else:
        print("BUCKETSAMPLER_DIR is not set: bucketsampler is left out", file=sys.stderr)
    return out


def measure(contestants: dict[str, tuple[Run, list[str]]], rounds: int, together: tuple[str, ...] = ()) -> Rates:
    """(files per second, files per second of processor time) of each contestant in each round.

    All take turns over the same small slices of their files, except those named in `together`: they start helper
    processes, and get all their files at once. Processor time is this process's own.
    """
    rates: Rates = {name: [] for name in contestants}
    shuffler = random.Random(0)
    for _ in range(rounds):
        wall, cpu = dict.fromkeys(contestants, 0.0), dict.fromkeys(contestants, 0.0)
        for turn in range(SLICES):
            # Whoever comes next meets what the one before left in the processor's caches: each after each, by chance.
            for name, (run, paths) in shuffler.sample(list(contestants.items()), len(contestants)):
                if name in together:
                    if turn:
                        continue
                    part = paths
                else:
                    part = paths[turn * len(paths) // SLICES : (turn + 1) * len(paths) // SLICES]
                start, start_cpu = time.perf_counter(), time.process_time()
                run(part)
                wall[name] += time.perf_counter() - start
                cpu[name] += time.process_time() - start_cpu
        for name, (_, paths) in contestants.items():
            rates[name].append((len(paths) / wall[name], len(paths) / max(cpu[name], 1e-9)))
    return rates


def table(title: str, rates: Rates, base: str) -> str:
    rows = [
        f"| {title} | files/s | x {base} | lowest to highest ratio | files per CPU second | x {base} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, values in rates.items():
        ratios, cpu_ratios = (
            [value[k] / other[k] for value, other in zip(values, rates[base], strict=True)] for k in (0, 1)
        )
        rows.append(
            f"| {name} | {statistics.median(v[0] for v in values):,.0f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} | {statistics.median(v[1] for v in values):,.0f} "
            f"| {statistics.median(cpu_ratios):.2f} |"
        )
    return "\n".join(rows)


def warm(paths: list[str], rounds: int) -> str:
    many = paths * max(1, 200_000 // len(paths))
    contestants: dict[str, tuple[Run, list[str]]] = {
        "kohya_bucket, one process": (lambda p: read_sizes(p, engine="alone"), many),
        "kohya_bucket, two processes": (lambda p: read_sizes(p, engine="processes", workers=2), many),
        "kohya_bucket, 8 threads": (lambda p: read_sizes(p, engine="threads", workers=8), many),
        "kohya_bucket, as it chooses": (lambda p: read_sizes(p), many),
    }
    for name, (run, fewer) in peers().items():
        contestants[name] = (run, many if fewer == 1 else paths[: max(100, len(paths) // fewer)])
        run(paths[:100])
    read_sizes(paths)
    base = next((name for name in contestants if name.startswith("imagesize")), "Pillow, one thread")
    together = ("kohya_bucket, two processes", "kohya_bucket, as it chooses")
    return table(f"warm, {len(many):,} files", measure(contestants, rounds, together), base)


def by_kind(paths: list[str], rounds: int) -> str:
    """One process against imagesize, for each kind of file."""
    import imagesize

    rows = ["| warm, one process | files/s | imagesize, files/s | ratio |", "| --- | ---: | ---: | ---: |"]
    for kind in dict.fromkeys(KINDS):
        some = [path for i, path in enumerate(paths) if KINDS[i % len(KINDS)] == kind]
        some *= 1 + 20_000 // len(some)
        contestants: dict[str, tuple[Run, list[str]]] = {
            "": (lambda p: read_sizes(p, engine="alone"), some),
            "imagesize": (lambda p: [imagesize.get(path) for path in p], some),
        }
        ours, theirs = ([rate for rate, _ in values] for values in measure(contestants, rounds).values())
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        rows.append(f"| {kind} | {statistics.median(ours):,.0f} | {statistics.median(theirs):,.0f} | {ratio:.2f} |")
    return "\n".join(rows)


def with_latency(paths: list[str], rounds: int) -> str:
    few, more = paths[:200], (paths * (1 + 20_000 // len(paths)))[:20_000]
    contestants: dict[str, tuple[Run, list[str]]] = {
        "kohya_bucket, one thread": (lambda p: read_sizes(p, engine="alone"), few),
        "kohya_bucket, as it chooses": (lambda p: read_sizes(p), more),
    }
    for name, (run, _) in peers().items():
        contestants[name] = (run, few if "8 workers" not in name else paths[:1000])
    with slow_opens():
        rates = measure(contestants, min(rounds, 3), ("kohya_bucket, as it chooses",))
    return table("2 ms per open", rates, "kohya_bucket, one thread")


def refresh(folder: Path, paths: list[str], rows: int, rounds: int) -> str:
    links = link_files(folder / "links", paths, rows)
    file = folder / "cache.parquet"
    cold = MetadataCache.build(links)
    cold.save(file)

    def stat_all(paths: list[str]) -> None:
        for path in paths:
            os.stat(path)

    def command(_: list[str]) -> None:
        MetadataCache.load(file).refresh(list_images(folder / "links")).save(file)

    contestants: dict[str, tuple[Run, list[str]]] = {
        "os.stat of each, one thread": (stat_all, links),
        "kohya_bucket, build": (lambda p: MetadataCache.build(p), links),
        "kohya_bucket, refresh, nothing changed": (lambda p: cold.refresh(p), links),
        "kohya_bucket, list + load + refresh + save": (command, links),
    }
    if "BUCKETSAMPLER_DIR" in os.environ:
        from bucketsampler.cache.metadata import build_metadata_cache

        some = links[:10_000]
        existing = build_metadata_cache(some)
        contestants["bucketsampler, build"] = (build_metadata_cache, some[:5_000])
        contestants["bucketsampler, refresh, nothing changed"] = (
            lambda p: build_metadata_cache(p, existing=existing), some,
        )  # fmt: skip
    whole = ("kohya_bucket, refresh, nothing changed", "kohya_bucket, list + load + refresh + save")
    rates = measure(contestants, rounds, (*whole, "kohya_bucket, build", "os.stat of each, one thread"))
    return table(f"cache, {rows:,} rows", rates, "os.stat of each, one thread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to put the files; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = make_files(Path(folder), options.files)
        parts = [
            warm(paths, options.rounds),
            *([by_kind(paths, options.rounds)] if importlib.util.find_spec("imagesize") else []),
            with_latency(paths, options.rounds),
            refresh(Path(folder), paths, options.rows, min(options.rounds, 3)),
        ]
    print("# Reading the sizes of images\n")
    print("\n\n".join(parts))
    print(f"\nPython {platform.python_version()}, Pillow {PIL.__version__}, {os.cpu_count()} CPUs, {platform.system()}")


if __name__ == "__main__":
    main()
