"""How other trainers place images, restated from their public behaviour so that a move can be judged beforehand.

Read-only: these rules plan nothing. The bucket of each image is the trainer's own; what is cropped is counted as
everywhere in this package, for an image scaled to cover its bucket, so that trainers can be compared. Each class
names its source; `compat_tests/test_other_trainers.py` compares with the real code where a checkout is present.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.rule import Assignment, InSet, OwnSizes, RuleBase, SetRule
from kohya_bucket.buckets.sizes import FloatArray, IntArray, positive
from kohya_bucket.buckets.switching import AspectSwitch
from kohya_bucket.errors import BucketSettingsError

SizeColumns = tuple[npt.NDArray[np.number], npt.NDArray[np.number]]


def _round_to_multiple(x: float, multiple: int) -> int:
    """Python's `round(x / multiple) * multiple`: half to even."""
    return round(x / multiple) * multiple


class SetTrainer(SetRule):
    """A trainer with a bucket set: the nearest width / height, unless `_nearest` decides otherwise."""

    def __init__(self, bucket_set: BucketSet) -> None:
        super().__init__(bucket_set)
        self._switch = AspectSwitch.nearest(bucket_set.aspects)

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        """[N] readable widths and heights -> [N] positions in the set."""
        return self._switch.index(width / height)

    def _assign(self, sizes: IntArray) -> Assignment:
        index = np.full(len(sizes), -1, dtype=np.int32)
        readable = sizes.min(axis=1, initial=1) > 0
        index[readable] = self._nearest(sizes[readable, 0], sizes[readable, 1])
        return InSet(sizes, self.bucket_set, index)


def _assign_readable(sizes: IntArray, choose: Callable[[FloatArray, FloatArray], SizeColumns]) -> OwnSizes:
    """The bucket sizes that `choose` gives for the readable of N images; 0 where the trainer has none."""
    readable = sizes.min(axis=1, initial=1) > 0
    buckets = np.zeros_like(sizes)
    buckets[readable] = np.stack(choose(*sizes[readable].T.astype(np.float64)), axis=1)
    reasons: npt.NDArray[np.uint8] = np.where(readable, Reason.PLACED, Reason.UNREADABLE).astype(np.uint8)
    reasons[readable & (buckets.min(axis=1, initial=1) < 1)] = Reason.TOO_SMALL
    return OwnSizes(sizes, buckets, reasons)


_ONE_TRAINER_ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)


class OneTrainerBuckets(SetTrainer):
    """OneTrainer: nine aspects and their inverses at one pixel count; nearest height / width. Source: Nerogar/mgds,
    `pipelineModules/AspectBucketing.py`, which OneTrainer uses with a quantization of 64 for most models (8 for SD 1.5
    and 2). Its list has Python's set order, which decides only exact ties; here it is ascending.

    Nearest aspect counted as height / width, so portrait is finer than landscape, the other way than Kohya's.

    Args:
        resolution: side in pixels whose area every bucket has about.
        quantization: every side is rounded to a multiple of this.
    """

    def __init__(self, resolution: int = 1024, quantization: int = 64) -> None:
        positive(resolution=resolution, quantization=quantization)
        pairs = [(1.0 / math.sqrt(a) * resolution, a / math.sqrt(a) * resolution) for a in _ONE_TRAINER_ASPECTS]
        sizes = {tuple(_round_to_multiple(side, quantization) for side in pair) for pair in pairs}
        sizes |= {(h, w) for w, h in sizes}
        super().__init__(BucketSet.from_dims(sorted(sizes), name="onetrainer", vae_factor=quantization))
        self._switch = AspectSwitch.nearest(self.bucket_set.sizes[:, 1] / self.bucket_set.sizes[:, 0])

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        return self._switch.index(height / width)


