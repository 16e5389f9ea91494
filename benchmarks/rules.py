"""Every rule on a million images, against the original where there is one, in the same run.

    BUCKETSAMPLER_DIR=... NOVELAI_DIR=... AI_TOOLKIT_DIR=... MUSUBI_TUNER_DIR=... DIFFUSERS_DIR=... \\
        python benchmarks/rules.py [--count 1000000] [--rounds 3] [--only TASK] [--write]

NOVELAI_DIR holds NovelAI's `bucketmanager.py`; the others are checkouts. A peer whose folder is not given is left
out, and the table says so. bucketsampler needs pydantic. lopho's rule exists as a listing in a pull request; the peer
is that listing with its two slips mended, one image at a time. In each round every contestant of a task runs once;
a ratio is the median over rounds of the ratio within a round. Originals that take one image at a time get Python
ints, and other trainers' functions only the first 100,000 images.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from kohya_bucket import ExactBuckets, FixedBuckets, KohyaBuckets, NovelAIBuckets, load_preset  # noqa: E402
from kohya_bucket.buckets import generate_buckets  # noqa: E402
from kohya_bucket.buckets.trainers import AIToolkitBuckets, DiffusersBuckets, MusubiTunerBuckets  # noqa: E402
from kohya_bucket.originals.novelai_epochs import NovelAIEpochs  # noqa: E402

FEW = 100_000
# musubi-tuner's table of steps names these; all have the step 16 or 32.
ARCHITECTURES = """
KANDINSKY5 HUNYUAN_VIDEO HUNYUAN_VIDEO_1_5 WAN FRAMEPACK FLUX_KONTEXT FLUX_2_DEV FLUX_2_KLEIN_4B FLUX_2_KLEIN_9B
QWEN_IMAGE QWEN_IMAGE_EDIT QWEN_IMAGE_LAYERED Z_IMAGE HIDREAM_O1 IDEOGRAM4 KREA2
"""
EPOCH_IMAGES, EPOCH_BATCH = 100_000, 8
Run = tuple[Callable[[], Any], int]


def image_sizes(n: int) -> np.ndarray:
    """[n, 2] int32: sides uniform from 256 to 4096 pixels."""
    return np.random.default_rng(0).integers(256, 4097, (n, 2)).astype(np.int32)


def tasks(sizes: np.ndarray) -> dict[str, tuple[Run, dict[str, Run]]]:
    """Task -> ours and the peers, each a function to time and the number of images it places."""
    n = len(sizes)
    pairs = sizes.tolist()
    sdxl = load_preset("sdxl")
    novel, fixed, exact = NovelAIBuckets(), FixedBuckets(sdxl), ExactBuckets(1024)
    largest = KohyaBuckets(1024, no_upscale=True, no_upscale_fit="largest")
    bounded = KohyaBuckets(1024, 256, 2048, max_crop=0.05)
    index = novel.assign_many_indices(sizes[:EPOCH_IMAGES])
    out: dict[str, tuple[Run, dict[str, Run]]] = {
        "fixed set (sdxl), index": ((lambda: fixed.assign_many_indices(sizes), n), {}),
        "fixed set (sdxl), all of Placement": ((lambda: fixed.place(sizes), n), {}),
        "NovelAI, all of Placement": ((lambda: novel.place(sizes), n), {}),
        f"NovelAI, epoch of {EPOCH_IMAGES:,} in batches of {EPOCH_BATCH}": (
            (lambda: list(NovelAIEpochs(index, EPOCH_BATCH).epoch()), EPOCH_IMAGES), {},
        ),
        "lopho's exact sizes, all of Placement": (
            (lambda: exact.place(sizes), n), {"listing, mended": (lambda: [listing(w, h) for w, h in pairs], n)},
        ),
        "set from the data, k-means": ((lambda: generate_buckets(sizes), n), {}),
        "set from the data, optimal, step 64": ((lambda: generate_buckets(sizes, method="optimal"), n), {}),
        "set from the data, optimal, step 8": (
            (lambda: generate_buckets(sizes, method="optimal", vae_factor=8), n), {},
        ),
        "kohya, no upscale, largest fit": ((lambda: largest.place(sizes), n), {}),
        "kohya, max_crop 0.05": ((lambda: bounded.place(sizes), n), {}),
        "as ai-toolkit places": ((lambda: AIToolkitBuckets(1024).place(sizes), n), {}),
        "as musubi-tuner places": ((lambda: MusubiTunerBuckets(1024).place(sizes), n), {}),
        "as diffusers places": ((lambda: DiffusersBuckets(1024).place(sizes), n), {}),
    }  # fmt: skip
    add_bucketsampler(out, sizes)
    add_novelai(out, pairs)
    add_trainers(out, pairs[:FEW])
    return out


def listing(width: int, height: int) -> tuple[int, int]:
    """The optimal size as the pull request's text has it, in floats, at 1024x1024."""
    area = 1024 * 1024
    scale = (area / (width * height)) ** 0.5
    w, h = round(width * scale / 64) * 64, round(height * scale / 64) * 64
    if w * h > area:
        w, h = int(width * scale / 64) * 64, int(height * scale / 64) * 64
    return w, h


