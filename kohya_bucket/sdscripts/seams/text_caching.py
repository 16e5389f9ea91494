"""Outputs of text encoders in caches."""

from __future__ import annotations

from typing import Any

from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.adapter.seams import Owners, Place, Seam, Subject
from kohya_bucket.adapter.shapes import Offers, Takes, Uses, parameters_of
from kohya_bucket.sdscripts.caching import text as text_caching
from kohya_bucket.sdscripts.objects import Dataset, DroppedRecord, TextStrategy
from kohya_bucket.sdscripts.seams.objects import has_strategies

__all__ = ["TEXT_CACHING"]

_CACHING, _BESIDE = "TextEncoderOutputsCachingStrategy", ("TokenizeStrategy", "TextEncodingStrategy")


def _new_cache_text_encoder_outputs(place: Place, self: Dataset, models: Any, accelerator: Any) -> None:
    named = place.door.owners.named
    strategies = text_caching.Strategies(*(named(name).get_strategy() for name in (_CACHING, *_BESIDE)))
    with exit_with_message():
        text_caching.cache_text_outputs(self, place.original, strategies, models, accelerator, place.door.options())


def _keeps_dropout(owners: Owners) -> bool:
    """Whether a caption's dropout rate is saved with the outputs (since 0.10.1), by some model families."""
    cacheable = owners.find("BaseDataset.is_text_encoder_output_cacheable")[2]
    return callable(cacheable) and "cache_supports_dropout" in parameters_of(cacheable)


def _seams(owners: Owners) -> tuple[Seam, ...]:
    strategy = _CACHING
    if not has_strategies(owners) and not owners.has(strategy):
        return ()
    record = (Seam("ImageInfo", (Offers(DroppedRecord),)),) if _keeps_dropout(owners) else ()
    return (
        *record,
        Seam(
            "BaseDataset.new_cache_text_encoder_outputs",
            (Uses("image_data", "get_outputs_npz_path", "text_encoder_outputs_npz"),),
            _new_cache_text_encoder_outputs,
        ),
        Seam(strategy, (Offers(TextStrategy),)),
        *(Seam(f"{kind}.get_strategy", (Takes("cls"),)) for kind in (strategy, *_BESIDE)),
        Seam(f"{strategy}.get_outputs_npz_path", (Takes("image_abs_path"),)),
        Seam(f"{strategy}.is_disk_cached_outputs_expected", (Takes("npz_path"),)),
        Seam(f"{strategy}.load_outputs_npz", (Takes("npz_path"),)),
    )


TEXT_CACHING = Subject("text-caching", "text-encoder outputs are cached by sd-scripts' own code", _seams)
