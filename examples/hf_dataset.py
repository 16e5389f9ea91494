"""Train from a Hugging Face dataset: one that lies on the disk, and one that is streamed.

It needs the extra `hf`, and makes a small dataset itself, so nothing is downloaded. With yours:

    hf = load_dataset("lambdalabs/pokemon-blip-captions", split="train")
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import datasets
from _sample_images import make_images
from torch.utils.data import DataLoader

from kohya_bucket import BucketBatchSampler, BucketedDataset, KohyaBuckets
from kohya_bucket.datasets.streaming import StreamingBuckets


def make_dataset(folder: Path) -> datasets.Dataset:
    paths = make_images(folder)
    rows = {
        "image": [str(p) for p in paths],
        "text": [p.with_suffix(".txt").read_text(encoding="utf-8") for p in paths],
    }
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    return datasets.Dataset.from_dict(rows, features=features)


def main(folder: Path) -> None:
    hf = make_dataset(folder)
    rule = KohyaBuckets(128, 64, 256, 32)

    dataset = BucketedDataset.from_hf(hf, rule, image_column="image", caption_column="text")
    loader = DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, batch_size=4))
    trained = sum(len(batch["image"]) for batch in loader)
    print(f"map-style: {trained} of {len(hf)} images in {len(loader)} batches")

    # A stream has no length and no order to plan with: images wait in a buffer until their bucket is full.
    stream = StreamingBuckets.from_hf(
        hf.to_iterable_dataset(), rule, batch_size=4, caption_column="text", buffer_size=24
    )
    for step, batch in enumerate(DataLoader(stream, batch_size=None)):
        if step % 4 == 0:
            print(f"stream step {step:2d}: {batch['bucket'][0]} x{len(batch['image'])}, {batch['caption'][0]!r}")
    print(f"stream: {stream.counts.trained} images trained, {stream.counts.short} short batches")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
