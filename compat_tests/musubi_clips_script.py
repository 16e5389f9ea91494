"""What musubi-tuner's own code decides about clips, as a table: run with a checkout's `src` on PYTHONPATH.

`python compat_tests/musubi_clips_script.py OUT.json.gz` writes bucket sets, the buckets of pictures, and the runs of
frames that its `VideoDataset` takes from clips of many lengths. `reference/musubi_clips.json.gz` is what version 0.3.4
wrote. Only the container is a stand-in: it yields as many frames as the file's name says.
"""

import gzip
import importlib.util
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path

RESOLUTIONS = [(960, 544), (512, 512), (1024, 1024), (832, 480), (720, 1280), (256, 256), (1328, 1328), (300, 200)]
FRAMES = [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 26, 33, 48, 49, 50, 77, 80, 81, 82, 97, 100, 121, 129, 130, 161, 200]
RATES = [None, 30.0, 24.0, 60.0, 29.97, 23.976, 16.0, 12.0, 15.0, 25.0, 50.0, 119.88]
LENGTHS = [[1], [25], [1, 25, 45], [2, 3, 4, 7], [81, 17, 33, 17], [30, 31, 32, 33], [129], [5, 9, 13, 17, 21]]
VIDEO = ["hv", "wan", "fp", "fk", "k5", "hv15"]
SIDE = 32


def settings():
    """So many ways to take frames, drawn the same each time."""
    draws = random.Random(15)
    out = []
    for extraction, rate in itertools.product(["head", "chunk", "slide", "uniform", "full"], RATES):
        for _ in range(2):
            one = {"frame_extraction": extraction, "source_fps": rate, "target_frames": draws.choice(LENGTHS)}
            one |= {"frame_stride": 1, "frame_sample": 1, "max_frames": 129}
            if extraction == "slide":
                one["frame_stride"] = draws.choice([1, 2, 5, 10, 33])
            if extraction == "uniform":
                one["frame_sample"] = draws.choice([1, 2, 3, 4, 7, 20])
            if extraction == "full":
                one["max_frames"] = draws.choice([1, 4, 17, 80, 81, 129, 1000])
            out.append(one)
    return out


def pictures(selector_class, names):
    out = []
    for name in names:
        for resolution, no_upscale in itertools.product(RESOLUTIONS, (False, True)):
            draws = random.Random(f"{name} {resolution} {no_upscale}")
            selector = selector_class(resolution, True, no_upscale, name)
            sizes = [(draws.randint(64, 4000), draws.randint(64, 4000)) for _ in range(24)]
            sizes += [(draws.randint(16, 60), draws.randint(16, 400)), resolution, resolution[::-1]]
            sizes += draws.sample(selector.bucket_resolutions, 2)
            out.append(
                {
                    "architecture": name,
                    "steps": selector.reso_steps,
                    "resolution": resolution,
                    "no_upscale": no_upscale,
                    "buckets": selector.bucket_resolutions,
                    "rows": [[*size, *selector.get_bucket_resolution(size)] for size in sizes],
                }
            )
    return out


class Frame:
    def to_image(self):
        from PIL import Image

        return Image.new("RGB", (SIDE, SIDE))


class Container:
    def __init__(self, path):
        self.frames = int(Path(path).stem)

    def decode(self, video):
        return iter([Frame()] * self.frames)

    def close(self):
        pass


def runs(dataset_class, names):
    import av

    av.open, time.sleep = Container, lambda _: None
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for frames in FRAMES:
            Path(folder, f"{frames}.mp4").touch()
            Path(folder, f"{frames}.txt").write_text("a caption", encoding="utf-8")
        for i, one in enumerate(settings()):
            name = VIDEO[i % len(VIDEO)]
            if name not in names:
                continue
            dataset = dataset_class(
                (SIDE, SIDE), ".txt", 1, 1, True, False, video_directory=folder, architecture=name, **one
            )
            taken = {frames: [] for frames in FRAMES}
            for key, batch in dataset.retrieve_latent_cache_batches(2):
                for item in batch:
                    clip, start, length = re.search(r"(\d+)_(\d{5,})-(\d{3,})\.mp4$", item.item_key).groups()
                    assert len(item.content) == int(length) == key[2] == item.frame_count
                    taken[int(clip)].append((int(length), int(start)))
            # Equal runs share a cache file; they come bucket by bucket, in an order that says nothing.
            rows = [[n, [[start, length] for length, start in sorted(set(found))]] for n, found in taken.items()]
            out.append({"architecture": name, "target_fps": dataset.target_fps, **one, "rows": rows})
    return out


def table():
    from musubi_tuner.dataset.image_video_dataset import BucketSelector, VideoDataset

    split = importlib.util.find_spec("musubi_tuner.dataset.architectures") is not None
    home = "architectures" if split else "image_video_dataset"
    module = importlib.import_module(f"musubi_tuner.dataset.{home}")
    named = {name: value for name, value in vars(module).items() if name.startswith("ARCHITECTURE_")}
    short = [value for name, value in named.items() if not name.endswith("_FULL")]
    known = [name for name in short if name in BucketSelector.ARCHITECTURE_STEPS_MAP]
    full = {value: named[f"{name}_FULL"] for name, value in named.items() if not name.endswith("_FULL")}
    return {"names": full, "pictures": pictures(BucketSelector, known), "runs": runs(VideoDataset, known)}


if __name__ == "__main__":
    found = json.dumps(table(), separators=(",", ":"))
    os.makedirs(os.path.dirname(os.path.abspath(sys.argv[1])), exist_ok=True)
    with open(sys.argv[1], "wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as packed:
        packed.write(found.encode("utf-8"))
