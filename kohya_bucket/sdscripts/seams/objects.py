"""What sd-scripts' objects must offer: the checks that follow from the types of the adapter's own code."""

from __future__ import annotations

from kohya_bucket.adapter.seams import Owners, Seam, Subject
from kohya_bucket.adapter.shapes import Fields, Offers, Uses
from kohya_bucket.sdscripts import objects

__all__ = ["OBJECTS", "has_own_modules", "has_strategies"]


def has_strategies(owners: Owners) -> bool:
    """Whether latents are cached by strategies, one for each model family (since 0.10)."""
    return owners.has("LatentsCachingStrategy") or owners.has("BaseDataset.new_cache_latents")


def has_own_modules(owners: Owners) -> bool:
    """Whether data sets have modules of their own (since 0.11), and caching without strategies is gone."""
    return owners.home.__name__ != "library.train_util"


_ENTRY = ("bucket_index", "bucket_batch_size", "batch_index")


def _seams(owners: Owners) -> tuple[Seam, ...]:
    record = objects.CachedRecord if has_strategies(owners) else objects.ImageRecord
    return (
        Seam("ImageInfo", (Offers(record),)),
        Seam("BucketBatchIndex", (Fields(*_ENTRY),)),
        Seam("DreamBoothSubset", (Offers(objects.NotedSubset),)),
        Seam("FineTuningSubset", (Offers(objects.ListedSubset),)),
        Seam("ControlNetSubset", (Offers(objects.NotedSubset),)),
        Seam("DreamBoothDataset", (Offers(objects.Dataset),)),
        Seam("FineTuningDataset", (Offers(objects.Dataset),)),
        Seam("ControlNetDataset", (Offers(objects.DelegatingDataset),)),
        Seam("DatasetGroup", (Offers(objects.Group),)),
        Seam("collator_class", (Offers(objects.Collator),)),
        Seam("BaseDataset.__getitem__", (Uses("image_data", "image_to_subset", "bucket_reso", "resized_size"),)),
    )


OBJECTS = Subject("objects", "image records, subsets and data sets", _seams, orders_epochs=True)
