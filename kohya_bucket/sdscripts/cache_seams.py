"""The places where sd-scripts caches: latents, by strategies (since 0.10) or without (until 0.10), and text outputs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from kohya_bucket.adapter.door import Owners, Place, Seam, Subject, where
from kohya_bucket.adapter.shapes import (
    Behaves,
    Offers,
    Takes,
    TakesAmong,
    Uses,
    checksum,
    parameters_of,
    sample_picture,
)
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.resize import INTERPOLATIONS, resize_and_crop
from kohya_bucket.sdscripts.caching import extra_sizes
from kohya_bucket.sdscripts.caching import text as text_caching
from kohya_bucket.sdscripts.caching.latents import cache_latents, cache_the_readable_plainly, check_one_size_each
from kohya_bucket.sdscripts.caching.session import architecture_of
from kohya_bucket.sdscripts.caching.text import is_ahead
from kohya_bucket.sdscripts.objects import CutSize, Dataset, DroppedRecord, Group, LatentsStrategy, TextStrategy


def has_strategies(owners: Owners) -> bool:
    """Whether latents are cached by strategies, one for each model family (since 0.10)."""
    return owners.has("LatentsCachingStrategy") or owners.has("BaseDataset.new_cache_latents")


def has_no_strategies(owners: Owners) -> bool:
    """Whether each data set caches latents by itself (until 0.9)."""
    return not has_strategies(owners)


def has_plain_caching(owners: Owners) -> bool:
    """Whether latents can be cached without strategies: until 0.11, when data sets got modules of their own."""
    return owners.home.__name__ == "library.train_util"


def _cache_latents(
    place: Place, self: Dataset, vae: Any, vae_batch_size: int = 1, cache_to_disk: bool = False, **more: Any
) -> None:
    with extra_sizes.caching_all_sizes(self, to_disk=cache_to_disk, by_strategy=False):
        _refuse_unseen_crops(place, unseen=cache_to_disk)
        run = functools.partial(place.original, self, vae, vae_batch_size, cache_to_disk, **more)
        cache_the_readable_plainly(self, run, place.door.options())


def _cache_group(
    place: Place, self: Group, vae: Any, vae_batch_size: int = 1, cache_to_disk: bool = False, **more: Any
) -> None:
    if cache_to_disk:
        check_one_size_each(self.datasets)
    place.original(self, vae, vae_batch_size, cache_to_disk, **more)


def _new_cache_latents(place: Place, self: Dataset, model: Any, accelerator: Any) -> None:
    if is_ahead():
        return
    strategy: LatentsStrategy | None = place.door.owners.named("LatentsCachingStrategy").get_strategy()
    to_disk = bool(strategy is not None and strategy.cache_to_disk)
    known = strategy is not None and architecture_of(strategy.cache_suffix) is not None
    with extra_sizes.caching_all_sizes(self, to_disk=to_disk, by_strategy=known):
        _refuse_unseen_crops(place, unseen=to_disk and not known)
        cache_latents(self, place.original, strategy, model, accelerator, place.door.options())


def _refuse_unseen_crops(place: Place, *, unseen: bool) -> None:
    """Raise `ConfigError` where a focus is set, and caches on disk would not be made again when it moves."""
    if unseen and place.door.options().focus:
        raise ConfigError(
            "[kohya_bucket] focus is set, but this way of caching does not notice when it moves: leave "
            "--cache_latents_to_disk out (--cache_latents alone keeps them in memory), or leave focus out"
        )


def _pixels(theirs: Any) -> Iterator[tuple[str, ...]]:
    """A picture by each filter, smaller and larger; without OpenCV sd-scripts' own filters are others."""
    picture = sample_picture()
    chosen = "resize_interpolation" in parameters_of(theirs)
    for resized, bucket in (((42, 28), (40, 28)), ((90, 60), (90, 48)), ((60, 40), (48, 40)), ((60, 41), (48, 40))):
        by_name = INTERPOLATIONS[2:] if chosen else ()
        answers = {name: theirs(False, picture, bucket, resized, name)[0] for name in by_name}
        answers["auto" if chosen else "auto-0.9"] = theirs(False, picture, bucket, resized)[0]
        for name, answer in answers.items():
            expected = resize_and_crop(picture, resized, bucket, name)
            yield f"60x40 to {resized} by {name}", *map(checksum, (answer, expected))


