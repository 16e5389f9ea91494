"""What becomes of a dataset under a rule: counts, distributions, and the images that stand out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import Bucket, Placement, Reason
from kohya_bucket.buckets.focus import FocusCuts, cut_rectangles, focused, middle_cuts
from kohya_bucket.buckets.misfits import BARELY, FAR, aspect_distance, enlargement
from kohya_bucket.buckets.sizes import FloatArray
from kohya_bucket.images.headers import ORIENTATIONS
from kohya_bucket.planning.plan import BucketCounts
from kohya_bucket.reports.summary import Summary, summarize
from kohya_bucket.trainers.door.subject import ImageTable, Subject

Indices = npt.NDArray[np.intp]
FEW = 10  # a used bucket with fewer images counts as rarely used


@dataclass(frozen=True)
class BucketUse:
    """What one bucket holds. Crop losses are shares of the image's area; `enlarged` is a share of its images.

    `last_batch` is 0 where all batches are full, and `full_batch` what fills one; `short_batches` are not full.
    """

    bucket: Bucket
    images: int
    samples: int
    batches: int
    short_batches: int
    last_batch: int
    full_batch: int
    mean_crop: float
    worst_crop: float
    enlarged: float

    @property
    def underfilled(self) -> bool:
        """It is trained, but never fills a batch."""
        return 0 < self.batches == self.short_batches


class ListedImages(NamedTuple):
    """Images that stand out, the worst first.

    Attributes:
        key: its name in `--json`.
        images: their indices; of equal files the first of each group.
        text: what is to be said of one of them.
        notes_only: there is nothing to be said but the text.
    """

    key: str
    title: str
    about: str
    images: Sequence[int]
    text: Callable[[int], str]
    notes_only: bool = False


@dataclass(frozen=True)
class Analysis:
    """A subject, its placement, and what can be read from them. Lists are indices of images, worst first.

    Attributes:
        subject: the images and their rule.
        placement: where the rule puts them.
    """

    subject: Subject
    placement: Placement

    @property
    def images(self) -> ImageTable:
        return self.subject.images

    @cached_property
    def scale(self) -> FloatArray:
        """[N] factor by which each image's sides are scaled; NaN without a bucket."""
        return enlargement(self.images.sizes, self.placement)

    @cached_property
    def aspect_distance(self) -> FloatArray:
        """[N] |log(image aspect / bucket aspect)|; NaN without a bucket."""
        return aspect_distance(self.images.sizes, self.placement)

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.images.sizes, self.placement, self.counts)

    @cached_property
    def counts(self) -> BucketCounts:
        """What an epoch trains of each bucket."""
        return self.subject.counts(self.placement, self.subject.rule)

    @cached_property
    def aspects(self) -> FloatArray:
        """Aspects (width / height) of the readable images."""
        sizes = self.images.sizes[self.images.readable]
        return np.asarray(sizes[:, 0] / sizes[:, 1])

    @cached_property
    def buckets(self) -> list[BucketUse]:
        """One entry per bucket of the set, in its order; unused ones too, where the rule has a whole set."""
        placement, counts = self.placement, self.counts
        if placement.bucket_set is None:
            return []
        images = placement.images_per_bucket
        index = placement.bucket_index[placement.placed]
        loss, scale = placement.crop_loss[placement.placed], self.scale[placement.placed]
        k = len(placement.bucket_set)
        worst = np.zeros(k)
        np.maximum.at(worst, index, loss)
        divisor = np.maximum(images, 1)
        mean = np.bincount(index, weights=loss, minlength=k) / divisor
        enlarged = np.bincount(index, weights=scale > BARELY, minlength=k) / divisor
        last = np.where(counts.short > 0, counts.smallest, 0)
        trained = counts.samples, counts.batches, counts.short, last, counts.full
        columns = images, *trained, mean, worst, enlarged
        return [*map(BucketUse, placement.bucket_set, *(column.tolist() for column in columns))]

    @property
    def used_buckets(self) -> list[BucketUse]:
        return [b for b in self.buckets if b.images]

    @property
    def underfilled(self) -> list[BucketUse]:
        """Used buckets that never fill a batch."""
        return [b for b in self.used_buckets if b.underfilled]

    @property
    def rarely_used(self) -> list[BucketUse]:
        """Used buckets with fewer than `FEW` images."""
        return [b for b in self.used_buckets if b.images < FEW]

    @property
    def empty(self) -> list[BucketUse]:
        """Buckets of the rule's set that hold no image."""
        return [b for b in self.buckets if not b.images]

    @cached_property
    def unplaced(self) -> Indices:
        """Readable images without a bucket."""
        return np.flatnonzero(self.images.readable & ~self.placement.placed)

    @cached_property
    def outliers(self) -> Indices:
        """Images whose aspect no bucket comes near."""
        return self._worst(self.aspect_distance, self.aspect_distance > FAR)

    @cached_property
    def most_cropped(self) -> Indices:
        """Images by crop loss; those without any are left out."""
        return self._worst(self.placement.crop_loss, self.placement.crop_loss > 0)

    @cached_property
    def most_enlarged(self) -> Indices:
        """Images by enlargement; those that are not enlarged are left out."""
        return self._worst(self.scale, self.scale > BARELY)

    @cached_property
    def focus_cut(self) -> FloatArray:
        """[N] share of each image's focus that its crop cuts off; NaN where there is none."""
        focus = self.subject.focus
        return np.full(len(self.placement), np.nan) if focus is None else cut_rectangles(self.placement, focus)

    @cached_property
    def worst_focus(self) -> Indices:
        """Images whose focus the middle crop would cut: first those of which this crop cuts most, too."""
        focus = self.subject.focus
        if focus is None:
            return np.empty(0, dtype=np.intp)
        middle = np.nan_to_num(middle_cuts(self.placement, focus))
        order = np.lexsort((-middle, -np.nan_to_num(self.focus_cut)))
        return np.asarray(order[middle[order] > 0])

    @cached_property
    def focus_cuts(self) -> FocusCuts | None:
        """How many rectangles are cut; None where no focus is set."""
        focus = self.subject.focus
        return None if focus is None else FocusCuts.from_placement(self.placement, focus)

    @cached_property
    def rotated(self) -> Indices:
        """Images whose EXIF asks for a rotation or mirroring that training does not do."""
        return np.flatnonzero(self.images.readable & (self.images.orientation > 1))

    @cached_property
    def duplicates(self) -> list[list[int]] | None:
        """Groups of images of equal content, largest first; None where no hashes were computed."""
        if self.images.hashes is None:
            return None
        groups: dict[str, list[int]] = {}
        for i, content in enumerate(self.images.hashes):
            if content:
                groups.setdefault(content, []).append(i)
        return sorted((g for g in groups.values() if len(g) > 1), key=lambda g: (-len(g), g[0]))

    @property
    def lists(self) -> list[ListedImages]:
        """The images that stand out."""
        images = self.images
        groups = {group[0]: group for group in self.duplicates or ()}

        def copies(i: int) -> str:
            others = ", ".join(images.short_name(other) for other in groups[i][1:20])
            return f"{len(groups[i])} times the same: {others}"

        def lost(i: int) -> str:
            return f"{self.placement.crop_loss[i]:.1%} cropped off"

        lists = [
            ListedImages("most_cropped", "Cropped most", "Largest share cut off first.",
                         self.most_cropped.tolist(), lost),
            ListedImages("most_enlarged", "Enlarged most", "Smaller than their bucket.",
                         self.most_enlarged.tolist(), lambda i: f"enlarged {self.scale[i]:.2f} times"),
            ListedImages("outliers", "Far from every bucket",
                         f"The aspect differs from the bucket's by more than a factor of {math.exp(FAR):.2f}: often a "
                         "mistake in the data.", self.outliers.tolist(), lost),
            ListedImages("focus_cut", "Focus cut off", "No crop of their bucket holds the whole rectangle.",
                         self._worst(self.focus_cut, self.focus_cut > 0).tolist(),
                         lambda i: f"{self.focus_cut[i]:.1%} of its focus cut off"),
            ListedImages("without_bucket", "Without a bucket", "These are not trained.",
                         self.unplaced.tolist(), self.reason),
            ListedImages("exif_rotated", "Asking for a rotation",
                         "Their EXIF asks for it; training takes the pixels as they are stored.",
                         self.rotated.tolist(), lambda i: ORIENTATIONS.get(int(images.orientation[i]), "")),
            ListedImages("broken", "Broken", "These cannot be read or decoded; they are not trained.",
                         sorted(images.failures), images.failures.__getitem__, True),
            ListedImages("not_listed", "Not listed", "No trainer lists files of these names; they are not trained.",
                         sorted(images.unlisted), images.unlisted.__getitem__, True),
            ListedImages("misread", "Read as something else", "Trainers see other pixels than people do.",
                         sorted(images.misread), images.misread.__getitem__),
            ListedImages("mislabelled", "Named wrongly", "They load anyway.",
                         sorted(images.mislabelled), images.mislabelled.__getitem__, True),
        ]  # fmt: skip
        if self.duplicates is not None:
            about = "Files of equal content; each copy is trained like an image of its own."
            lists.append(ListedImages("duplicates", "Equal files", about, list(groups), copies, True))
        return lists

    def reason(self, i: int) -> str:
        """Why image `i` is not trained; empty if it is."""
        reason = self.placement.reason(i)
        return self.images.not_read.get(i, "" if reason == Reason.PLACED else reason.text)

    def without(self, broken: Mapping[str, str]) -> Analysis:
        """The same with the images at these paths broken, for the reasons given."""
        if not broken.keys() & set(self.images.paths):
            return self
        return analyze(replace(self.subject, images=self.images.without(broken)))

    @staticmethod
    def _worst(values: FloatArray, chosen: npt.NDArray[np.bool_]) -> Indices:
        indices = np.flatnonzero(chosen)
        return np.asarray(indices[np.argsort(-values[indices], kind="stable")])


def analyze(subject: Subject) -> Analysis:
    """Place the subject's images and look at the result."""
    return Analysis(subject, focused(subject.rule.place(subject.images.sizes), subject.focus))
