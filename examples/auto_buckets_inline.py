"""A bucket set made from your own images, compared with sd-scripts' buckets by what each crops off.

Run it as it is (it makes its own images), or on yours: python examples/auto_buckets_inline.py FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from _sample_images import make_images

from kohya_bucket import AutoBuckets, BucketBatchSampler, BucketedDataset, KohyaBuckets, read_sizes
from kohya_bucket.images import list_images

TARGET = 128


def main(folder: Path) -> None:
    paths = list_images(folder)
    scan = read_sizes(paths)
    dims = scan.sizes[scan.readable]

    ours = AutoBuckets.from_dims(dims, num_buckets=6, target=TARGET, vae_factor=8)
    kohya = KohyaBuckets(TARGET, 64, 256, 32)
    for name, rule in (("made from the images", ours), ("sd-scripts", kohya)):
        loss = float(np.nanmean(rule.place(dims).crop_loss))
        used = len(set(rule.assign_many_indices(dims).tolist()))
        print(f"{name:>20}: {used} buckets used, mean crop loss {loss:.2%}")
    print("buckets:", ", ".join(map(str, ours.bucket_set)))

    dataset = BucketedDataset(paths=paths, rule=ours)
    sampler = BucketBatchSampler(dataset, batch_size=4)
    print(f"{len(dataset)} images, {len(sampler)} batches per epoch")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_images(Path(folder))
            main(Path(folder))
