"""Without OpenCV sd-scripts 0.12 puts a module of its own in its place; our pixels must not come from that."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]

CHILD = """
import hashlib, json, os, sys
sys.dont_write_bytecode = True
sys.modules["cv2"] = None  # importing it fails
import numpy as np
from kohya_bucket.images import resize
from kohya_bucket.trainers.sdscripts.caching.session import CacheItem
def look():
    pixels = np.random.default_rng(0).integers(0, 256, (67, 91, 4), dtype=np.uint8)
    sizes = [(40, 30), (91, 31), (120, 90)]
    out = {f"{name} {channels} {size}": hashlib.sha256(resize.resize_and_crop(pixels[..., :channels], size, size, name)
           .tobytes()).hexdigest() for name in ("bilinear", "bicubic", "nearest", "lanczos", "box") for size in sizes
           for channels in (3, 4)}
    return out | {f"made by {name}": resize.resampler(name) for name in resize.INTERPOLATIONS}
before = look() if sys.argv[1] == "first" else None
del sys.modules["cv2"]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "cv2":
            raise ModuleNotFoundError("No module named 'cv2'", name=name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
import library.utils
assert sys.modules["cv2"]._IS_CV2_STUB
after = look()
assert before in (None, after)
names = ("area", "lanczos", "bilinear", "bicubic")
made = [CacheItem("x.png", (64, 64), (100, 80), resized_size=(80, 64), interpolation=name, source=(1, 2))
        .fingerprint().interpolation for name in names]
print(json.dumps([after, made]))
"""


def child(sd_scripts_dir, order):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SD_SCRIPTS_DIR": str(sd_scripts_dir), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, order], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def stub(unpatched):
    if not (unpatched.root / "library" / "_cv2_stub").is_dir():
        pytest.skip("this version requires OpenCV")
    return importlib.import_module("library._cv2_stub")


def test_pixels_do_not_depend_on_the_order_of_imports(stub, unpatched):
    (first, made), (last, also_made) = (child(unpatched.root, order) for order in ("first", "last"))
    assert first == last
    assert made == also_made == ["area/cv2-stub", "lanczos/pillow", "bilinear/cv2-stub", "bicubic/pillow"]


def test_what_stands_in_for_opencv_is_within_one_of_it(stub):
    """So latents that were made with either serve in place of the other."""
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    rng = np.random.default_rng(0)
    for _ in range(200):
        (height, width), (to_height, to_width) = rng.integers(8, 90, (2, 2)).tolist()
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        kinds = ["INTER_LINEAR"] + ["INTER_AREA"] * (to_height <= height and to_width <= width)
        for kind in kinds:
            theirs = stub.resize(pixels, (to_width, to_height), interpolation=getattr(stub, kind))
            true = cv2.resize(pixels, (to_width, to_height), interpolation=getattr(cv2, kind))
            assert np.abs(theirs.astype(int) - true).max() <= 1
