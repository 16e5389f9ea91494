"""Which images `skip_image_resolution` leaves out.

Source: sd-scripts since 0.10.2, `DreamBoothDataset.__init__` and `FineTuningDataset.__init__`. The product of the
sides counts, not their shape, and an image of just as many pixels is left out. It happens before images are held
back for validation and before regularization images are counted, which are left out alike.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.adapter.kept_sizes import scan_sizes
from kohya_bucket.sdscripts.config.model import DatasetConfig, SubsetConfig
from kohya_bucket.texts import some

__all__ = ["Skips", "skipped_images", "warn_of_skips"]

Size = tuple[int, int]


@dataclass(frozen=True)
class Skips:
    """Which of N images are left out.

    Attributes:
        reasons: why, by position.
        unreadable: those among them that have no pixels because they cannot be read.
    """

    reasons: dict[int, str] = field(default_factory=dict)
    unreadable: tuple[int, ...] = ()

    def __contains__(self, position: int) -> bool:
        return position in self.reasons


def skipped_images(
    paths: Sequence[str], noted: Sequence[Size | None], limit: Size | None, metadata_cache: str = "auto"
) -> Skips:
    """Which images are left out.

    Args:
        paths: [N] the files.
        noted: [N] sizes that sd-scripts goes by without looking at the file, or None; those are read.
        limit: `skip_image_resolution`; None leaves out nothing.
        metadata_cache: the option of that name.
    """
    if limit is None or not len(paths):
        return Skips()
    sizes = np.array([size or (0, 0) for size in noted], dtype=np.int64)
    unknown = [i for i, size in enumerate(noted) if size is None]
    failed: dict[int, str] = {}
    if unknown:
        scan = scan_sizes([paths[i] for i in unknown], metadata_cache)
        sizes[unknown] = scan.sizes
        failed = {unknown[i]: reason for i, _, reason in scan.failures}
    small = np.flatnonzero(sizes.prod(axis=1) <= limit[0] * limit[1]).tolist()
    bound = f"no more pixels than skip_image_resolution {limit[0]}x{limit[1]}"
    reasons = {i: failed.get(i) or f"{sizes[i, 0]}x{sizes[i, 1]}: {bound}" for i in small}
    return Skips(reasons, tuple(i for i in small if i in failed))


def warn_of_skips(
    paths: Sequence[str], skips: Skips, dataset: DatasetConfig, subset: SubsetConfig, findings: Findings
) -> None:
    """Say which images are left out because they cannot be read, and if no image of a subset is left."""
    unreadable = [f"{paths[i]}: {skips.reasons[i]}" for i in skips.unreadable if os.path.exists(paths[i])]
    if unreadable:
        message = (
            f"{len(unreadable)} image{'s' * (len(unreadable) != 1)} cannot be read, and with skip_image_resolution "
            f"sd-scripts leaves {'it' if len(unreadable) == 1 else 'them'} out without a message ({some(unreadable)})"
        )
        findings.warning("unreadable-image", subset.place, message, "repair or remove", unreadable)
    if not skips.reasons or len(skips.reasons) < len(paths):
        return
    width, height = dataset.skip_image_resolution or (0, 0)
    message = f"all {len(paths)} images have no more pixels than skip_image_resolution {width}x{height}"
    remedy = "lower it, or remove the subset"
    if dataset.validation_split > 0 and not subset.is_reg:
        message += ", and with validation_split sd-scripts stops at a folder without images"
        findings.error("all-skipped", subset.place, message, remedy)
    else:
        findings.warning("all-skipped", subset.place, message, remedy)
