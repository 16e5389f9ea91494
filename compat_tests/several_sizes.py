"""Configs that train images at several sizes, and what their batches hold."""

import collections
import multiprocessing

import torch
from sdscripts_support import build_groups, cache_latents, random_sizes, write_images

COUNT = 31
MERGE = {"remainder": "merge", "merge_max_crop": 0.5}
ROTATE = {"resolutions": [128, 192], "resolution_mode": "rotate"}
TABLES = {
    "merge": MERGE,
    "catch_all": {"remainder": "catch_all"},
    "all": {"resolutions": [128, 192]},
    "rotate": ROTATE,
    "weighted": {"resolutions": [128, 192], "resolution_mode": "weighted", "resolution_weights": [3, 1]},
    "rotate and merge": {**ROTATE, **MERGE},
}


def config_of(tmp_path, table, repeats=1, batch_size=4, **dataset):
    if not (tmp_path / "a").exists():
        write_images(tmp_path / "a", random_sizes(COUNT, 1, 60, 300))
    subset = {"image_dir": str(tmp_path / "a"), "num_repeats": repeats, "caption_extension": ".txt"}
    keys = {"resolution": 128, "batch_size": batch_size, "enable_bucket": True, "min_bucket_reso": 64}
    config = {"datasets": [{**keys, "max_bucket_reso": 512, "subsets": [subset], **dataset}]}
    return {**config, "kohya_bucket": table} if table else config


def batches_of(sd, group, epochs=3, workers=0, context=None, seed_epoch=1):
    """Per epoch the batches that the trainers' own loader call gives."""
    for dataset in group.datasets:
        dataset.debug_dataset = True
        getattr(dataset, "dreambooth_dataset_delegate", dataset).debug_dataset = True
    epoch = multiprocessing.get_context(context).Value("i", 0)
    collator = sd.train_util.collator_class(epoch, epoch, group if workers == 0 else None)
    loader = torch.utils.data.DataLoader(
        group, batch_size=1, shuffle=True, collate_fn=collator, num_workers=workers, multiprocessing_context=context
    )
    promised, seen = len(loader), []
    for number in range(seed_epoch, seed_epoch + epochs):
        epoch.value = number
        seen.append(list(loader))
        assert len(seen[-1]) == promised
    return seen


def sizes_of(batch):
    """Width and height of a batch, in pixels."""
    if batch["images"] is not None:
        return batch["images"].shape[3], batch["images"].shape[2]
    return batch["latents"].shape[3] * 8, batch["latents"].shape[2] * 8


def trained(seen):
    """Per epoch how often each image is trained at each size."""
    return [collections.Counter((key, sizes_of(b)) for b in epoch for key in b["image_keys"]) for epoch in seen]


def at_size(sd, info, size):
    """The picture that sd-scripts' own resize and crop make of an image for a bucket."""
    image = sd.train_util.load_image(info.absolute_path)
    width, height = info.image_size
    scale = max(size[0] / width, size[1] / height)
    resized = int(width * scale + 0.5), int(height * scale + 0.5)
    cut, _, _ = sd.train_util.trim_and_resize_if_required(False, image, size, resized)
    return sd.train_util.IMAGE_TRANSFORMS(cut)


def assert_asked(seen, table, keys, repeats):
    for counts in trained(seen):
        images = collections.Counter()
        for (key, _), times in counts.items():
            images[key] += times
        each = repeats * (
            len(table["resolutions"]) if table.get("resolution_mode", "all") == "all" and "resolutions" in table else 1
        )
        assert images == dict.fromkeys(keys, each)


def cached(sd, config, encoder, to_disk):
    """A group whose latents the real caching path has cached."""
    group, _ = build_groups(sd, config)
    cache_group(group, encoder, to_disk)
    return group


def cache_group(group, encoder, to_disk):
    from library import strategy_sd

    cache_latents(group, encoder, strategy_sd.SdSdxlLatentsCachingStrategy(True, to_disk, 2, False))
