"""`BucketManager`, as sd-scripts' datasets and tools use it, on top of this package's rules."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from kohya_bucket.buckets import BucketSet, Placement, geometry
from kohya_bucket.buckets.no_upscale import without_upscaling
from kohya_bucket.buckets.rule import InSet
from kohya_bucket.buckets.rules.kohya import kohya_bucket_sizes
from kohya_bucket.buckets.sizes import Size, as_pair, as_sizes
from kohya_bucket.buckets.switching import AspectSwitch, nearest_indices


class BucketManager:
    """The same attributes, methods and answers as sd-scripts' class, computed for many images at once.

    Args:
        no_upscale: buckets follow from the images, which are never enlarged.
        max_reso: (width, height) whose area no bucket exceeds, or None for given sizes.
        min_size: shortest side of a generated bucket.
        max_size: longest side of a generated bucket.
        reso_steps: every side is a multiple of this.
    """

    def __init__(
        self, no_upscale: bool, max_reso: Size | None, min_size: int | None, max_size: int | None,
        reso_steps: int | None,
    ) -> None:  # fmt: skip
        self.no_upscale = no_upscale
        self.max_reso = max_reso
        self.max_area = None if max_reso is None else max_reso[0] * max_reso[1]
        self.min_size = min_size
        self.max_size = max_size
        self.reso_steps = reso_steps
        self.resos: list[Size] = []
        self.reso_to_id: dict[Size, int] = {}
        self.buckets: Any = []
        self._bucket_set: BucketSet | None = None

    def make_buckets(self) -> None:
        if self.max_reso is None or self.min_size is None or self.max_size is None or self.reso_steps is None:
            raise ValueError("make_buckets needs max_reso, min_size, max_size and reso_steps")
        self.set_predefined_resos(kohya_bucket_sizes(self.max_reso, self.min_size, self.max_size, self.reso_steps))

    def set_predefined_resos(self, resos: Iterable[Size]) -> None:
        """Use the given sizes, in the given order."""
        self.predefined_resos = list(resos)
        self.predefined_resos_set = set(self.predefined_resos)
        self._bucket_set = BucketSet.from_dims(self.predefined_resos) if self.predefined_resos else None
        if self._bucket_set is not None:
            self.predefined_aspect_ratios = self._bucket_set.aspects
            self._switch = AspectSwitch.nearest(self._bucket_set.aspects)

    def place(self, sizes: Any) -> Placement:
        """Place N images, [N, 2] (width, height)."""
        array = as_sizes(sizes)
        if self.no_upscale:
            if self.max_area is None or self.reso_steps is None:
                raise ValueError("no_upscale needs max_reso and reso_steps")
            return without_upscaling(array, self.max_area, self.reso_steps).placement()
        if self._bucket_set is None:
            raise ValueError("there are no buckets yet: call make_buckets or set_predefined_resos first")
        return InSet(array, self._bucket_set, nearest_indices(array, self._bucket_set, self._switch)).placement()

    def select_bucket(self, image_width: int, image_height: int) -> tuple[Size, Size, float]:
        """Bucket, resized size and aspect error of one image; `ValueError` with the reason if it has none."""
        placement = self.place([(image_width, image_height)])
        if not placement.placed[0]:
            reason = placement.reason(0).text
            raise ValueError(f"an image of {image_width}x{image_height} has no bucket: {reason}")
        reso = as_pair(placement.bucket_sizes[0])
        self.add_if_new_reso(reso)
        return reso, as_pair(placement.resized_sizes[0]), float(placement.aspect_errors[0])

    @staticmethod
    def get_crop_ltrb(bucket_reso: Size, image_size: Size) -> tuple[float, float, float, float]:
        """The crop conditioning that SDXL is given: left, top, right, bottom."""
        width, height = (np.array([side], dtype=np.int32) for side in bucket_reso)
        aspect = np.array([image_size[0] / image_size[1]])
        left, top, right, bottom = geometry.crop_ltrb(width, height, width / height, aspect)[0].tolist()
        return left, top, right, bottom

    def round_to_steps(self, x: float) -> int:
        """Round to whole pixels, then down to a multiple of the step. What sd-scripts' class offers, this one must."""
        whole = int(x + 0.5)
        return whole - whole % (self.reso_steps or 1)

    def add_if_new_reso(self, reso: Size) -> None:
        """Open a bucket for `reso` unless there is one."""
        if reso not in self.reso_to_id:
            self.reso_to_id[reso] = len(self.resos)
            self.resos.append(reso)
            self.buckets.append([])

    def add_image(self, reso: Size, image_or_info: Any) -> None:
        self.buckets[self.reso_to_id[reso]].append(image_or_info)

    def sort(self) -> None:
        """Number the buckets by (width, height)."""
        order = sorted(range(len(self.resos)), key=self.resos.__getitem__)
        self.buckets = [self.buckets[i] for i in order]
        self.resos = [self.resos[i] for i in order]
        self.reso_to_id = {reso: i for i, reso in enumerate(self.resos)}

    def shuffle(self) -> None:
        """Shuffle each bucket. The order that is trained does not depend on it."""
        for bucket in self.buckets:
            random.shuffle(bucket)

    def adopt(self, resos: list[Size], buckets: Any) -> None:
        """Take over finished buckets, one per size."""
        self.resos = resos
        self.reso_to_id = {reso: i for i, reso in enumerate(resos)}
        self.buckets = buckets
