"""Configs over the playground that each show one thing."""

from typing import Any

SUBSET = {"image_dir": "txt", "caption_extension": ".txt"}
BASE = {"resolution": 128, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 256}


def one(*subsets: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"datasets": [{**BASE, **keys, "subsets": list(subsets)}]}


HAND_MADE = {
    "no datasets": {"general": {"resolution": 128}, "datasets": []},
    "no subsets": one(),
    "no resolution": {"datasets": [{"subsets": [SUBSET]}]},
    "no resolution, fine-tuning": {"datasets": [{"subsets": [{"metadata_file": "plain.json", "image_dir": "plain"}]}]},
    "min above resolution": one(SUBSET, min_bucket_reso=192),
    "max below resolution": one(SUBSET, max_bucket_reso=64),
    "steps of zero": one(SUBSET, bucket_reso_steps=0),
    "batch of zero": one(SUBSET, batch_size=0),
    "table in datasets": one({**SUBSET, "kohya_bucket": {}}),
    "subsets as table": {"datasets": [{**BASE, "subsets": SUBSET}]},
    "datasets as table": {"datasets": {**BASE, "subsets": [SUBSET]}},
    "general as list": {"general": [], "datasets": [{**BASE, "subsets": [SUBSET]}]},
    "mixed kinds": one(SUBSET, {"metadata_file": "plain.json"}),
    "missing image_dir": one({"num_repeats": 2}),
    "empty caption": one({"image_dir": "emptycaption", "caption_extension": ".txt"}),
    "broken cache": one({"image_dir": "broken_cache", "cache_info": True}),
    "relative keys without folder": one({"metadata_file": "plain.json"}),
    "broken metadata": one({"metadata_file": "broken.json", "image_dir": "plain"}),
    "metadata that is a list": one({"metadata_file": "list.json", "image_dir": "plain"}),
    "metadata with captions for entries": one({"metadata_file": "flat.json", "image_dir": "plain"}),
    "blank line in jsonl": one({"metadata_file": "blank_line.jsonl", "image_dir": "plain"}),
    "control images missing": one({"image_dir": "images", "conditioning_data_dir": "control_missing"}),
    "control images to spare": one({"image_dir": "images", "conditioning_data_dir": "control_extra"}),
    "control with random_crop": one({"image_dir": "images", "conditioning_data_dir": "control", "random_crop": True}),
    "unknown interpolation": one(SUBSET, resize_interpolation="sharp"),
    "split in percent": one(SUBSET, validation_split=20.0, validation_seed=1),
    "negative split": one(SUBSET, validation_split=-0.5, validation_seed=1),
    "all held back": one(SUBSET, validation_split=1.0, validation_seed=1),
    "empty folder and split": one({"image_dir": "empty"}, validation_split=0.5, validation_seed=1),
    "cached and split": one({**SUBSET, "cache_info": True}, validation_split=0.5, validation_seed=1),
    "fine-tuning and split": one({"metadata_file": "plain.json", "image_dir": "plain"}, validation_split=0.5),
    "more regularization": one({**SUBSET, "num_repeats": 1}, {"image_dir": "reg", "is_reg": True, "num_repeats": 7}),
    "less regularization": one({**SUBSET, "num_repeats": 9}, {"image_dir": "reg2", "is_reg": True}),
    "small images skipped": one({"image_dir": "plain"}, SUBSET, skip_image_resolution=[100, 60]),
    "small images skipped, then split": one(
        {"image_dir": "plain"}, SUBSET, skip_image_resolution=75, validation_split=0.4, validation_seed=3
    ),
    "small regularization skipped": one(SUBSET, {"image_dir": "reg", "is_reg": True}, skip_image_resolution=75),
    "small images skipped by cached sizes": one({"image_dir": "cached", "cache_info": True}, skip_image_resolution=77),
    "small images skipped and cached": {"datasets": [
        {**BASE, "skip_image_resolution": 75, "subsets": [{"image_dir": "plain", "cache_info": True}]},
        {**BASE, "subsets": [{"image_dir": "plain", "cache_info": True}]},
    ]},
    "small pairs skipped": one({"image_dir": "images", "conditioning_data_dir": "control"}, skip_image_resolution=64),
    "small images of metadata skipped": one(
        {"metadata_file": "partly.json", "image_dir": "plain"}, {"metadata_file": "sides.jsonl", "image_dir": "plain"},
        skip_image_resolution=[80, 90],
    ),
    "all skipped": one({"image_dir": "plain"}, {"image_dir": "mixed"}, skip_image_resolution=112),
    "all skipped, then split": one(
        {"image_dir": "plain"}, {"image_dir": "reg"}, skip_image_resolution=100, validation_split=0.5, validation_seed=1
    ),
    "nothing skipped": one(SUBSET, skip_image_resolution=0),
    "tags and no captions": one({"metadata_file": "sized.json", "image_dir": "plain", "enable_wildcard": True}),
    "keys without extension": one({"metadata_file": "stems.json", "image_dir": "plain"}),
    "control and split": one(
        {"image_dir": "images", "conditioning_data_dir": "control"}, validation_split=0.5, validation_seed=3
    ),
    "regularization alone": one({"image_dir": "reg2", "is_reg": True}),
    "two regularization folders": one(
        {**SUBSET, "num_repeats": 4}, {"image_dir": "reg", "is_reg": True}, {"image_dir": "reg2", "is_reg": True}
    ),
    "folder twice": one(SUBSET, {**SUBSET, "num_repeats": 3}),
    "folder twice, spelled otherwise": one(SUBSET, {"image_dir": "txt/", "num_repeats": 3}),
    "zero first, then the same": one({**SUBSET, "num_repeats": 0}, SUBSET),
    "two resolutions": {"datasets": [{**BASE, "subsets": [SUBSET]}, {**BASE, "resolution": 64, "subsets": [SUBSET]}]},
    "two datasets, one cache": {"datasets": [
        {**BASE, "subsets": [{**SUBSET, "cache_info": True}]}, {**BASE, "subsets": [{**SUBSET, "cache_info": True}]},
    ]},
    "false below true": {"general": {"enable_bucket": True, "flip_aug": True}, "datasets": [
        {"resolution": 64, "enable_bucket": False, "flip_aug": False, "subsets": [{**SUBSET, "flip_aug": True}]},
    ]},
}  # fmt: skip
