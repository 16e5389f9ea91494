"""One call of sd-scripts' own loop over images, with a cache of this package under it.

For the time of the call, some methods of sd-scripts' strategy *object* are replaced; its classes are not touched.
sd-scripts goes on deciding what is encoded in which batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.images.listing import file_key
from kohya_bucket.latents.architectures import Architecture
from kohya_bucket.latents.fingerprint import Reason, Stale
from kohya_bucket.sdscripts.caching.extra_sizes import SizedPath
from kohya_bucket.sdscripts.caching.item import CacheItem

__all__ = ["CachingSession", "forget_wishes"]

Size = tuple[int, int]

Wishes = dict[tuple[str, Size], tuple[bool, bool]]  # by file and bucket: (flipped, mask)

# by strategy, of which sd-scripts has one in each run: what each of its datasets wanted so far
_wishes: WeakKeyDictionary[Any, list[tuple[ref[Any], Wishes]]] = WeakKeyDictionary()


@dataclass
class CachingSession:
    """One caching call: what each cache path stands for, and why some are made again.

    Attributes:
        items: by cache path and bucket.
        sizes: bucket by cache path and the height and width of its latents.
        paths: cache path by image, and by size where that is not the image's own.
        shared: what data sets before this one want of an item that is theirs too, by cache path and bucket.
        reasons: why an image is encoded again.
    """

    dataset: Any
    strategy: Any
    arch: Architecture
    options: AdapterOptions
    vae: str
    items: dict[tuple[str, Size], CacheItem] = field(default_factory=dict)
    paths: dict[tuple[str, Size | None], str] = field(default_factory=dict)
    sizes: dict[tuple[str, tuple[int, ...]], Size] = field(default_factory=dict)
    shared: Wishes = field(default_factory=dict)
    reasons: dict[str, list[Reason]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        infos = list(self.dataset.image_data.values())
        earlier = [wishes for dataset, wishes in _wishes.setdefault(self.strategy, []) if dataset() is not None]
        mine: Wishes = {}
        _wishes[self.strategy].append((ref(self.dataset), mine))
        for info, path in zip(infos, self.paths_of(infos), strict=True):
            subset = self.dataset.image_to_subset[info.image_key]
            self.paths[str(info.absolute_path), _variant_size(info.absolute_path)] = path
            bucket = tuple(info.bucket_reso)
            self.sizes[path, self.arch.shape(bucket)[-2:]] = bucket
            self.items[path, bucket] = item = CacheItem(
                image=str(info.absolute_path),
                bucket_reso=info.bucket_reso,
                original_size=tuple(info.image_size),
                flip=bool(subset.flip_aug),
                alpha_mask=bool(subset.alpha_mask),
                resized_size=info.resized_size,
                vae=self.vae,
                interpolation=info.resize_interpolation,
                further=isinstance(info.absolute_path, SizedPath),
            )
            file = file_key(item.image), bucket
            mine[file] = item.flip, item.alpha_mask
            known = [wishes[file] for wishes in earlier if file in wishes]
            if known:
                self.shared[path, bucket] = any(flip for flip, _ in known), any(mask for _, mask in known)

    def paths_of(self, infos: list[Any]) -> list[str]:
        raise NotImplementedError

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What stands in for the strategy's methods."""
        return {
            "get_latents_npz_path": self._path,
            "is_disk_cached_latents_expected": self._is_expected,
            "save_latents_to_disk": self._save,
        }

    def finish(self) -> None:
        """After sd-scripts' loop."""

    def keep(self) -> None:
        """Where that loop ended half-way, by Ctrl-C or an error: put on disk what is encoded."""

    def _path(self, absolute_path: str, image_size: Any) -> str:
        return self.paths[str(absolute_path), _variant_size(absolute_path)]

    def exists(self, path: str, item: CacheItem) -> bool:
        """Whether there is anything on disk, good or not."""
        raise NotImplementedError

    def why_missing(self, path: str, item: CacheItem) -> list[Reason]:
        """Why an item must be encoded; none if it is on disk as it should be."""
        raise NotImplementedError

    def save(
        self, path: str, item: CacheItem, latents: Any, crop_ltrb: Any, flipped: Any, alpha_mask: Any, sized: bool
    ) -> None:
        """Put an item on disk, where it has keys with its size or plain ones: as sd-scripts' own `save` is told."""
        raise NotImplementedError

    def stored(self, path: str, item: CacheItem) -> tuple[Any, Any]:
        """Flipped latents and mask of an item that is on disk."""
        raise NotImplementedError

    def _is_expected(self, bucket_reso: Any, path: str, flip_aug: bool, alpha_mask: bool) -> bool:
        item = self.items[path, tuple(bucket_reso)]
        if self.strategy.skip_disk_cache_validity_check and self.exists(path, item):
            return True
        reasons = self.why_missing(path, item)
        if any(reason.kind is not Stale.MISSING for reason in reasons):
            self.reasons[item.image] = reasons
        return not reasons

    def _save(
        self,
        path: str,
        latents: Any,
        original_size: Any,
        crop_ltrb: Any,
        flipped: Any = None,
        alpha_mask: Any = None,
        key_reso_suffix: str = "",
    ) -> None:
        size = self.sizes[path, tuple(latents.shape[-2:])]
        item = self.items[path, size]
        flip, mask = self.shared.get((path, size), (False, False))
        kept = replace(item, flip=flip and flipped is None, alpha_mask=mask and alpha_mask is None)
        if (kept.flip or kept.alpha_mask) and not self.why_missing(path, kept):
            stored_flipped, stored_mask = self.stored(path, item)
            flipped = stored_flipped if kept.flip else flipped
            alpha_mask = stored_mask if kept.alpha_mask else alpha_mask
            item = replace(item, flip=flipped is not None, alpha_mask=alpha_mask is not None)
        self.save(path, item, latents, crop_ltrb, flipped, alpha_mask, bool(key_reso_suffix))


def _variant_size(path: str) -> Size | None:
    return path.bucket if isinstance(path, SizedPath) else None


def forget_wishes() -> None:
    """Let go of what data sets wanted, of which there is a row for each image, once all have cached."""
    _wishes.clear()
