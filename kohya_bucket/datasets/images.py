"""`BucketedDataset`: images with a bucket each, resized and cropped to it when they are asked for; and its loader."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.focus import focused
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.rule import BucketRule, check_rule
from kohya_bucket.buckets.sizes import FloatArray, as_pair
from kohya_bucket.checks import array_of, is_first_process
from kohya_bucket.datasets.items import (
    DatasetKeywords,
    ItemKeywords,
    ItemSettings,
    PixelRange,
    Transform,
    check_size,
    cover_size,
    register_bucket_collation,
)  # fmt: skip
from kohya_bucket.datasets.planned_index import bucket_of, item_number, spare_images
from kohya_bucket.datasets.sources import FileSource, ImageSource, checked_sizes
from kohya_bucket.errors import FileChangedError, KohyaBucketError, StorageError, UnreadableError
from kohya_bucket.images import IMAGE_EXTENSIONS, MetadataCache, list_images
from kohya_bucket.images.focus_files import read_focus, unfound
from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels import Pixels, explained
from kohya_bucket.texts import one_line

if TYPE_CHECKING:
    from typing_extensions import Unpack


_log = logging.getLogger(__name__)
_SHOWN = 3

register_bucket_collation()


def _focus_of(focus: Any, paths: Sequence[str]) -> FloatArray:
    """[N, 4] the focus of each image, from a file or checked."""
    if isinstance(focus, (str, os.PathLike)):
        boxes, missing = read_focus(os.fspath(focus), paths)
        if (warning := unfound(os.fspath(focus), boxes, missing)) and is_first_process():
            _log.warning("%s", warning)
        return boxes
    boxes = array_of("focus", focus, KohyaBucketError, np.float64)
    if boxes.shape != (len(paths), 4):
        raise KohyaBucketError(
            f"focus has the shape {boxes.shape}, but must be [{len(paths)}, 4]: left, top, right, bottom of each image"
        )
    good = (boxes >= 0).all(axis=1) & (boxes <= 1).all(axis=1) & (boxes[:, :2] <= boxes[:, 2:]).all(axis=1)
    wrong = np.flatnonzero(~good & ~np.isnan(boxes).all(axis=1))
    if len(wrong):
        i = int(wrong[0])
        raise KohyaBucketError(
            f"focus of {paths[i]} is {boxes[i].tolist()}, but must be left, top, right, bottom in shares from 0 to 1"
        )
    return boxes


class BucketedDataset(Dataset[dict[str, Any]]):
    """Images, each with the bucket that a rule gives it. Use with `BucketBatchSampler` and a plain `DataLoader`.

    Item i is a dict: `image` [3, H, W] float32 of its bucket's size; `bucket` (`Bucket`); `bucket_idx`, its position
    in `bucket_set`; `path`; `caption` ("" where there is none); `original_size` [2] int64 (width, height); `crop_ltrb`
    [4] float32, the crop conditioning for SDXL (`buckets/geometry.py`), also of a crop that a focus moves. Batched by
    torch's `default_collate`, images, numbers, original sizes and crops are stacked, and the rest are lists with one
    entry per sample.

    Images without a bucket (unreadable, or turned away by the rule) keep their number, have -1 in
    `bucket_indices`, and are never drawn by the sampler; a warning counts them and `failures` names them. That only the
    header of an image is sound turns out when it is read: it is named in the log and counted in `left_out`, and another
    image of its bucket, chosen by its number alone, is returned in its place.

    Args:
        paths: N image files.
        rule: the rule, such as `FixedBuckets(load_preset("sdxl"))` or `KohyaBuckets(1024)`.
        captions: N texts; or a file name ending such as ".txt" for captions in files beside the images.
        transform: called on the finished [3, H, W] tensor; must keep its shape equal within a bucket.
        metadata_cache: sizes of files that have not changed are taken from it instead of their headers.
        focus: what crops must keep: [N, 4] left, top, right, bottom of a rectangle in shares of each picture as it is
            trained, NaN where there is none; or a JSON Lines or Parquet file, or "beside" (`images/focus_files.py`).
        pixel_range: what `image` lies in: (-1, 1), or (0, 1).
        interpolation: "auto" (area down, Lanczos up) or one of
            `kohya_bucket.images.resize.INTERPOLATIONS`.
        on_bad_image: "leave_out", as said above, or "stop": an image whose pixels cannot be read is an error.
        obey_exif: turn images upright as their EXIF asks; trainers do not, so this is off.
        num_workers: at most this many threads or processes to read headers with; 0: none; None: as measured.
        progress: called as `progress(done, total)` while headers are read.

    Attributes:
        bucket_indices: [N] int32, position in `bucket_set`; -1 without a bucket.
        sizes: [N, 2] int32 pixels (width, height) of the images; (0, 0) where unreadable.
        resized_sizes: [N, 2] int32 pixels each image is scaled to before the crop.
        reasons: [N] uint8 values of `Reason`: why an image has no bucket.
        focus: [N, 4] what each crop keeps, in shares, NaN where an image has none; None: all crops are in the middle.

    Raises:
        KohyaBucketError: no paths, captions that do not match, an unknown interpolation, a focus that is not a
            rectangle, or no image that has a bucket.

    Examples:
        >>> dataset = BucketedDataset.from_folder("photos", KohyaBuckets.for_arch("sd"))
        >>> len(dataset), str(dataset.bucket_set[dataset.bucket_indices[0]])
        (6, '576x448')
        >>> item = dataset[0]
        >>> tuple(item["image"].shape), item["caption"]
        ((3, 448, 576), 'a photo')
    """

    focus: FloatArray | None = None

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        rule: BucketRule,
        *,
        captions: Sequence[str] | str | None = None,
        transform: Transform | None = None,
        metadata_cache: MetadataCache | None = None,
        focus: str | os.PathLike[str] | npt.ArrayLike | None = None,
        pixel_range: PixelRange = (-1, 1),
        interpolation: str = "auto",
        on_bad_image: str = "leave_out",
        obey_exif: bool = False,
        num_workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        # before the headers of a million files are read
        check_rule(rule)
        settings = ItemSettings(transform, pixel_range, interpolation, on_bad_image)
        source = FileSource(
            paths, captions=captions, metadata_cache=metadata_cache, obey_exif=obey_exif,
            workers=num_workers if num_workers != 0 else 1, progress=progress,
        )  # fmt: skip
        self.focus = None if focus is None else _focus_of(focus, [source.name(i) for i in range(len(source))])
        self._place(source, rule, settings)

    @classmethod
    def from_source(cls, source: ImageSource, rule: BucketRule, **settings: Unpack[ItemKeywords]) -> BucketedDataset:
        """A dataset over anything that has the five methods of `ImageSource`. Settings are as for the class.

        Raises:
            KohyaBucketError: `source` lacks one of them, or has another number of sizes than images.
        """
        dataset = cls.__new__(cls)
        check_rule(rule)
        dataset._place(source, rule, ItemSettings(**settings))
        return dataset

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        rule: BucketRule,
        *,
        recursive: bool = True,
        extensions: Collection[str] = IMAGE_EXTENSIONS,
        captions: Sequence[str] | str | None = ".txt",
        **options: Unpack[DatasetKeywords],
    ) -> BucketedDataset:
        """All images of a folder (or pattern, or list file; see `list_images`), sorted by path.

        Captions are read from the `.txt` file beside each image; "" where there is none, and a warning counts these.
        """
        paths = list_images(folder, recursive=recursive, extensions=extensions)
        if not paths:
            raise KohyaBucketError(f"{folder}: no images found there")
        return cls(paths, rule, captions=captions, **options)

    @classmethod
    def from_hf(
        cls, hf_dataset: Any, rule: BucketRule, *, image_column: str = "image",
        caption_column: str | None = None, obey_exif: bool = True, **settings: Unpack[ItemKeywords],
    ) -> BucketedDataset:  # fmt: skip
        """A map-style Hugging Face `datasets.Dataset` with a column of images; settings are as for the class.

        The column may hold encoded images (`datasets.Image()`, decoded or not; only headers are read here, and they
        are turned upright, as `datasets` does), Pillow images, or arrays and tensors [C, H, W] or [H, W, C].

        Raises:
            KohyaBucketError: a column is missing, or the dataset is a stream.
        """
        from kohya_bucket.datasets.huggingface import HuggingFaceSource

        source = HuggingFaceSource(
            hf_dataset, image_column=image_column, caption_column=caption_column, obey_exif=obey_exif
        )
        return cls.from_source(source, rule, **settings)

    def _place(self, source: ImageSource, rule: BucketRule, settings: ItemSettings) -> None:
        self.source = source
        self.rule = rule
        self.settings = settings
        self.sizes, unreadable = checked_sizes(source)
        self._unreadable = {i: reason for i, _, reason in unreadable}
        placement = focused(rule.place(self.sizes), self.focus)
        if placement.bucket_set is None or not placement.placed.any():
            examples = "; ".join(f"{name}: {reason}" for _, name, reason in unreadable[:_SHOWN])
            raise KohyaBucketError(f"none of {len(source)} images has a bucket{examples and f' ({examples})'}")
        self.bucket_set: BucketSet = placement.bucket_set
        # Of a placement only what cannot be computed again from it stays: 21 bytes per image instead of 69.
        self.bucket_indices: npt.NDArray[np.int32] = placement.bucket_index
        self.resized_sizes: npt.NDArray[np.int32] = placement.resized_sizes
        self.reasons: npt.NDArray[np.uint8] = placement.reasons
        # In shared memory: workers count in it, too.
        self._left_out = torch.zeros(len(source), dtype=torch.int32).share_memory_()
        if (lost := self.failures) and is_first_process():
            shown = "".join(f"\n  {one_line(f'{name}: {reason}')}" for _, name, reason in lost[:_SHOWN])
            more = f"\n  and {len(lost) - _SHOWN} more, see .failures" if len(lost) > _SHOWN else ""
            _log.warning("%d of %d images have no bucket and are not trained:%s", len(lost), len(self), shown + more)

    @property
    def failures(self) -> list[tuple[int, str, str]]:
        """(index, path, reason) of every image that has no bucket."""
        without = np.flatnonzero(self.bucket_indices < 0).tolist()
        return [(i, self.source.name(i), self._why_without(i)) for i in without]

    @property
    def image_names(self) -> Sequence[str]:
        """[N] what tells images apart on all ranks and in all runs: the names, or what the source has for it."""
        own: Sequence[str] | None = getattr(self.source, "image_names", None)
        return [self.source.name(i) for i in range(len(self))] if own is None else own

    def _why_without(self, number: int) -> str:
        return self._unreadable.get(number) or Reason(int(self.reasons[number])).text

    def __len__(self) -> int:
        return len(self.bucket_indices)

    @property
    def left_out(self) -> npt.NDArray[np.int32]:
        """[N] how often each image could not be read when it was to be trained, so that another one was; a copy."""
        counts: npt.NDArray[np.int32] = self._left_out.numpy().copy()
        return counts

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Item `index`, see the class. A `PlannedIndex` is fitted to the bucket that it asks for.

        Raises:
            KohyaBucketError: an image without a bucket; or one whose pixels cannot be read, with `on_bad_image="stop"`
                or where no other image of its bucket can be.
            UnreadableError, StorageError: nothing can be read now where it lies: its folder, share or storage is away.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The items of a batch: what a loader asks for. Images that stand for others do not belong to the batch."""
        numbers = [item_number(index, len(self)) for index in indices]
        in_batch = set(numbers)
        return [self._readable(n, bucket_of(i, -1), in_batch) for n, i in zip(numbers, indices, strict=True)]

    def _readable(self, number: int, at: int, in_batch: set[int]) -> dict[str, Any]:
        """Item `number` in bucket `at` (-1: its own), or another of that bucket that is not `in_batch`."""
        own_bucket = int(self.bucket_indices[number])
        if own_bucket < 0:
            raise KohyaBucketError(f"{self.source.name(number)} has no bucket: {self._why_without(number)}")
        at = own_bucket if at < 0 else at
        first: KohyaBucketError | None = None
        for other in self._candidates(number, at, in_batch):
            try:
                pixels = self._pixels(other)
            except (StorageError, FileChangedError, UnreadableError):  # nor can others, and all would be left out
                raise
            except KohyaBucketError as error:
                if self.settings.on_bad_image == "stop":
                    raise
                first = first or error
                continue
            item = self._item(other, at, pixels)
            if first is not None:
                in_batch.add(other)
                if not self._left_out[number]:
                    warning = f"{first}: it is left out, and {self.source.name(other)} trains in its place"
                    _log.warning("%s", one_line(warning))
                self._left_out[number] += 1
            return item
        raise KohyaBucketError(f"{first}; no other image of its bucket can be read, to train in its place") from first

    def _candidates(self, number: int, at: int, in_batch: set[int]) -> Iterator[int]:
        yield number
        yield from spare_images(np.flatnonzero(self.bucket_indices == at), in_batch, number)

    def _pixels(self, number: int) -> Pixels:
        pixels = self.source.pixels(number)
        try:
            check_size(pixels, as_pair(self.sizes[number]))
        except UnreadableImageError as error:
            raise explained(self.source.name(number), error) from error
        return pixels

    def _item(self, number: int, at: int, pixels: Pixels) -> dict[str, Any]:
        resized = as_pair(self.resized_sizes[number])
        if at != self.bucket_indices[number]:
            resized = cover_size(as_pair(self.sizes[number]), self.bucket_set[at])
        name, caption = self.source.name(number), self.source.caption(number)
        focus = None if self.focus is None else self.focus[number : number + 1]
        item = self.settings.item(pixels, self.bucket_set[at], resized, name, caption, focus)
        item["bucket_idx"] = at
        return item

    def __repr__(self) -> str:
        return f"<{type(self).__name__} n={len(self)} n_buckets={len(self.bucket_set)} rule={self.rule!r}>"


