"""What one run of sd-scripts caches for a folder, in numbers that another process can compare with."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sdscripts_support import MeanVAE, build_groups, cache_latents


def cached_digests(sd: SimpleNamespace, folder: Path, resolutions: list[int]) -> dict[str, Any]:
    """Caches the images at each resolution, in a dataset each, through the real path.

    Returns how many pictures were `encoded`, and `seen`: by image and resolution a digest of all that a batch gets.
    """
    from library import strategy_sd

    subset = {"image_dir": str(folder), "class_tokens": "x", "flip_aug": True, "alpha_mask": True}
    keys = {"batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
    datasets = [{**keys, "resolution": resolution, "subsets": [subset]} for resolution in resolutions]
    group, _ = build_groups(sd, {"datasets": datasets})
    strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 2, False)
    encoder = MeanVAE()
    cache_latents(group, encoder, strategy)
    seen = {}
    for dataset in group.datasets:
        for info in dataset.image_data.values():
            latents, size, ltrb, flipped, mask = strategy.load_latents_from_disk(info.latents_npz, info.bucket_reso)
            assert latents.shape[1:] == (info.bucket_reso[1] // 8, info.bucket_reso[0] // 8), "another shape"
            assert tuple(size) == tuple(info.image_size)
            parts = [part.tobytes() for part in (latents, flipped, mask)]
            digest = hashlib.sha256(b"".join(parts) + repr((size, ltrb)).encode()).hexdigest()
            seen[f"{Path(info.absolute_path).name} at {dataset.width}"] = digest
    return {"encoded": encoder.encoded, "seen": seen}
