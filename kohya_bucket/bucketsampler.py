"""The names and arguments of the package bucketsampler: `import kohya_bucket.bucketsampler as bucketsampler`.

What is the same in both is this package's own. What is called or set otherwise there is adapted here, and nowhere else;
docs/coming-from.md says what behaves differently.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from kohya_bucket import buckets, images
from kohya_bucket._version import __version__
from kohya_bucket.buckets import (
    AutoBuckets,
    Bucket,
    BucketSet,
    bucket_set_to_toml,
    generate_buckets,
    list_presets,
    set_files,
)
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.rule import InSet, SetRule
from kohya_bucket.buckets.rules.auto import AutoBucketResult
from kohya_bucket.buckets.rules.fixed import check_bucket_set
from kohya_bucket.buckets.sizes import FloatArray, IntArray, readable_sizes
from kohya_bucket.errors import BucketSettingsError, ConfigError, InvalidBucketError, KohyaBucketError
from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.datasets.images import BucketedDataset
    from kohya_bucket.datasets.items import BucketResize
    from kohya_bucket.datasets.latents import BucketedLatentDataset
    from kohya_bucket.datasets.sampler import BucketBatchSampler
    from kohya_bucket.latents import PrecomputeReport, VAEEncoder

__all__ = [
    "AspectRatioSummary",
    "AutoBucketResult",
    "AutoBuckets",
    "Bucket",
    "BucketBatchSampler",
    "BucketResize",
    "BucketSamplerError",
    "BucketSet",
    "BucketedDataset",
    "BucketedLatentDataset",
    "CropLossSummary",
    "DuplicateBucketError",
    "EmptyBucketSetError",
    "FixedBuckets",
    "ImageTooSmallError",
    "InvalidBucketError",
    "InvalidPresetError",
    "MetadataCache",
    "MetadataRow",
    "PresetNotFoundError",
    "Strategy",
    "VAEEncoder",
    "__version__",
    "aspect_ratio_summary",
    "assign_many",
    "assign_many_indices",
    "best_bucket",
    "bucket_distribution",
    "bucket_set_to_toml",
    "build_metadata_cache",
    "crop_loss",
    "crop_loss_summary",
    "generate_buckets",
    "list_presets",
    "load_from_json",
    "load_from_toml",
    "load_preset",
    "log_ar_distance",
    "precompute_latents",
    "resize_to_bucket_dims",
    "underutilized_buckets",
]

BucketSamplerError = KohyaBucketError
EmptyBucketSetError = DuplicateBucketError = InvalidBucketError


class FixedBuckets(buckets.FixedBuckets):
    """Nearest bucket of a fixed set, in log aspect."""

    def assign_many_indices(self, sizes: npt.ArrayLike) -> Any:
        return super().assign_many_indices(sizes).astype(np.int64)


def best_bucket(width: int, height: int, bucket_set: BucketSet) -> Bucket:
    """The bucket that `FixedBuckets(bucket_set)` gives one image: the nearest in log aspect.

    Raises:
        ValueError: a side below 1, or an image that cannot be scaled to any bucket.
    """
    return _rule(check_bucket_set(bucket_set)).assign(width, height)


def assign_many_indices(dims: Any, bucket_set: BucketSet) -> npt.NDArray[np.int64]:
    """[N] positions in `bucket_set`, for [N, 2] (width, height) in pixels. Errors as `best_bucket`."""
    rule, sizes = _rule(check_bucket_set(bucket_set)), readable_sizes(dims)
    index = rule.assign_many_indices(sizes)
    if index.min(initial=0) < 0:
        rule.assign(*sizes[int(index.argmin())].tolist())  # says why there is none
    return np.asarray(index)


def assign_many(dims: Iterable[Any], bucket_set: BucketSet) -> list[Bucket]:
    """The bucket of each image, for N pairs (width, height). Errors as `assign_many_indices`."""
    sizes = dims if hasattr(dims, "__len__") else list(dims)
    return [bucket_set[k] for k in assign_many_indices(sizes, bucket_set).tolist()]


@overload
def crop_loss(width: int, height: int, bucket: Bucket) -> float: ...
@overload
def crop_loss(width: IntArray, height: IntArray, bucket: Bucket) -> FloatArray: ...
def crop_loss(width: int | IntArray, height: int | IntArray, bucket: Bucket) -> float | FloatArray:
    """Share of an image that is cut off when it is scaled to cover `bucket`, in [0, 1); sides are numbers or [N].

    It follows from the two aspects; `crop_loss` of a `Placement` is that of the image resized to whole pixels.

    Raises:
        BucketSettingsError: a side below 1.
    """
    sizes = readable_sizes(np.stack([np.atleast_1d(width), np.atleast_1d(height)], axis=1))
    loss = aspect_loss(np.float64(bucket.aspect_ratio), sizes[:, 0] / sizes[:, 1])
    return loss if np.ndim(width) else float(loss[0])


@functools.lru_cache(maxsize=8)
def _rule(bucket_set: BucketSet) -> FixedBuckets:
    """Where buckets hand over takes a thousand times as long to find as one image's bucket."""
    return FixedBuckets(bucket_set)