class SimpleTunerBuckets(RuleBase):
    """SimpleTuner: the aspect rounded to two decimals, at one pixel count, each side rounded to the alignment. Source:
    bghira/SimpleTuner, `helpers/multiaspect/image.py` and `helpers/image_manipulation/training_sample.py`, for
    `resolution_type` area or pixel_area and no square crop. The trainer also remembers the first size it computed for
    each rounded aspect of a bucket; two sizes with the same rounded aspect then become one, depending on the order of
    images. Here the order decides nothing, so such images keep their own size.

    One bucket per rounded aspect that occurs.

    Args:
        resolution: side in pixels; 1024 stands for `resolution = 1024` with `resolution_type = "pixel_area"`.
        alignment: `aspect_bucket_alignment`; every side is rounded to a multiple of it, and at least that.
    """

    def __init__(self, resolution: int = 1024, alignment: int = 64) -> None:
        positive(resolution=resolution, alignment=alignment)
        self.resolution, self.alignment = resolution, alignment
        self._edge = max(_round_to_multiple(int(math.sqrt(resolution * resolution / 1e6 * 1e6)), alignment), alignment)

    def _assign(self, sizes: IntArray) -> OwnSizes:
        return _assign_readable(sizes, self._sizes)

    def _sizes(self, width: FloatArray, height: FloatArray) -> SizeColumns:
        ratio = width / height
        # numpy rounds by scaling, Python correctly; each different aspect is rounded once, as Python does it.
        values, inverse = np.unique(ratio, return_inverse=True)
        aspects, back = np.unique([round(float(a), 2) for a in values], return_inverse=True)
        sizes = np.array([self._size(float(a)) for a in aspects]).reshape(-1, 2)
        chosen = sizes[back.reshape(-1)[inverse.reshape(-1)]]
        return chosen[:, 0], chosen[:, 1]

    def _size(self, aspect: float) -> tuple[int, int]:
        if aspect == 0:  # narrower than 1:200, which the trainer divides by
            return 0, 0
        root, step = math.sqrt(aspect), self.alignment
        width, height = (max(_round_to_multiple(side, step), step) for side in (self._edge * root, self._edge / root))
        return (self._edge, self._edge) if round(width / height, 2) == 1.0 else (width, height)


class AIToolkitBuckets(RuleBase):
    """ai-toolkit: the image's own size reduced to the area, each side floored or raised to the step. Source:
    ostris/ai-toolkit, `toolkit/buckets.py`; the step is what the model asks for, 16 for most and 8 by default.

    Never enlarges by more than a step; one bucket per size that occurs.

    Args:
        resolution: side in pixels whose area no bucket exceeds (unless a side is shorter than a step).
        divisibility: every side is a multiple of this.
    """

    def __init__(self, resolution: int = 1024, divisibility: int = 16) -> None:
        positive(resolution=resolution, divisibility=divisibility)
        self.resolution, self.divisibility = resolution, divisibility

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.resolution}, divisibility={self.divisibility})"

    def _assign(self, sizes: IntArray) -> OwnSizes:
        return _assign_readable(sizes, self._sizes)

    def _sizes(self, width: FloatArray, height: FloatArray) -> SizeColumns:
        step, most = self.divisibility, self.resolution * self.resolution
        total = width * height
        target = np.minimum(total, most)
        scale = np.sqrt(target / total)
        down_w, up_w = (f(width * scale / step) * step for f in (np.floor, np.ceil))
        down_h, up_h = (f(height * scale / step) * step for f in (np.floor, np.ceil))
        # What is left where no candidate is within the area.
        best_w, best_h = np.maximum(down_w, step), np.maximum(down_h, step)
        least = np.full(len(width), np.inf)
        for w, h in ((down_w, down_h), (down_w, up_h), (up_w, down_h), (up_w, up_h)):
            distance = np.abs(w * h - target)
            better = (w > 0) & (h > 0) & (w * h <= most) & (distance < least)
            best_w[better], best_h[better], least[better] = w[better], h[better], distance[better]
        return best_w, best_h