def _trim(
    place: Place, random_crop: bool, image: Any, reso: Any, resized_size: Any, *args: Any, **more: Any
) -> tuple[Any, Any, Any]:
    if not isinstance(resized_size, CutSize):
        return place.original(random_crop, image, reso, resized_size, *args, **more)  # type: ignore[no-any-return]
    resized, original_size, _ = place.original(False, image, resized_size, resized_size, *args, **more)
    (left, top), (width, height) = resized_size.crop, reso
    return resized[top : top + height, left : left + width], original_size, resized_size.crop_ltrb(reso)


_CALLED = ("get_strategy", "get_latents_npz_path", "is_disk_cached_latents_expected", "cache_batch_latents")
_ARRAYS = ("npz_path", "latents_tensor", "original_size", "crop_ltrb", "flipped_latents_tensor", "alpha_mask")


_STRATEGY = "LatentsCachingStrategy"

CACHING = Subject(
    "caching",
    "latents are cached by sd-scripts' own code",
    (
        Seam(
            "trim_and_resize_if_required",
            (TakesAmong("random_crop", "image", "reso", "resized_size"), Behaves(_pixels)),
            _trim,
        ),
        *where(
            has_plain_caching,
            Seam("BaseDataset.cache_latents", (Uses("image_data", "latents_npz", "bucket_reso"),), _cache_latents),
            Seam("DatasetGroup.cache_latents", (Uses("datasets"),), _cache_group),
            Seam("BaseDataset.set_caching_mode", (Takes("mode"), Uses("caching_mode"))),
        ),
        *where(
            has_strategies,
            Seam(
                "BaseDataset.new_cache_latents",
                (Uses("image_data", "image_to_subset", "image", "latents_npz", "bucket_reso", *_CALLED),),
                _new_cache_latents,
            ),
            Seam(_STRATEGY, (Offers(LatentsStrategy),)),
            Seam(f"{_STRATEGY}.get_strategy", (Takes("cls"),)),
            Seam(f"{_STRATEGY}.get_latents_npz_path", (Takes("absolute_path", "image_size"),)),
            Seam(
                f"{_STRATEGY}.is_disk_cached_latents_expected",
                (Takes("bucket_reso", "npz_path", "flip_aug", "alpha_mask"),),
            ),
            Seam(f"{_STRATEGY}.save_latents_to_disk", (Takes(*_ARRAYS, "key_reso_suffix"),)),
            Seam(f"{_STRATEGY}.load_latents_from_disk", (Takes("npz_path", "bucket_reso"),)),
        ),
    ),
)


# Outputs of text encoders in caches.


_CACHING, _BESIDE = "TextEncoderOutputsCachingStrategy", ("TokenizeStrategy", "TextEncodingStrategy")


def _new_cache_text_encoder_outputs(place: Place, self: Dataset, models: Any, accelerator: Any) -> None:
    named = place.door.owners.named
    strategies = text_caching.Strategies(*(named(name).get_strategy() for name in (_CACHING, *_BESIDE)))
    text_caching.cache_text_outputs(self, place.original, strategies, models, accelerator, place.door.options())


def _keeps_dropout(owners: Owners) -> bool:
    """Whether a caption's dropout rate is saved with the outputs (since 0.10.1), by some model families."""
    cacheable = owners.find("BaseDataset.is_text_encoder_output_cacheable")[2]
    return callable(cacheable) and "cache_supports_dropout" in parameters_of(cacheable)


def _caches_texts(owners: Owners) -> bool:
    return has_strategies(owners) or owners.has(_CACHING)


TEXT_CACHING = Subject(
    "text-caching",
    "text-encoder outputs are cached by sd-scripts' own code",
    (
        *where(
            lambda owners: _caches_texts(owners) and _keeps_dropout(owners),
            Seam("ImageInfo", (Offers(DroppedRecord),)),
        ),
        *where(
            _caches_texts,
            Seam(
                "BaseDataset.new_cache_text_encoder_outputs",
                (Uses("image_data", "get_outputs_npz_path", "text_encoder_outputs_npz"),),
                _new_cache_text_encoder_outputs,
            ),
            Seam(_CACHING, (Offers(TextStrategy),)),
            *(Seam(f"{kind}.get_strategy", (Takes("cls"),)) for kind in (_CACHING, *_BESIDE)),
            Seam(f"{_CACHING}.get_outputs_npz_path", (Takes("image_abs_path"),)),
            Seam(f"{_CACHING}.is_disk_cached_outputs_expected", (Takes("npz_path"),)),
            Seam(f"{_CACHING}.load_outputs_npz", (Takes("npz_path"),)),
        ),
    ),
)