@dataclass(frozen=True)
class AspectRatioSummary:
    """Aspects (width / height) of `count` images, and their natural logarithms; all NaN where there are none."""

    count: int
    mean_log_ar: float
    median_log_ar: float
    std_log_ar: float
    min_ar: float
    max_ar: float


def aspect_ratio_summary(dims: Any) -> AspectRatioSummary:
    """Of [N, 2] sizes (width, height).

    Raises:
        KohyaBucketError: another shape, or a side below 1.
    """
    sizes = readable_sizes(dims)
    aspects = sizes[:, 0] / sizes[:, 1]
    if not len(aspects):
        return AspectRatioSummary(0, *[math.nan] * 5)
    logs = np.log(aspects)
    numbers = logs.mean(), np.median(logs), logs.std(), aspects.min(), aspects.max()
    return AspectRatioSummary(len(aspects), *map(float, numbers))


@dataclass(frozen=True)
class CropLossSummary:
    """Shares of `count` images that are cut off, each in [0, 1); all NaN where there are none."""

    count: int
    mean: float
    median: float
    p95: float
    max: float


def crop_loss_summary(dims: Any, bucket_set: BucketSet) -> CropLossSummary:
    """Of [N, 2] sizes (width, height), each in the bucket that `FixedBuckets(bucket_set)` gives it.

    Raises:
        KohyaBucketError: another shape, a side below 1, or no bucket set.
    """
    sizes, index = readable_sizes(dims), assign_many_indices(dims, bucket_set)
    if not len(sizes):
        return CropLossSummary(0, *[math.nan] * 4)
    loss = aspect_loss(bucket_set.aspects[index], sizes[:, 0] / sizes[:, 1])
    return CropLossSummary(len(loss), *map(float, (loss.mean(), np.median(loss), np.percentile(loss, 95), loss.max())))


def bucket_distribution(dims: Any, bucket_set: BucketSet) -> dict[Bucket, int]:
    """Images of each bucket, in the set's order; those without any are in it, too. Errors as `crop_loss_summary`."""
    counts = np.bincount(assign_many_indices(dims, bucket_set), minlength=len(bucket_set))
    return dict(zip(bucket_set, counts.tolist(), strict=True))


def underutilized_buckets(dims: Any, bucket_set: BucketSet, *, min_count: int) -> list[Bucket]:
    """Buckets with fewer than `min_count` images, empty ones included, in the set's order.

    Raises:
        BucketSettingsError: `min_count` is below 0; others as `crop_loss_summary`.
    """
    if min_count < 0:
        raise BucketSettingsError(f"min_count is {min_count}, but must be 0 or more")
    return [bucket for bucket, count in bucket_distribution(dims, bucket_set).items() if count < min_count]


class ImageTooSmallError(KohyaBucketError):
    """An image is smaller than its bucket: never raised here, since such an image is enlarged."""

    def __init__(
        self, *, path: Path | str | None, actual: tuple[int, int], required: tuple[int, int], suggestion: str = ""
    ) -> None:
        self.path = None if path is None else Path(path)
        self.actual, self.required, self.suggestion = actual, required, suggestion
        where = "" if path is None else f" at {path}"
        sizes = "{}x{}, but its bucket {}x{}".format(*actual, *required)
        super().__init__(f"image{where} is {sizes}. {suggestion}".rstrip())