class DiffusionPipeBuckets(SetTrainer):
    """diffusion-pipe: aspects spread evenly in log space; nearest log aspect; the aspect's size per resolution. Source:
    tdrussell/diffusion-pipe, `utils/dataset.py` and `examples/dataset.toml` (whose seven aspects from 0.5 to 2 are the
    defaults here). Rounds to 16 pixels, to 32 for some models.

    An image goes to the nearest aspect; aspects whose sizes round to the same share a bucket.

    Args:
        resolution: side in pixels whose area the buckets have about.
        min_ar, max_ar, num_ar_buckets: the range of aspects and their number.
        ar_buckets: the aspects themselves instead, as numbers.
        multiple: sides are rounded to a multiple of this.
    """

    def __init__(
        self,
        resolution: int = 1024,
        min_ar: float = 0.5,
        max_ar: float = 2.0,
        num_ar_buckets: int = 7,
        ar_buckets: Iterable[float] | None = None,
        multiple: int = 16,
    ) -> None:
        positive(resolution=resolution, num_ar_buckets=num_ar_buckets, multiple=multiple)
        if not 0 < min_ar <= max_ar:
            raise BucketSettingsError(f"min_ar {min_ar} and max_ar {max_ar} are not a range of positive aspects")
        aspects = np.geomspace(min_ar, max_ar, num_ar_buckets) if ar_buckets is None else list(ar_buckets)
        rounded = sorted({round(float(a), 3) for a in aspects})
        self._log_aspects = np.log(rounded)
        positions: dict[tuple[int, int], int] = {}
        self._position = []
        for aspect in rounded:
            width = math.sqrt(resolution**2 * aspect)
            sides = (width, resolution**2 / width)
            size = (_round_to_multiple(sides[0], multiple), _round_to_multiple(sides[1], multiple))
            self._position.append(positions.setdefault(size, len(positions)))
        super().__init__(BucketSet.from_dims(positions, name="diffusion-pipe", vae_factor=multiple))

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        # Few aspects, and the trainer's logarithms decide: compare them as it does.
        nearest = np.abs(np.log(width / height)[:, None] - self._log_aspects).argmin(axis=1)
        return np.asarray(np.array(self._position, dtype=np.int32)[nearest])