def add_bucketsampler(out: dict[str, Any], sizes: np.ndarray) -> None:
    if "BUCKETSAMPLER_DIR" not in os.environ:
        return
    sys.path.insert(0, os.environ["BUCKETSAMPLER_DIR"])
    peer = importlib.import_module("bucketsampler")
    buckets = peer.load_preset("sdxl")
    out["fixed set (sdxl), index"][1]["bucketsampler"] = (lambda: peer.assign_many_indices(sizes, buckets), len(sizes))
    out["set from the data, k-means"][1]["bucketsampler"] = (lambda: peer.generate_buckets(sizes), len(sizes))


def add_novelai(out: dict[str, Any], pairs: list[list[int]]) -> None:
    if "NOVELAI_DIR" not in os.environ:
        return
    sys.path.insert(0, os.environ["NOVELAI_DIR"])
    module = importlib.import_module("bucketmanager")
    folder = tempfile.mkdtemp()

    def manager(count: int) -> Any:
        path = Path(folder) / f"{count}.pkl"
        if not path.exists():
            path.write_bytes(pickle.dumps({i: tuple(pair) for i, pair in enumerate(pairs[:count])}))
        return module.BucketManager(str(path), bsz=EPOCH_BATCH)

    whole, part = manager(len(pairs)), manager(EPOCH_IMAGES)

    def place() -> None:
        whole.res_map = {i: tuple(pair) for i, pair in enumerate(pairs)}
        whole.assign_buckets()

    def epoch() -> list[Any]:
        part.start_epoch()
        return list(part.generator())

    out["NovelAI, all of Placement"][1]["NovelAI's program (assign_buckets)"] = (place, len(pairs))
    name = next(task for task in out if task.startswith("NovelAI, epoch"))
    out[name][1]["NovelAI's program"] = (epoch, EPOCH_IMAGES)


def add_trainers(out: dict[str, Any], pairs: list[list[int]]) -> None:
    def take(variable: str, path: str, *names: str, **given: Any) -> dict[str, Any] | None:
        if variable not in os.environ:
            return None
        file = Path(os.environ[variable]) / path
        body = ast.parse(file.read_text(encoding="utf-8")).body
        kept = [b for b in body if getattr(b, "name", None) in names
                or any(getattr(t, "id", "") in names for t in getattr(b, "targets", []))]  # fmt: skip
        future = ast.parse("from __future__ import annotations").body
        space = {"math": math, "np": np, **vars(typing), **given}
        exec(compile(ast.Module([*future, *kept], []), str(file), "exec"), space)
        return space

    if got := take("AI_TOOLKIT_DIR", "toolkit/buckets.py", "get_bucket_for_image_size", "BucketResolution"):
        choose = got["get_bucket_for_image_size"]
        out["as ai-toolkit places"][1]["ai-toolkit"] = (lambda: [choose(w, h, 1024, 16) for w, h in pairs], len(pairs))
    names = {f"ARCHITECTURE_{name}": name for name in ARCHITECTURES.split()}
    file = "src/musubi_tuner/dataset/bucket.py"
    if got := take("MUSUBI_TUNER_DIR", file, "BucketSelector", divisible_by=lambda a, b: a - a % b, **names):
        selector = got["BucketSelector"]((1024, 1024), True, False, "QWEN_IMAGE")
        out["as musubi-tuner places"][1]["musubi-tuner"] = (
            lambda: [selector.get_bucket_resolution(pair) for pair in pairs], len(pairs),
        )  # fmt: skip
    wanted = ("find_nearest_bucket", "generate_aspect_ratio_buckets", "_DEFAULT_BUCKET_ASPECT_RATIOS")
    if got := take("DIFFUSERS_DIR", "src/diffusers/training_utils.py", *wanted):
        buckets, nearest = got["generate_aspect_ratio_buckets"](1024), got["find_nearest_bucket"]
        out["as diffusers places"][1]["diffusers"] = (lambda: [nearest(h, w, buckets) for w, h in pairs], len(pairs))


def measure(task: str, ours: Run, peers: dict[str, Run], rounds: int) -> list[list[str]]:
    runs = {"kohya_bucket": ours, **peers}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    ours[0]()
    for _ in range(rounds):
        for name, (function, count) in runs.items():
            start = time.perf_counter()
            function()
            taken[name].append((time.perf_counter() - start) / count)
    rows = []
    for name, (_, count) in runs.items():
        seconds = statistics.median(taken[name])
        ratio = statistics.median(t / o for t, o in zip(taken[name], taken["kohya_bucket"], strict=True))
        rows.append(
            [task, name, f"{count:,}", f"{1e-6 / seconds:.3f}", "-" if name == "kohya_bucket" else f"{ratio:.1f}"]
        )
    if not peers:
        rows[0][4] = "no peer"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="measure only tasks whose name contains this")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/rules.md")
    args = parser.parse_args()
    lines = [
        "| task | contestant | images | M images/s | times slower than kohya_bucket |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for task, (ours, peers) in tasks(image_sizes(args.count)).items():
        if args.only not in task:
            continue
        for row in measure(task, ours, peers, args.rounds):
            lines.append("| " + " | ".join(row) + " |")
            print(lines[-1], flush=True)
    note = (
        f"Sides uniform from 256 to 4096 pixels, seed 0; medians of {args.rounds} rounds. Placement holds bucket, "
        "resized size, SDXL crop box, aspect error, crop loss and reason; the originals compute only a bucket. "
        "NovelAI's "
        f"program copies the rest of a bucket for every batch. Python {platform.python_version()}, "
        f"numpy {np.__version__}, {os.cpu_count()} cores."
    )
    text = "\n".join(["# Rules", "", *lines, "", note, ""])
    if args.write:
        (REPO / "benchmarks" / "results" / "rules.md").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
