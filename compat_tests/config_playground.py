"""A folder with one of everything that a dataset config can point at, and random configs over it."""

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image

from kohya_bucket.trainers.sdscripts.config import Feature, Release

_SIZES = [(64, 64), (80, 64), (64, 96), (128, 72), (50, 120), (200, 64), (72, 73)]


def _image(path: Path, i: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", _SIZES[i % len(_SIZES)], (i * 40 % 256, 80, 160)).save(path)


def _captioned(folder: Path, names: list[str], extension: str) -> None:
    for i, name in enumerate(names):
        _image(folder / name, i)
        (folder / name).with_suffix(extension).write_text(f"a picture, number {i}", encoding="utf-8")


def make_playground(root: Path) -> None:
    """Write the folders, metadata files and control images."""
    _captioned(root / "plain", [f"img_{i}.png" for i in range(12)], ".caption")
    _captioned(root / "txt", [f"{c}.png" for c in "zyxwab"], ".txt")
    _captioned(root / "reg", [f"r{i:02}.jpg" for i in range(5)], ".txt")
    _captioned(root / "reg2", [f"q{i}.webp" for i in range(3)], ".txt")
    _captioned(root / "five", ["a_1_2_3_4.png", "b_c_10_20_30_40.png", "face.png"], ".txt")
    (root / "five" / "a_1_2_3_4.txt").rename(root / "five" / "a.txt")
    mixed = root / "mixed"
    for i, name in enumerate(["B.PNG", "a.jpg", "a.png", "C.Jpg", "d.jpeg", "e.bmp", "f.WEBP", ".hidden.png", "g.gif"]):
        _image(mixed / name, i)
    _image(mixed / "inner" / "deep.png")
    (mixed / "folder.png").mkdir()
    (mixed / "folder.png").rmdir()
    _captioned(root / "with [brackets] (and) spaces", ["1.png", "10.png", "2.png"], ".txt")
    (root / "empty").mkdir()
    _captioned(root / "emptycaption", ["x.png"], ".txt")
    (root / "emptycaption" / "x.txt").write_text("", encoding="utf-8")
    cached = root / "cached"
    _captioned(cached, ["one.png", "two.png", "three.png", "new.png"], ".txt")
    entries = {
        f"cached/{n}.png": {"caption": n, "resolution": [90 + i, 64]} for i, n in enumerate(("two", "one", "three"))
    }
    (cached / "metadata_cache.json").write_text(json.dumps(entries), encoding="utf-8")
    _captioned(root / "broken_cache", ["one.png"], ".txt")
    (root / "broken_cache" / "metadata_cache.json").write_text('{"broken_cache/one.png": {}}', encoding="utf-8")
    _control(root)
    _metadata(root)


def _control(root: Path) -> None:
    for i in range(4):
        _captioned(root / "images", [f"p{i}.png"], ".txt")
        _image(root / "control" / f"p{i}.{'jpg' if i % 2 else 'png'}", i)
        _image(root / "control_extra" / f"p{i}.png", i)
        if i:
            _image(root / "control_missing" / f"p{i}.png", i)
    _image(root / "control" / "p1.PNG", 1)
    _image(root / "control_extra" / "more.png")


def _metadata(root: Path) -> None:
    names = [f"img_{i}.png" for i in range(12)]
    plain = {n: {"caption": f"c {n}", "tags": "t1, t2"} for n in names[::-1]}
    sized = {n: {"tags": "t", "image_size": [64 + i, 100]} for i, n in enumerate(names)}
    absolute = {str(root / "txt" / f"{c}.png"): {"caption": c} for c in "zyxwab"}
    prepared = {f"img_{i}": {"caption": "x", "train_resolution": [64 * (1 + i % 2), 64]} for i in range(12)}
    stems = {f"img_{i}": {"caption": "x"} for i in range(12)}
    gone = {"nowhere.png": {"caption": "x"}}
    partly = {n: {"tags": "t", **({"image_size": [40 * i, 90]} if i % 3 else {})} for i, n in enumerate(names, 1)}
    for name, content in {
        "plain": plain, "sized": sized, "absolute": absolute, "prepared": prepared, "stems": stems, "none": {},
        "partly": partly,
        "gone": gone, "list": [1], "flat": {"a.png": "caption"},
    }.items():  # fmt: skip
        (root / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    lines = [json.dumps({"image_path": n, "image_size": [100, 64 + i], "caption": "é"}) for i, n in enumerate(names)]
    (root / "lines.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sides = [{"image_path": n, "width": 50 * i, "height": 70, "image_size": [9, 9]} for i, n in enumerate(names, 1)]
    (root / "sides.jsonl").write_text("\n".join(map(json.dumps, sides)), encoding="utf-8")
    (root / "blank_line.jsonl").write_text(lines[0] + "\n\n" + lines[1] + "\n", encoding="utf-8")
    (root / "broken.json").write_text("{", encoding="utf-8")


# -- random configs ----------------------------------------------------------------------------------

_DATASET: dict[str, list[Any]] = {
    "resolution": [128, 64, [128, 64], [64, 192]],
    "batch_size": [1, 2, 3],
    "enable_bucket": [True, True, False],
    "min_bucket_reso": [64, 32, 40],
    "max_bucket_reso": [256, 250, 192],
    "bucket_reso_steps": [64, 32, 8],
    "bucket_no_upscale": [True, False],
    "validation_split": [0.25, 0.5, 0.1, 0.0],
    "validation_seed": [0, 7, 42],
    "network_multiplier": [0.5],
    "skip_image_resolution": [64, [100, 60], 75, [128, 100], 200, 0],
}
#: Keys that are not known from the beginning, by the change that brought them.
NEW_KEYS = {Feature.SKIPPING: ("skip_image_resolution",)}
_SUBSET: dict[str, list[Any]] = {
    "num_repeats": [1, 2, 5, 0],
    "flip_aug": [True, False],
    "color_aug": [False],
    "shuffle_caption": [True, False],
    "keep_tokens": [0, 3],
    "keep_tokens_separator": ["|||"],
    "secondary_separator": [";"],
    "caption_separator": [";", ","],
    "enable_wildcard": [True, False],
    "caption_prefix": ["p"],
    "caption_suffix": ["s"],
    "token_warmup_min": [2],
    "token_warmup_step": [0.5, 100],
    "face_crop_aug_range": [[1.5, 2.5]],
    "custom_attributes": [{"a": 1}, {}],
    "resize_interpolation": ["area", "lanczos"],
    "caption_dropout_rate": [0.1, 0, 1],
    "caption_dropout_every_n_epochs": [2],
    "caption_tag_dropout_rate": [0.2],
}
_CAPTIONED: dict[str, list[Any]] = {"caption_extension": [".txt", "txt", ".caption"], "cache_info": [True, False]}
_FOLDERS = [
    "plain", "plain/", "./plain", "txt", "five", "mixed", "mixed/inner", "with [brackets] (and) spaces", "cached",
    "cached/", "nowhere", "empty",
]  # fmt: skip
_REGULAR = ["reg", "reg2"]
_JSON = [
    "plain.json", "sized.json", "absolute.json", "prepared.json", "stems.json", "none.json", "lines.jsonl", "gone.json",
    "partly.json", "sides.jsonl",
]  # fmt: skip
_SLIPS: list[tuple[str, Any]] = [
    ("batch_siz", 2), ("resolution", "512"), ("enable_bucket", 1), ("validation_split", 1), ("is_reg", True),
    ("image_dir", "plain"), ("metadata_file", "plain.json"), ("conditioning_data_dir", "control"), ("alpha_mask", True),
    ("num_repeats", 1.0), ("caption_extension", ".txt"), ("class_tokens", "cat"), ("face_crop_aug_range", [1, 2]),
    ("flip_aug", "true"), ("cache_latents", True), ("network_multiplier", 1), ("resolution", [512]),
    ("batch_size", True),
    ("caption_dropout_rate", "0.1"), ("keep_tokens", None), ("kohya_bucket", {"a": 1}), ("custom_attributes", "x"),
    ("resolution", [64, 64.0]), ("subsets", {}), ("batch_size", 2), ("cache_info", True),
    ("skip_image_resolution", 80), ("skip_image_resolution", "512,768"), ("skip_image_resolution", [1, 2, 3]),
    ("train_inpainting", True),
]  # fmt: skip


def random_config(seed: int, release: Release, *, slips: bool) -> dict[str, Any]:
    """A config of keys that the release knows, with one to three datasets.

    With `slips`, some key may be wrong, too new, or in the wrong place.
    """
    rng = random.Random(seed)
    config: dict[str, Any] = {}
    if rng.random() < 0.6:
        config["general"] = _draw(rng, {**_DATASET, **_SUBSET, **_CAPTIONED}, 4)
    config["datasets"] = [_dataset(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
    tables = [config.get("general", {}), *config["datasets"], *(s for d in config["datasets"] for s in d["subsets"])]
    unknown = {key for change, keys in NEW_KEYS.items() if change not in release for key in keys}
    for table in tables:
        for key in unknown & table.keys():
            del table[key]
    if slips:
        for _ in range(rng.choice([0, 1, 1, 2])):
            key, value = rng.choice(_SLIPS)
            rng.choice(tables)[key] = value
    return config


def _dataset(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["dreambooth", "dreambooth", "fine-tuning", "controlnet"])
    table = {"resolution": 128, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 256}
    table.update(_draw(rng, {**_DATASET, **_SUBSET}, 4))
    if kind == "controlnet" and rng.random() < 0.9:
        table.pop("validation_split", None)
    table["subsets"] = [_subset(rng, kind) for _ in range(rng.choice([1, 1, 2, 3, 4]))]
    return table


def _subset(rng: random.Random, kind: str) -> dict[str, Any]:
    if kind == "fine-tuning":
        table: dict[str, Any] = {"metadata_file": rng.choice(_JSON)}
        if rng.random() < 0.9:
            table["image_dir"] = "plain"
        return {**table, **_draw(rng, {**_SUBSET, "alpha_mask": [True]}, 2)}
    if kind == "controlnet":
        control = rng.choice(["control", "control", "control", "control_extra", "control_missing", "nowhere"])
        return {"image_dir": "images", "conditioning_data_dir": control, **_draw(rng, {**_SUBSET, **_CAPTIONED}, 2)}
    table = {"image_dir": rng.choice(_FOLDERS)}
    if rng.random() < 0.3:
        table = {"image_dir": rng.choice(_REGULAR), "is_reg": True}
    return {**table, **_draw(rng, {**_SUBSET, **_CAPTIONED, "class_tokens": ["cat"], "alpha_mask": [True]}, 3)}


def _draw(rng: random.Random, pool: dict[str, list[Any]], most: int) -> dict[str, Any]:
    return {key: rng.choice(pool[key]) for key in rng.sample(sorted(pool), rng.randint(0, most))}