class PresetNotFoundError(ConfigError, KeyError):
    """No preset is called `name`; `available` are those that exist."""

    def __init__(self, *, name: str, available: Iterable[str]) -> None:
        self.name, self.available = name, sorted(available)
        super().__init__(f"preset is {name!r}, but must be one of {', '.join(self.available)}")

    __str__ = ConfigError.__str__


class InvalidPresetError(ConfigError):
    """A file, `source`, that holds no bucket set; `reason` says why."""

    def __init__(self, *, source: str | Path, reason: str) -> None:
        self.source, self.reason = source, reason
        super().__init__(reason if str(source) in reason else f"{source}: {reason}")


def load_preset(name: str) -> BucketSet:
    """The bucket set of a bundled preset. `PresetNotFoundError` where there is none."""
    try:
        return set_files.load_preset(name)
    except ConfigError as error:
        raise PresetNotFoundError(name=name, available=list_presets()) from error


def load_from_toml(path: str | Path) -> BucketSet:
    """A bucket set from a TOML file. `InvalidPresetError` where it holds none."""
    try:
        return set_files.load_from_toml(path)
    except KohyaBucketError as error:
        raise InvalidPresetError(source=path, reason=str(error)) from error


def load_from_json(path: str | Path) -> BucketSet:
    """A bucket set from a JSON file. `InvalidPresetError` where it holds none."""
    try:
        return set_files.load_from_json(path)
    except KohyaBucketError as error:
        raise InvalidPresetError(source=path, reason=str(error)) from error


def log_ar_distance(width: int, height: int, bucket: Bucket) -> float:
    """How far the aspects of an image and a bucket are apart, as a difference of natural logarithms."""
    _check_size(width, height)
    return abs(math.log(width / height) - bucket.log_aspect_ratio)


