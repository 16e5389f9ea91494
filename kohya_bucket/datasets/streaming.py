"""`StreamingBuckets`: batches of one bucket from a stream of unknown length and order, with bounded memory."""

from __future__ import annotations

import hashlib
import itertools
import logging
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.buckets.rule import BucketRule, check_rule
from kohya_bucket.checks import as_flag, integer, one_of
from kohya_bucket.datasets.agreement import Meeting, MeetingPlace, given_rank, meeting, world
from kohya_bucket.datasets.captions import caption_of_cell, warn_uncaptioned
from kohya_bucket.datasets.huggingface import refuse_splits, undecoded
from kohya_bucket.datasets.items import (
    Batch,
    Item,
    ItemKeywords,
    ItemSettings,
    PixelRange,
    Transform,
    check_size,
    register_bucket_collation,
)
from kohya_bucket.datasets.sources import at_rest, cell_pixels, cell_size, column_of, content_of
from kohya_bucket.errors import KohyaBucketError, PlanError
from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.listing import refuse_if_away
from kohya_bucket.images.pixels import explained
from kohya_bucket.planning import EpochPlan, Ledger, plan_epoch
from kohya_bucket.planning.fingerprint import agree
from kohya_bucket.planning.stream import Purpose, stream
from kohya_bucket.texts import one_line

Sample = TypeVar("Sample")
REMAINDERS = ("keep", "pad", "drop")


@dataclass
class StreamCounts:
    """What happened to the images of one pass: every one that came is trained or counted here.

    Attributes:
        trained: images in batches, each once.
        repeated: images added a second time, to fill a batch or to give every rank one.
        dropped: images left out by `remainder="drop"`.
        short: steps with fewer images than asked.
        unplaced: images without a bucket, unreadable ones included: not trained.
        left_out: of this rank's, images whose pixels could not be read: another of the batch was trained again.
    """

    trained: int = 0
    repeated: int = 0
    dropped: int = 0
    short: int = 0
    unplaced: int = 0
    left_out: int = 0