class MusubiTunerBuckets(RuleBase):
    """musubi-tuner: sd-scripts' idea with fewer buckets, and a no-upscale mode that only floors. Source:
    kohya-ss/musubi-tuner, `dataset/bucket.py`, `BucketSelector`; the step is 16 for nearly every model.

    Widths from half the side up to the side, each with the tallest height in the area, and the transposes.

    Args:
        resolution: (width, height) in pixels whose area no bucket exceeds; an int means a square.
        steps: every side is a multiple of this.
        no_upscale: images within the area are only floored to the step, whatever their aspect.
    """

    def __init__(self, resolution: tuple[int, int] | int = 1024, steps: int = 16, no_upscale: bool = False) -> None:
        width, height = (resolution, resolution) if isinstance(resolution, int) else resolution
        positive(resolution=min(width, height), steps=steps)
        self.area, self.steps, self.no_upscale = width * height, steps, no_upscale
        self._resolution = width, height
        side = int(math.sqrt(self.area))
        positive(half_the_side_in_steps=side // 2 // steps)
        widths = range(side // 2 - side // 2 % steps, side + steps, steps)
        pairs = [(w, self.area // w - self.area // w % steps) for w in widths]
        dims = sorted({*pairs, *((h, w) for w, h in pairs)})
        self._of_area = SetTrainer(BucketSet.from_dims(dims, name="musubi-tuner", vae_factor=steps))
        self._bucket_set = None if no_upscale else self._of_area.bucket_set

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._resolution}, steps={self.steps}, no_upscale={self.no_upscale})"

    def _assign(self, sizes: IntArray) -> Assignment:
        return _assign_readable(sizes, self._floored) if self.no_upscale else self._of_area._assign(sizes)

    def _floored(self, width: FloatArray, height: FloatArray) -> SizeColumns:
        chosen = self._of_area.bucket_set.sizes[self._of_area._switch.index(width / height)]
        small = width * height <= self.area
        return (
            np.where(small, width - width % self.steps, chosen[:, 0]),
            np.where(small, height - height % self.steps, chosen[:, 1]),
        )


# Landscape sizes; each is followed by its transpose.
_SIZES = {
    512: "512x512 576x448 640x384 768x320 896x256 1024x256",
    768: "768x768 832x704 896x640 960x576 1024x576 1152x512 1280x448 1408x384 1472x320",
    1024: "1024x1024 1152x896 1216x832 1344x768 1472x704 1600x640 1792x576 2048x512",
}


class EveryDream2Buckets(SetTrainer):
    """EveryDream2: hand-picked sizes per resolution; nearest width / height, the first of equals. Source:
    victorchall/EveryDream2trainer, `data/aspects.py` and `data/image_train_item.py`. Only the three resolutions most
    used are kept here, as the aspects' sizes; the trainer has a list for every 64 pixels.

    The trainer crops to the aspect first and resizes after; which share is lost is the same.

    Args:
        resolution: 512, 768 or 1024, or up to 63 pixels more, which the trainer floors away.

    Raises:
        BucketSettingsError: a resolution whose list is not kept here.
    """

    def __init__(self, resolution: int = 1024) -> None:
        floored = resolution // 64 * 64
        if floored not in _SIZES:
            kept = ", ".join(map(str, _SIZES))
            raise BucketSettingsError(f"EveryDream2's sizes are kept for {kept}, not for a resolution of {resolution}")
        landscape = [tuple(map(int, size.split("x"))) for size in _SIZES[floored].split()]
        dims = [size for w, h in landscape for size in ([(w, h)] if w == h else [(w, h), (h, w)])]
        super().__init__(BucketSet.from_dims(dims, name="everydream2", vae_factor=64))


_DIFFUSERS_ASPECTS = ((1, 1), (4, 5), (5, 4), (2, 3), (3, 2), (3, 4), (4, 3), (9, 16), (16, 9), (1, 2), (2, 1))


class DiffusersBuckets(SetTrainer):
    """diffusers' DreamBooth scripts: the bucket with the least `|h * bucket_w - w * bucket_h|`, the last of equals.
    Source: huggingface/diffusers, `training_utils.find_nearest_bucket` and `generate_aspect_ratio_buckets`. The measure
    is the aspect distance times the bucket's height, so flat buckets attract more images than their aspect explains.

    Buckets as given on the command line, or generated for a resolution.

    Args:
        buckets: (width, height) pairs in their order, or a side in pixels for the scripts' eleven aspects at that
            pixel count. (The scripts write height first.)
        divisibility: generated sides are rounded to a multiple of this.
    """

    def __init__(self, buckets: int | Iterable[tuple[int, int]] = 1024, divisibility: int = 16) -> None:
        if isinstance(buckets, int):
            positive(resolution=buckets, divisibility=divisibility)
            dims: dict[tuple[int, int], None] = {}
            for across, down in _DIFFUSERS_ASPECTS:
                height = (buckets * buckets / (across / down)) ** 0.5
                sides = (height * (across / down), height)
                width, height = (max(divisibility, _round_to_multiple(side, divisibility)) for side in sides)
                dims[width, height] = None
            super().__init__(BucketSet.from_dims(dims, name="diffusers", vae_factor=divisibility))
        else:
            super().__init__(BucketSet.from_dims(buckets, name="diffusers"))

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        wide, high = width.astype(np.int64), height.astype(np.int64)
        best = np.full(len(wide), np.iinfo(np.int64).max)
        index = np.zeros(len(wide), dtype=np.int32)
        for k, bucket in enumerate(self.bucket_set):
            metric = np.abs(high * bucket.width - wide * bucket.height)
            better = metric <= best
            best[better], index[better] = metric[better], k
        return index