def bucketed_loader(
    source: Any,
    rule: BucketRule | None = None,
    batch_size: npt.ArrayLike | None = 1,
    *,
    accelerator: Any = None,
    num_workers: int = 0,
    caption_column: str | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A `DataLoader` of batches of one bucket each, shuffled anew in every epoch, on any number of processes.

    Its attribute `bucket_sampler` is the `BucketBatchSampler`: `plan()` of the epoch, `state_dict()`, `ledger()`.

    Args:
        source: a folder of images with `.txt` captions (or several, or a pattern or list file), a dataset of Hugging
            Face's `datasets` with a column `image`, or a dataset that has `bucket_indices`, such as
            `BucketedDataset` or `BucketedLatentDataset`.
        rule: where images go, e.g. `KohyaBuckets.for_arch("sdxl")`; None for a dataset that has been placed.
        batch_size: images of one process in one step; a number or [K] per bucket; None with `max_pixels`.
        accelerator: of Hugging Face's accelerate, which prepares the loader.
        num_workers: processes that load images; they stay alive between epochs.
        caption_column: of a Hugging Face dataset.
        options: of `BucketBatchSampler`, e.g. `seed=42`, `remainder="pad"`.

    Raises:
        KohyaBucketError: no images, or a rule where there must be none, or none where there must be one.
        TypeError: an option that does not exist, with the nearest one.

    Examples:
        >>> loader = bucketed_loader("photos", KohyaBuckets.for_arch("sd"), batch_size=2, seed=42)
        >>> for batch in loader:
        ...     print(tuple(batch["image"].shape), batch["caption"])
        (2, 3, 576, 448) ['a photo', 'a photo']
        (2, 3, 448, 576) ['a photo', 'a photo']
        (2, 3, 448, 576) ['a photo', 'a photo']
    """
    from kohya_bucket.datasets.sampler import BucketBatchSampler  # not for datasets in loaders of one's own

    dataset = _dataset(source, rule, caption_column)
    sampler = BucketBatchSampler(dataset, batch_size, **options)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    if accelerator is not None:
        from kohya_bucket.datasets.accelerated import prepare_loader

        loader = prepare_loader(accelerator, loader)
    loader.bucket_sampler = sampler  # accelerate's wrapper hides its own
    return loader


def _dataset(source: Any, rule: BucketRule | None, caption_column: str | None) -> Any:
    from_files = isinstance(source, (str, os.PathLike, Sequence))
    if caption_column is not None and (from_files or hasattr(source, "bucket_indices")):
        raise KohyaBucketError(
            f"caption_column is {caption_column!r}, but only datasets of Hugging Face have columns: leave it out"
        )
    if hasattr(source, "bucket_indices"):
        if rule is not None:
            raise KohyaBucketError(f"{type(source).__name__} has its buckets: leave the rule out")
        return source
    if isinstance(source, Dataset):
        from kohya_bucket.datasets.sampler import buckets_of

        buckets_of(source)  # says what to do: a rule cannot place what has no sizes
    if rule is None:
        raise KohyaBucketError("no rule says where images go: give one, e.g. KohyaBuckets.for_arch('sdxl')")
    if from_files:
        return BucketedDataset.from_folder(source, rule)
    return BucketedDataset.from_hf(source, rule, caption_column=caption_column)