def resize_to_bucket_dims(width: int, height: int, bucket: Bucket) -> tuple[tuple[int, int], tuple[int, int]]:
    """(size after scaling, left and top of the crop) by which an image of this size comes into a bucket."""
    _check_size(width, height)
    placement = FixedBuckets(BucketSet((bucket,))).place([(width, height)])
    right, down = placement.resized_sizes[0].tolist()
    return (right, down), ((right - bucket.width) // 2, (down - bucket.height) // 2)


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise KohyaBucketError(f"an image of {width}x{height} has no pixels: both sides must be 1 or more")


@runtime_checkable
class Strategy(Protocol):
    """What decides buckets: every rule with a set of its own, or any class with these three."""

    @property
    def bucket_set(self) -> BucketSet:
        """All buckets that it chooses from."""

    def assign(self, width: int, height: int) -> Bucket:
        """Bucket of one image."""

    def assign_many_indices(self, dims: Any) -> npt.NDArray[Any]:
        """[N] positions in `bucket_set`."""


class _StrategyBuckets(SetRule):
    """A strategy of somebody's own as a rule. It is asked for images that can be read only."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy.bucket_set)
        self._strategy = strategy

    def _assign(self, sizes: IntArray) -> InSet:
        index = np.full(len(sizes), -1, dtype=np.int32)
        readable = sizes.min(axis=1, initial=1) > 0
        index[readable] = self._strategy.assign_many_indices(sizes[readable])
        return InSet(sizes, self.bucket_set, index)


class MetadataRow(images.MetadataRow):
    """One file of a `MetadataCache`."""

    def __new__(cls, path: str, width: int, height: int, mtime_ns: int, size_bytes: int, *more: Any) -> MetadataRow:
        return super().__new__(cls, path, width, height, mtime_ns, size_bytes, *more)

    @property
    def size_bytes(self) -> int:
        return self.bytes


class MetadataCache(images.MetadataCache):
    """Sizes of files, kept; of rows, or as `load` reads it. Unlike `kohya_bucket.images.MetadataCache` it changes."""

    def __init__(self, rows: Iterable[MetadataRow] | None = None, **columns: Any) -> None:
        super().__init__(**columns)
        if rows is not None:
            self.upsert(*rows)

    def upsert(self, *rows: MetadataRow) -> None:
        """Add rows to this cache, or replace those of the same path."""
        self.__dict__.update(vars(self.with_rows(*rows)))

    def upsert_many(self, rows: Iterable[MetadataRow]) -> None:
        """Add or replace many rows at once."""
        self.upsert(*rows)

    def _row_at(self, i: int) -> MetadataRow:
        return MetadataRow(*super()._row_at(i))


def build_metadata_cache(
    paths: Iterable[str | os.PathLike[str]], *, existing: MetadataCache | None = None, num_workers: int = 8
) -> MetadataCache:
    """A cache of exactly these files; unchanged rows of `existing` are not read again."""
    cache = MetadataCache() if existing is None else existing
    return cast("MetadataCache", cache.refresh(paths, workers=max(num_workers, 1)))


def dims_from_cache(paths: Sequence[str | os.PathLike[str]], cache: images.MetadataCache) -> npt.NDArray[np.int64]:
    """[N, 2] (width, height) of these files. `KeyError` where one is not in the cache."""
    dims = [cache.get_dim(path) for path in paths]
    if None in dims:
        raise KeyError(f"cache miss for {paths[dims.index(None)]}: build_metadata_cache(paths, existing=cache)")
    return np.array(dims, dtype=np.int64).reshape(-1, 2)


# The classes that need torch, as that package calls and sets them.


def _image_dataset() -> type:
    from kohya_bucket.datasets import images as datasets

    like_there: dict[str, Any] = {"interpolation": "bicubic", "pixel_range": (0, 1)}

    def as_rule(strategy: Any) -> Any:
        has_no_place = isinstance(strategy, Strategy) and not hasattr(strategy, "place")
        return _StrategyBuckets(strategy) if has_no_place else strategy

    class BucketedDataset(datasets.BucketedDataset):
        """Images in [0, 1], each with the bucket that a strategy gives it; without captions, items have none."""

        _captioned = False

        def __init__(
            self, paths: Iterable[str | os.PathLike[str]], strategy: Any, *, captions: Sequence[str] | None = None,
            transform: Any = None, num_workers: int = 8, metadata_cache: Any = None,
        ) -> None:  # fmt: skip
            super().__init__(
                paths, as_rule(strategy), captions=captions, transform=transform, num_workers=num_workers,
                metadata_cache=metadata_cache, **like_there,
            )  # fmt: skip
            self._captioned = captions is not None

        @classmethod
        def from_hf(  # type: ignore[override]
            cls, hf_dataset: Any, strategy: Any, *, image_column: str = "image", caption_column: str | None = None,
            transform: Any = None, num_workers: int = 8,  # noqa: ARG003 (headers of a table are read without)
        ) -> BucketedDataset:  # fmt: skip
            dataset = super().from_hf(
                hf_dataset, as_rule(strategy), image_column=image_column, caption_column=caption_column,
                transform=transform, **like_there,
            )  # fmt: skip
            dataset._captioned = caption_column is not None
            return dataset

        def _place(self, *arguments: Any) -> None:
            super()._place(*arguments)
            self.bucket_indices = self.bucket_indices.astype(np.int64)

        @property
        def strategy(self) -> Any:
            return self.rule

        @property
        def paths(self) -> list[Path]:
            return [Path(self.source.name(i)) for i in range(len(self))]

        def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
            items = super().__getitems__(indices)
            if not self._captioned:
                for item in items:
                    del item["caption"]
            return items

    return BucketedDataset


def _batch_sampler() -> type:
    from kohya_bucket.datasets import sampler
    from kohya_bucket.errors import PlanError

    class BucketBatchSampler(sampler.BucketBatchSampler):
        """Batches of one bucket; what does not fill one is left out, in each epoch another part."""

        def __init__(
            self, bucket_indices: Any, batch_size: int, *, shuffle: bool = True, drop_last: bool = True,
            num_replicas: int = 1, rank: int = 0, seed: int = 0,
        ) -> None:  # fmt: skip
            raw = np.asarray(getattr(bucket_indices, "bucket_indices", bucket_indices), dtype=np.int64)
            if raw.ndim != 1 or raw.min(initial=0) < 0:
                raise PlanError(f"bucket_indices has the shape {list(raw.shape)}, but must be [N] numbers from 0 on")
            super().__init__(
                bucket_indices, batch_size, shuffle, drop_last, num_replicas=num_replicas, rank=rank, seed=seed
            )
            self.bucket_indices, self.num_replicas, self.rank = raw, num_replicas, rank

    return BucketBatchSampler


def _resize() -> type:
    from PIL import Image

    from kohya_bucket.datasets import items

    class BucketResize(items.BucketResize):
        """Scales an image until it covers a bucket, and cuts the bucket out of its middle: [3, H, W] in [0, 1]."""

        def __init__(self, bucket: Bucket, *, resample: Image.Resampling = Image.Resampling.BICUBIC) -> None:
            super().__init__(bucket, interpolation=resample.name.lower(), pixel_range=(0, 1))
            self.resample = resample

    return BucketResize


def _latent_dataset() -> type:
    import torch

    from kohya_bucket.datasets import latents

    class BucketedLatentDataset(latents.BucketedLatentDataset):
        """Stored latents, each handed out on the device `map_location`."""

        def __init__(self, path: str | os.PathLike[str], *, map_location: Any = "cpu") -> None:
            super().__init__(path)
            self._device = torch.device(map_location)
            self.bucket_indices = self.bucket_indices.astype(np.int64)

        def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
            items = super().__getitems__(indices)
            if self._device.type != "cpu":
                for item in items:
                    item["latents"] = item["latents"].to(self._device)
            return items

    return BucketedLatentDataset


class _Normalizing:
    """A VAE that is given what `normalize` makes of pixels in 0..1."""

    def __init__(self, vae: VAEEncoder, normalize: Callable[[Any], Any]) -> None:
        from kohya_bucket.latents.vae.encoder import encoder_hash

        self._vae, self._normalize = vae, normalize
        self.downsample_factor, self.latent_channels = vae.downsample_factor, vae.latent_channels
        self.scale_factor = vae.scale_factor
        name = getattr(normalize, "__qualname__", type(normalize).__qualname__)
        self.fingerprint = f"{encoder_hash(vae)} of pixels by {name}"

    def encode(self, pixels: Any) -> Any:
        return self._vae.encode(self._normalize((pixels + 1) / 2))


def precompute_latents(
    dataset: BucketedDataset, encoder: VAEEncoder, output_dir: str | Path, *, batch_size: int = 8,
    dtype: Any = "float32", pixel_normalize: Callable[[Any], Any] | None = None,
    progress_callback: Callable[[int, int], None] | None = None,
) -> PrecomputeReport:  # fmt: skip
    """Encode every image that is not in `output_dir` as it should be, as `kohya_bucket.precompute_latents` does.

    `pixel_normalize` makes what the encoder takes of pixels in 0..1, by default `2x - 1`. What is stored is told apart
    by the encoder and by the name of this function.
    """
    from kohya_bucket.latents import precompute_latents

    vae = encoder if pixel_normalize is None else _Normalizing(encoder, pixel_normalize)
    return precompute_latents(
        dataset, vae, output_dir, batch_size=batch_size, dtype=dtype, progress_callback=progress_callback
    )


_FROM_ELSEWHERE = importer(__name__, {"kohya_bucket.latents": ["VAEEncoder"]})


_MAKERS: dict[str, Callable[[], type]] = {
    "BucketedDataset": _image_dataset, "BucketBatchSampler": _batch_sampler, "BucketResize": _resize,
    "BucketedLatentDataset": _latent_dataset,
}  # fmt: skip


@functools.cache
def _class_named(name: str) -> type:
    made = _MAKERS[name]()
    made.__qualname__ = name  # where worker processes find it again
    return made


def __getattr__(name: str) -> Any:
    if name in _MAKERS:
        return _class_named(name)
    return _FROM_ELSEWHERE(name)
