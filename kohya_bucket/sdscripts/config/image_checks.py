"""What only the images' headers tell: sizes that metadata states wrongly, control images that do not fit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.adapter.kept_sizes import scan_sizes
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.sizes import SizeScan
from kohya_bucket.sdscripts.config.read import ReadDataset
from kohya_bucket.texts import counted, some

__all__ = ["check_images"]


def check_images(
    dataset: ReadDataset,
    sizes: IntArray,
    findings: Findings,
    metadata_cache: str = "auto",
    progress: Progress | None = None,
) -> SizeScan | None:
    """Compare what the config and its metadata say with the files.

    Args:
        dataset: the dataset and its images.
        sizes: [N, 2] the sizes that the images are placed by: stated ones, or read ones; 0 where unreadable.
        findings: where to report.
        metadata_cache: the option of that name.
        progress: called as `progress(done, total)` while headers are read.

    Returns:
        what the headers say of the images whose sizes are stated.
    """
    images, scan = dataset.images, None
    stated = np.flatnonzero(images.stated_sizes.min(axis=1, initial=1) > 0)
    if len(stated):
        scan = scan_sizes([images.paths[i] for i in stated], metadata_cache, progress)
        _check_stated(dataset, stated, scan.sizes, findings)
    if images.conditioning:
        control = scan_sizes(images.conditioning, metadata_cache, progress).sizes
        _check_control(dataset, sizes, control, findings)
    if not dataset.config.enable_bucket:
        _check_one_size(dataset, sizes, findings)
    return scan


def _check_stated(dataset: ReadDataset, rows: npt.NDArray[np.intp], true: IntArray, findings: Findings) -> None:
    images, where = dataset.images, dataset.config.place
    unreadable = [images.keys[i] for i, size in zip(rows.tolist(), true.tolist(), strict=True) if not size[0]]
    if unreadable:
        count = counted(len(unreadable), "image")
        message = f"{count} with a size in the metadata cannot be read, and sd-scripts stops there"
        findings.error("unreadable-image", where, f"{message} ({some(unreadable)})", "replace or remove", unreadable)
    differs = (true[:, 0] > 0) & (true != images.stated_sizes[rows]).any(axis=1)
    if differs.any():
        names = [images.keys[i] for i in rows[differs].tolist()]
        first = rows[differs][0]
        said = "x".join(map(str, images.stated_sizes[first].tolist()))
        is_now = "x".join(map(str, true[differs][0].tolist()))
        message = (
            f"{counted(len(names), 'image')} with a different size than the metadata says, so sd-scripts distorts them "
            f"({images.keys[first]}: {said} stated, {is_now} in fact)"
        )
        findings.warning("stated-size", where, message, "write the metadata again", names)


def _check_control(dataset: ReadDataset, sizes: IntArray, control: IntArray, findings: Findings) -> None:
    images = dataset.images
    wanted = np.array([bool(path) for path in images.conditioning])
    wrong = np.flatnonzero(wanted & (sizes[:, 0] > 0) & (sizes != control).any(axis=1))
    if len(wrong) and dataset.config.enable_bucket:
        i = int(wrong[0])
        names = [images.conditioning[k] for k in wrong.tolist()]
        shown = "x".join(map(str, control[i].tolist())) if control[i][0] else "unreadable"
        message = (
            f"{counted(len(names), 'control image', 'has', 'have')} a different size than their image, and sd-scripts "
            "stops there "
            f"({names[0]}: {shown}, its image {'x'.join(map(str, sizes[i].tolist()))})"
        )
        findings.error("control-size", dataset.config.place, message, "make the sizes equal", names)


def _check_one_size(dataset: ReadDataset, sizes: IntArray, findings: Findings) -> None:
    config, images = dataset.config, dataset.images
    if config.resolution is None or any(s.random_crop or s.face_crop_aug_range for s in config.subsets):
        return
    other = np.flatnonzero((sizes[:, 0] > 0) & (sizes != np.array(config.resolution)).any(axis=1))
    if len(other):
        names = [images.keys[i] for i in other.tolist()]
        width, height = config.resolution
        message = (
            f"{counted(len(names), 'image')} with a different size than {width}x{height}: without enable_bucket "
            "sd-scripts stops at the first of them, unless latents are cached"
        )
        findings.warning("not-this-size", config.place, message, "set enable_bucket = true", names)