@dataclass
class StreamBuffer(Generic[Sample]):
    """Groups samples by bucket into batches of `batch_size * num_replicas`.

    With a generator, `capacity` images are gathered first; then, for each batch, a bucket is drawn with a
    probability proportional to what it holds, and its images at random. Without one, a batch leaves as soon as
    it is complete, in the order of arrival. When the buffer is full and no bucket can fill a batch, the fullest
    one leaves as a remainder, as all buckets do at the end: what it holds is planned like an epoch of one bucket.

    Raises:
        KohyaBucketError: a capacity below one batch, or an unknown remainder.
    """

    batch_size: int
    num_replicas: int
    capacity: int
    remainder: str
    rng: np.random.RandomState | None
    counts: StreamCounts = field(default_factory=StreamCounts)

    def __post_init__(self) -> None:
        self._global = self.batch_size * self.num_replicas
        if min(self.batch_size, self.num_replicas) < 1 or self.capacity < self._global:
            raise KohyaBucketError(
                f"buffer_size={self.capacity} does not hold one batch of {self.batch_size} x {self.num_replicas} "
                "ranks; make it several times as large, since images of every bucket wait in it"
            )
        one_of("remainder", self.remainder, REMAINDERS, KohyaBucketError)
        self._waiting: dict[Bucket, list[Sample]] = {}
        self._held = 0

    def batches(self, samples: Iterable[tuple[Bucket, Sample]]) -> Iterator[tuple[Bucket, list[list[Sample]]]]:
        """(bucket, images of each rank) of each step."""
        for bucket, sample in samples:
            self._waiting.setdefault(bucket, []).append(sample)
            self._held += 1
            # Without shuffling, a bucket leaves as soon as it fills a step. Once the buffer is full, one leaves that
            # fills a step, at random; where none does, the fullest in a short batch.
            if self.rng is None and len(self._waiting[bucket]) == self._global:
                yield from self._leave(bucket, self._global)
            elif self._held >= self.capacity and (full := self._full()):
                yield from self._leave(self._draw(full), self._global)
            elif self._held >= self.capacity:
                fullest = max(sorted(self._waiting), key=lambda bucket: len(self._waiting[bucket]))
                yield from self._leave(fullest, len(self._waiting[fullest]))
        while full := self._full():
            yield from self._leave(self._draw(full), self._global)
        left = sorted(self._waiting)
        if self.rng is not None:
            left = [left[i] for i in self.rng.permutation(len(left)).tolist()]
        for bucket in left:
            yield from self._leave(bucket, len(self._waiting[bucket]))

    def _full(self) -> list[Bucket]:
        return sorted(b for b, waiting in self._waiting.items() if len(waiting) >= self._global)

    def _draw(self, full: list[Bucket]) -> Bucket:
        if self.rng is None:
            return full[0]
        weights = np.array([len(self._waiting[b]) for b in full], dtype=np.float64)
        return full[int(self.rng.choice(len(full), p=weights / weights.sum()))]

    def _leave(self, bucket: Bucket, count: int) -> Iterator[tuple[Bucket, list[list[Sample]]]]:
        """Train `count` of the images that wait in a bucket, which at most fill a global batch."""
        waiting = self._waiting.pop(bucket)
        if self.rng is not None:
            waiting = [waiting[i] for i in self.rng.permutation(len(waiting)).tolist()]
        leaving, rest = waiting[:count], waiting[count:]
        if rest:
            self._waiting[bucket] = rest
        self._held -= count
        plan, ledger = _plan_of_one_bucket(count, self.batch_size, self.num_replicas, self.remainder)
        self.counts.trained += count - ledger.missed
        self.counts.dropped += ledger.missed
        self.counts.repeated += ledger.repeated
        for step in range(plan.steps):
            self.counts.short += plan.samples < self._global
            yield bucket, [[leaving[i] for i in plan.indices(step, rank)] for rank in range(self.num_replicas)]


@lru_cache(maxsize=256)
def _plan_of_one_bucket(count: int, batch_size: int, ranks: int, remainder: str) -> tuple[EpochPlan, Ledger]:
    """Kept, since nearly all batches of a stream have one length."""
    small_buckets = "drop" if remainder == "drop" else None
    plan = plan_epoch(
        np.zeros(count, dtype=np.int64), batch_size, world_size=ranks, remainder=remainder,
        small_buckets=small_buckets, order="file", step_shapes="one",
    )  # fmt: skip
    return plan, plan.ledger()


if TYPE_CHECKING:
    from typing_extensions import Unpack


_log = logging.getLogger(__name__)
_NAMED = 3
_made = itertools.count()  # numbers of the streams that ranks share: several may be read at once
_SEED_BITS = (1 << 64) - 1
_Sample = tuple[Any, tuple[int, int], tuple[int, int], str, str]

register_bucket_collation()


class StreamKeywords(ItemKeywords, total=False):
    """Keyword arguments of `StreamingBuckets`, except for the names of columns."""

    buffer_size: int
    shuffle: bool
    remainder: str
    seed: int
    num_replicas: int
    rank: int
    obey_exif: bool


