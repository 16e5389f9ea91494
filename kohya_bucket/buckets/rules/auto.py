"""The rule `auto`: the nearest bucket of a set that was made from the images.

`AutoBuckets` has the name and arguments of the package bucketsampler.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from kohya_bucket.buckets.auto_sets.generate import AutoBucketResult, generate_buckets
from kohya_bucket.buckets.rules.fixed import FixedBuckets
from kohya_bucket.buckets.rules.request import RuleRequest
from kohya_bucket.buckets.sizes import as_sizes

__all__ = ["AutoBuckets", "auto_rule"]


class AutoBuckets(FixedBuckets):
    """Nearest bucket of a set that was made from the data; `from_dims` makes it.

    Args:
        result: what `generate_buckets` returned; kept as `self.result`.
        switching, no_upscale, max_crop: as for `FixedBuckets`.
    """

    def __init__(
        self,
        result: AutoBucketResult,
        *,
        switching: str = "geometric",
        no_upscale: bool = False,
        max_crop: float | None = None,
    ) -> None:
        super().__init__(result.bucket_set, switching=switching, no_upscale=no_upscale, max_crop=max_crop)
        self.result = result

    @classmethod
    def from_dims(
        cls,
        dims: npt.ArrayLike,
        *,
        num_buckets: int = 8,
        target: int | tuple[int, int] = 1024,
        switching: str = "geometric",
        no_upscale: bool = False,
        max_crop: float | None = None,
        **options: Any,
    ) -> AutoBuckets:
        """Generate buckets from [N, 2] sizes and place images into them; `options` as for `generate_buckets`."""
        result = generate_buckets(dims, num_buckets=num_buckets, target=target, **options)
        return cls(result, switching=switching, no_upscale=no_upscale, max_crop=max_crop)


def auto_rule(request: RuleRequest) -> AutoBuckets:
    """`auto`, made from the images that could be read."""
    sizes = as_sizes(request.sizes)
    return AutoBuckets.from_dims(
        sizes[sizes.min(axis=1, initial=1) > 0], num_buckets=request.num_buckets, target=request.max_reso,
        vae_factor=request.reso_steps, min_side=request.min_size, max_side=request.max_size,
        method=request.auto_method, **request.set_options,
    )  # fmt: skip
