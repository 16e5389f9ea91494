"""Memory of a dataset of a million images, and what a forked worker dirties by reading all of it (Linux).

    SD_SCRIPTS_DIR=... BUCKETSAMPLER_DIR=... python benchmarks/dataset_memory.py [--images 1000000]
        [--sd-scripts-python PYTHON]

Every contestant holds what it needs to train: path, caption, size, bucket. No file exists and none is opened:
sizes are handed to it. Each is measured in a process of its own, as the resident memory after minus before, the
caller's own lists gone. sd-scripts needs a Python with its requirements and stands for its record per image
(`ImageInfo`, filled as its bucketing fills it); "in sd-scripts" is what the adapter makes of these records. Peers
whose folder is not given are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

CAPTION = "a photograph of a cat that sits on a fence, number {:07d}"
PATH = "/data/train/10_cat photos/shard_{:04d}/image_{:07d}.jpg"


def sizes(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, 4097, (n, 2)).astype(np.int32)


def resident() -> int:
    """Bytes of this process that are in memory and not merely mapped from files."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return memory("Pss_Anon")


def memory(field: str) -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(field + ":"))) * 1024


def ours(n: int) -> Any:
    from kohya_bucket import BucketedDataset, KohyaBuckets
    from kohya_bucket.datasets import sources
    from kohya_bucket.images import SizeScan

    def known(paths: Any, **_: Any) -> SizeScan:
        ones = np.ones(n, np.uint8)
        return SizeScan(paths, sizes(n), ones, ones, [], ones.astype(bool))

    sources.read_sizes = known  # type: ignore[assignment]
    paths = [PATH.format(i // 1000, i) for i in range(n)]
    return BucketedDataset(paths, KohyaBuckets(1024, 256, 2048, 64), captions=[CAPTION.format(i) for i in range(n)])


def read_ours(dataset: Any) -> None:
    for i in range(len(dataset)):
        _ = dataset.source.name(i), dataset.source.caption(i), dataset.bucket_indices[i], dataset.resized_sizes[i]


def bucketsampler(n: int) -> Any:
    sys.path.insert(0, os.environ["BUCKETSAMPLER_DIR"])
    from bucketsampler import BucketedDataset, FixedBuckets, load_preset
    from bucketsampler.torch import _source

    _source._PathSource.read_all_dims = lambda *_, **__: sizes(n)
    paths = [PATH.format(i // 1000, i) for i in range(n)]
    captions = [CAPTION.format(i) for i in range(n)]
    return BucketedDataset(paths=paths, rule=FixedBuckets(load_preset("sdxl")), captions=captions)


def read_bucketsampler(dataset: Any) -> None:
    for i in range(len(dataset)):
        _ = dataset._source.identifier(i), dataset._source.get_caption(i), dataset.bucket_indices[i]


def sd_scripts(n: int) -> Any:
    sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from library.train_util import BucketManager, ImageInfo
    manager = BucketManager(False, (1024, 1024), 256, 2048, 64)
    manager.make_buckets()
    infos = {}
    for i, (width, height) in enumerate(sizes(n).tolist()):
        path = PATH.format(i // 1000, i)
        info = ImageInfo(path, 1, CAPTION.format(i), False, path)
        info.image_size = (width, height)
        info.bucket_reso, info.resized_size, _ = manager.select_bucket(width, height)
        infos[path] = info
        manager.add_image(info.bucket_reso, path)
    return infos, manager


def read_sd_scripts(held: Any) -> None:
    infos, manager = held
    for bucket in manager.buckets:
        for key in bucket:
            info = infos[key]
            _ = info.absolute_path, info.caption, info.bucket_reso, info.resized_size


def adapter(n: int) -> Any:
    from kohya_bucket.images.text_column import TextColumn
    from kohya_bucket.trainers.sdscripts.tables import ImageColumns

    infos, _ = sd_scripts(n)
    return ImageColumns(TextColumn.from_texts(list(infos)), list(infos.values()))


def read_adapter(records: Any) -> None:
    from kohya_bucket.trainers.door.batches import ImageKey

    for row, text in enumerate(records):  # a batch names its images by row
        key = ImageKey(text)
        key.row = row
        info = records[key]
        _ = info.absolute_path, info.caption, info.bucket_reso, info.resized_size


CONTESTANTS = {
    "kohya_bucket": (ours, read_ours, None),
    "kohya_bucket in sd-scripts": (adapter, read_adapter, "SD_SCRIPTS_DIR"),
    "bucketsampler": (bucketsampler, read_bucketsampler, "BUCKETSAMPLER_DIR"),
    "sd-scripts": (sd_scripts, read_sd_scripts, "SD_SCRIPTS_DIR"),
}


def one(name: str, n: int) -> None:
    """In a fresh process: bytes held, and bytes that a forked child makes its own by reading everything once."""
    make, read, _ = CONTESTANTS[name]
    make(1000)
    before = resident()
    held = make(n)
    after = resident()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        gc.freeze()
        start = memory("Private_Dirty")
        read(held)
        os.write(send, str(memory("Private_Dirty") - start).encode())
        os._exit(0)
    os.waitpid(child, 0)
    print(after - before, int(os.read(receive, 64)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--sd-scripts-python", default=sys.executable, help="a Python with sd-scripts' requirements")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.images)
        return
    n = options.images
    print("# Memory of a dataset\n")
    print(f"| {n:,} images | held, MB | bytes per image | dirtied by one forked worker, MB |")
    print("| --- | ---: | ---: | ---: |")
    for name, (_, _, needs) in CONTESTANTS.items():
        if needs and needs not in os.environ:
            print(f"| {name} | not measured: {needs} is not set | | |")
            continue
        python = options.sd_scripts_python if needs == "SD_SCRIPTS_DIR" else sys.executable
        command = [python, __file__, "--one", name, "--images", str(n)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["unknown"])[-1]
            print(f"| {name} | not measured: {reason} | | |")
            continue
        held, dirtied = map(int, done.stdout.split())
        print(f"| {name} | {held / 1e6:.0f} | {held / n:.0f} | {dirtied / 1e6:.1f} |")
    per_path, per_caption = len(PATH.format(1, 1)), len(CAPTION.format(1))
    print(f"\nPaths have {per_path} and captions {per_caption} characters.")


if __name__ == "__main__":
    main()
