"""Captions cost too: buckets by their length as well, for models whose text and image tokens share attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.checks import array_of, whole
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.costs import as_tokens


class CaptionBands(NamedTuple):
    """Images of a bucket whose captions are about as long, as buckets of their own.

    Attributes:
        bucket_ids: [N] band of each image, for `plan_epoch`; -1 for images without a bucket.
        bucket: [B] bucket that a band is of.
        tokens: [B] caption tokens of a band's images, their mean.
    """

    bucket_ids: IntArray
    bucket: IntArray
    tokens: npt.NDArray[np.int64]

    def bucket_tokens(self, image_tokens: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """[B] tokens of an image and its caption, for `plan_epoch`, from the [K] tokens of the buckets' images."""
        tokens: npt.NDArray[np.int64] = as_tokens(image_tokens, "image_tokens")[self.bucket] + self.tokens
        return tokens


def caption_bands(bucket_ids: npt.ArrayLike, caption_tokens: npt.ArrayLike, bands: int = 8) -> CaptionBands:
    """Divide each bucket into bands of as many images, from short captions to long ones.

    A batch is then of one band, so captions are padded little, and `plan_epoch` knows what its images cost with their
    text: give it `bucket_ids`, `bucket_tokens` and `token_cost`. Bands make more short batches, as buckets do.

    Args:
        bucket_ids: [N] bucket of each image; -1 for none.
        caption_tokens: [N] tokens of each image's caption, as a tokenizer counts them.
        bands: of each bucket; fewer where it has fewer images, or captions of fewer lengths.

    Raises:
        PlanError: an argument is not what it must be.

    Examples:
        >>> found = caption_bands([0, 0, 0, 0, 1, 1], [10, 300, 20, 310, 5, 5], bands=2)
        >>> found.bucket_ids.tolist(), found.bucket.tolist(), found.tokens.tolist()
        ([0, 1, 0, 1, 2, 2], [0, 0, 1], [15, 305, 5])
        >>> found.bucket_tokens([1024, 4096]).tolist()
        [1039, 1329, 4101]
    """
    ids = array_of("bucket_ids", bucket_ids, dtype=np.int64)
    tokens = as_tokens(caption_tokens, "caption_tokens", least=0)
    if ids.ndim != 1 or tokens.shape != ids.shape:
        raise PlanError(f"bucket_ids and caption_tokens must have one number for each image, got {ids.shape} and "
                        f"{tokens.shape}")  # fmt: skip
    bands = whole("bands", bands, 1)
    placed = np.flatnonzero(ids >= 0)
    order = placed[np.lexsort((tokens[placed], ids[placed]))]
    bucket, first, count = np.unique(ids[order], return_index=True, return_counts=True)
    number = np.repeat(np.arange(len(bucket)), count)
    band = (np.arange(len(order)) - first[number]) * bands // count[number]
    same = (np.diff(tokens[order], prepend=-1) == 0) & (np.diff(number, prepend=-1) == 0)
    band = band[np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))]  # captions of one length stay together
    _, found, of_image = np.unique(number * bands + band, return_index=True, return_inverse=True)
    out = np.full(len(ids), -1, dtype=np.int32)
    out[order] = of_image.reshape(-1)
    mean = np.bincount(out[order], weights=tokens[order]) / np.bincount(out[order])
    return CaptionBands(out, ids[order][found].astype(np.int32), np.rint(mean).astype(np.int64))
