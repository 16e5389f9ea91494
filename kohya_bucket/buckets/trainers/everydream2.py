"""EveryDream2: hand-picked sizes per resolution; nearest width / height, the first of equals.

Source: victorchall/EveryDream2trainer, `data/aspects.py` and `data/image_train_item.py`. Only the three
resolutions most used are kept here, as the aspects' sizes; the trainer has a list for every 64 pixels.
"""

from __future__ import annotations

from kohya_bucket.buckets.arrays.nearest import AspectSwitch
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.buckets.trainers.base import SetTrainer
from kohya_bucket.errors import BucketSettingsError

__all__ = ["EveryDream2Buckets"]

# Landscape sizes; each is followed by its transpose.
_SIZES = {
    512: "512x512 576x448 640x384 768x320 896x256 1024x256",
    768: "768x768 832x704 896x640 960x576 1024x576 1152x512 1280x448 1408x384 1472x320",
    1024: "1024x1024 1152x896 1216x832 1344x768 1472x704 1600x640 1792x576 2048x512",
}


class EveryDream2Buckets(SetTrainer):
    """The trainer crops to the aspect first and resizes after; which share is lost is the same.

    Args:
        resolution: 512, 768 or 1024, or up to 63 pixels more, which the trainer floors away.

    Raises:
        BucketSettingsError: a resolution whose list is not kept here.
    """

    def __init__(self, resolution: int = 1024) -> None:
        floored = resolution // 64 * 64
        if floored not in _SIZES:
            known = ", ".join(map(str, _SIZES))
            raise BucketSettingsError(f"EveryDream2's sizes are kept for {known}, not for a resolution of {resolution}")
        landscape = [tuple(map(int, size.split("x"))) for size in _SIZES[floored].split()]
        dims = [size for w, h in landscape for size in ([(w, h)] if w == h else [(w, h), (h, w)])]
        super().__init__(BucketSet.from_dims(dims, name="everydream2", vae_factor=64))
        self._switch = AspectSwitch.nearest(self.bucket_set.aspects)

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        return self._switch.index(width / height)