class StreamingBuckets(IterableDataset[dict[str, Any]]):
    """Whole batches from a stream of samples; use as `DataLoader(stream, batch_size=None)`.

    A batch is the dict that a `BucketedDataset` gives through a `DataLoader`, without `bucket_idx`; all images are of
    one bucket. Images wait undecoded and without their files, `buffer_size` of them at most. Memory is bounded by it,
    whatever the stream's length.

    With several ranks every rank reads the whole stream, sorts it alike, and decodes its own slice of each
    batch: in each step all ranks train the same bucket, and all take the same number of steps. Use the same
    number of workers on all ranks, and do not split the stream by rank beforehand: ranks compare what they read,
    before the first batch and then every `buffer_size` samples. Workers share the stream: a torch
    `IterableDataset` (that of Hugging Face, too) is trusted to split itself among them; any other iterable
    is dealt out sample by sample.

    Args:
        stream: an iterable of mappings, or a function that returns one for each pass.
        rule: the rule; one that decides by a single image's size (all but those that look at counts).
        batch_size: images per batch and rank.
        image_column: key of a sample; images may be all that `from_hf` accepts.
        caption_column: the same of captions.
        name_column: the same of names.
        buffer_size: images that wait for others of their bucket, over all ranks, per worker.
        shuffle: draw buckets and images at random from the buffer; otherwise batches leave when complete.
        remainder: "keep", "pad" or "drop", as for `plan_epoch`.
        seed: of the shuffle, together with the epoch given to `set_epoch`.
        num_replicas: how many processes train; by default those of torch.distributed, or 1. More need its process
            group, by which they compare.
        rank: which of them this is; by default that of torch.distributed, or 0.
        transform: as for `BucketedDataset.from_hf`.
        pixel_range: as for `BucketedDataset.from_hf`.
        interpolation: as for `BucketedDataset.from_hf`.
        obey_exif: as for `BucketedDataset.from_hf`.
        on_bad_image: "leave_out": an image whose header is sound and whose pixels are not is named, and another of its
            batch is trained twice; "stop": it ends the pass.

    Raises:
        KohyaBucketError: settings that cannot work; in a pass: a sample that is not a mapping or lacks a column, a
            caption that is not text, a batch none of whose images can be read, or a second pass over an iterator that
            has ended.
        RanksDifferError: in a pass: a rank reads other samples than another, or in another order.
        PlanError: in a pass: ranks that have no process group, or one that does not come.

    Examples:
        >>> from PIL import Image
        >>> samples = [{"image": Image.new("RGB", (640, 480)), "text": "red"}] * 5
        >>> stream = StreamingBuckets(samples, KohyaBuckets.for_arch("sd"), 2, caption_column="text", buffer_size=4)
        >>> [tuple(batch["image"].shape) for batch in stream]
        [(2, 3, 448, 576), (2, 3, 448, 576), (1, 3, 448, 576)]
    """

    def __init__(
        self,
        stream: Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]],
        rule: BucketRule,
        batch_size: int,
        *,
        image_column: str = "image",
        caption_column: str | None = None,
        name_column: str | None = None,
        buffer_size: int = 1000,
        shuffle: bool = True,
        remainder: str = "keep",
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        transform: Transform | None = None,
        pixel_range: PixelRange = (-1, 1),
        interpolation: str = "auto",
        on_bad_image: str = "leave_out",
        obey_exif: bool = True,
    ) -> None:
        check_rule(rule)
        self._settings = ItemSettings(transform, pixel_range, interpolation, on_bad_image)
        batch_size, buffer_size = integer("batch_size", batch_size), integer("buffer_size", buffer_size)
        if isinstance(stream, Mapping) or not (callable(stream) or isinstance(stream, Iterable)):
            raise KohyaBucketError(
                f"stream is a {type(stream).__name__}, but must be an iterable of mappings with {image_column!r} in "
                "each, or a function that returns one"
            )
        self._stream = stream
        self._passed = False
        self.rule = rule
        self._columns = image_column, caption_column, name_column
        self._batching = batch_size, buffer_size, remainder
        self._given, self._place = given_rank(num_replicas, rank), None
        self._number = 0 if self._given == (1, 0) else next(_made)
        self._shuffle, self._seed = as_flag("shuffle", shuffle), integer("seed", seed) & _SEED_BITS
        self._obey_exif = as_flag("obey_exif", obey_exif)
        # In shared memory, so that persistent workers see a new epoch, too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.counts = StreamCounts()
        self._buffer()

    @classmethod
    def from_hf(
        cls,
        stream: Any,
        rule: BucketRule,
        batch_size: int,
        *,
        image_column: str = "image",
        caption_column: str | None = None,
        name_column: str | None = None,
        **options: Unpack[StreamKeywords],
    ) -> StreamingBuckets:
        """From `datasets.load_dataset(..., streaming=True)`; encoded images stay encoded while they wait."""
        refuse_splits(stream)
        return cls(
            undecoded(stream, image_column), rule, batch_size, image_column=image_column,
            caption_column=caption_column, name_column=name_column, **options,
        )  # fmt: skip

    def __repr__(self) -> str:
        batch_size, buffer_size, remainder = self._batching
        ranks = " num_replicas={} rank={}".format(*self._ranks) if self._ranks[0] > 1 else ""
        how = f"batch_size={batch_size} buffer_size={buffer_size} remainder={remainder!r}{ranks}"
        return f"<{type(self).__name__} {how} rule={self.rule!r}>"

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes, where torch.distributed does not know the ranks."""
        return {**self.__dict__, "_given": self._ranks, "_place": self._meeting_place()}

    @property
    def _ranks(self) -> tuple[int, int]:
        """(ranks, this rank)."""
        return self._given or world()

    def _meeting_place(self) -> MeetingPlace | None:
        return None if self._ranks[0] == 1 else self._place or MeetingPlace.of_this_run()

    def set_epoch(self, epoch: int) -> None:
        """Another order for each epoch; handed on to the stream if it has such a method."""
        self._epoch.fill_(epoch)
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        buffer, (_, rank) = self._buffer(), self._ranks
        self.counts = buffer.counts
        for bucket, of_ranks in buffer.batches(self._placed(buffer.counts)):
            yield Batch(default_collate(self._items(bucket, of_ranks[rank], buffer.counts)))
        counts = buffer.counts
        if any(told := (counts.repeated, counts.dropped, counts.left_out)):
            line = "stream: %d images trained, %d of them repeated, %d dropped, %d left out for their pixels"
            _log.warning(line, counts.trained, *told)

    def _items(self, bucket: Bucket, samples: list[_Sample], counts: StreamCounts) -> list[Item]:
        """As many items as samples: in the place of an unreadable image one of the others."""
        items: list[Item] = []
        bad: list[KohyaBucketError] = []
        for sample in samples:
            try:
                items.append(self._item(bucket, sample))
            except UnreadableImageError as error:
                bad.append(explained(sample[3], error))
                if self._settings.on_bad_image == "stop":
                    raise bad[0] from error
                counts.left_out += 1
                _log.warning("%s", one_line(f"{bad[-1]}: it is left out, and another of its batch is trained twice"))
        if bad and not items:
            raise bad[0]
        # The buffer has counted each of the samples as one that is trained once.
        counts.trained += len(items) - len(samples)
        counts.repeated += len(samples) - len(items)
        return [items[i % len(items)] for i in range(len(samples))]

    def _buffer(self) -> StreamBuffer[_Sample]:
        batch_size, buffer_size, remainder = self._batching
        worker = get_worker_info()
        part = 0 if worker is None else worker.id
        rng = stream(Purpose.STREAM, self._seed, int(self._epoch), part) if self._shuffle else None
        return StreamBuffer(batch_size, self._ranks[0], buffer_size, remainder, rng)

    def _placed(self, counts: StreamCounts) -> Iterator[tuple[Bucket, _Sample]]:
        comparison, total, bare = self._comparison(), 0, list[str]()
        for number, sample in self._mine():
            where = f"sample {number}"
            cell, text, name = (None if c is None else column_of(sample, c, where) for c in self._columns)
            name = f"stream:{number}" if self._columns[2] is None else str(name)
            cell = at_rest(cell)
            comparison.add(cell, text)
            try:
                size = cell_size(cell, self._obey_exif)
                placement = self.rule.place(np.array([size], dtype=np.int32))
                bucket, reason = placement.bucket(0), placement.reason(0).text
            except UnreadableImageError as error:
                if isinstance(error.__cause__, OSError):
                    refuse_if_away(str(error.__cause__.filename or name), error.__cause__)
                bucket, reason = None, str(error)
            if bucket is None:
                counts.unplaced += 1
                if counts.unplaced <= 3:
                    _log.warning("%s has no bucket and is not trained: %s", one_line(name), one_line(reason))
                continue
            width, height = placement.resized_sizes[0].tolist()
            caption, total = caption_of_cell(text, name), total + 1
            if self._columns[1] is not None and not caption:
                bare.append(name if len(bare) < _NAMED else "")
            yield bucket, (cell, size, (width, height), name, caption)
        comparison.meet()
        warn_uncaptioned(bare, total)
        if counts.unplaced > 3:
            _log.warning("stream: %d images had no bucket and were not trained", counts.unplaced)

    def _comparison(self) -> _Comparison:
        batch_size, buffer_size, remainder = self._batching
        worker, ranks = get_worker_info(), self._ranks[0]
        settings = {
            "seed": self._seed, "epoch": int(self._epoch), "shuffle": self._shuffle, "batch_size": batch_size,
            "num_replicas": ranks, "buffer_size": buffer_size, "remainder": remainder, "rule": repr(self.rule),
            "num_workers": 0 if worker is None else worker.num_workers,
        }  # fmt: skip
        name = f"stream {self._number} of worker {0 if worker is None else worker.id}"
        place = self._meeting_place()
        if ranks > 1 and place is None:
            raise PlanError(
                f"num_replicas is {ranks}, but there is no process group by which the ranks compare what they read, "
                "and of a stream that comes in another order on one of them, images would be missed: call "
                "torch.distributed.init_process_group first; 'gloo' will do"
            )
        return _Comparison(meeting(place, name), settings, batch_size * ranks, buffer_size)

    def _mine(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        stream = self._stream() if callable(self._stream) else self._stream
        worker = get_worker_info()
        alone = worker is None or isinstance(stream, IterableDataset)
        came = False
        for number, sample in enumerate(stream):
            came = True
            if alone or number % worker.num_workers == worker.id:
                yield number, sample
        if self._passed and not came and isinstance(stream, Iterator):
            raise KohyaBucketError(
                "the stream is an iterator that an earlier pass has read to its end: give what can be iterated again, "
                "or a function that returns a new iterator"
            )
        self._passed = True

    def _item(self, bucket: Bucket, sample: _Sample) -> Item:
        cell, size, resized, name, caption = sample
        pixels = cell_pixels(cell, self._obey_exif)
        check_size(pixels, size)
        return self._settings.item(pixels, bucket, resized, name, caption)


class _Comparison:
    """A running hash of what a rank reads, compared with the other ranks' before a batch can leave the buffer.

    First when there are `first` samples, then after twice as many as before, then every `every`, and at the end.
    """

    def __init__(self, meeting: Meeting | None, settings: Mapping[str, Any], first: int, every: int) -> None:
        self._meeting, self._settings = meeting, settings
        self._read, self._hash = 0, hashlib.blake2b(digest_size=8)
        self._folder: str | None = None  # of the first image, where cells are paths
        self._next, self._every = first, every

    def add(self, cell: Any, caption: Any) -> None:
        if self._meeting is None:
            return
        content = content_of(cell)
        if isinstance(content, str):  # of a path, what does not change with the folder that holds all
            path = content.replace("\\", "/")
            self._folder = posixpath.dirname(path) if self._folder is None else self._folder
            content = posixpath.relpath(path or ".", self._folder or ".").encode("utf-8", "surrogatepass")
        self._hash.update(content)
        self._hash.update(repr(caption).encode())
        self._read += 1
        if self._read == self._next:
            self._next += min(self._read, self._every)
            self.meet()

    def meet(self) -> None:
        if self._meeting is None:
            return
        stream_read = {
            **self._settings,
            "images": self._read,
            "what the images are, in their order": self._hash.hexdigest(),
        }
        agree(
            stream_read,
            self._meeting.gather,
            "reads another stream",
            "Every rank must read the whole stream in the same order: shuffle it with the same seed on all ranks, and "
            "do not split it by rank",
        )
