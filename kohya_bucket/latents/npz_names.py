"""Which npz each image of a run has: sd-scripts' own file, or a further one where that is already taken.

sd-scripts names a file for the stem and the size of the image. So `a.png` and `a.jpg` may meet in one file, and so do
datasets that have an image at different sizes, for the families whose files hold one. Whoever comes first has the
usual name; the order is that of the datasets, and by name within each, so that every run and every process agrees.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kohya_bucket.buckets.types import IntArray
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.images.paths import file_key
from kohya_bucket.latents.npz import Architecture, collisions, further_path, npz_path
from kohya_bucket.latents.wanted import Wanted

__all__ = ["NpzNames", "has_whole_name", "paths_beside", "paths_of_run"]

Size = tuple[int, int]


class NpzNames:
    """The files of one run of a model family, which its datasets take in their order."""

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        self._files: dict[tuple[str, Size], Path] = {}  # by image and its size
        self._owners: dict[str, tuple[str, Size]] = {}  # by file: whose it is
        self._held: dict[Path, tuple[Size, Size]] = {}  # by file: bucket and resized size that it holds

    def add(
        self,
        images: Sequence[str],
        original_sizes: Sequence[Size],
        bucket_sizes: Sequence[Size],
        resized_sizes: Sequence[Size],
        further: Sequence[bool],
        usual: Callable[[str, Size], str | Path] | None = None,
    ) -> list[Path]:
        """Files of one dataset's images, which may be the same ones as those of a dataset before it.

        Args:
            images: N paths; one may come several times, with several sizes.
            original_sizes, bucket_sizes, resized_sizes: N (width, height) each.
            further: whether this is a size besides the one at which the dataset has the image.
            usual: file of (image, original size) by sd-scripts' own rule; `npz_path` by default.
        """
        usual = usual or (lambda image, size: npz_path(image, size, self._arch))
        distinct = list(dict.fromkeys(zip(images, original_sizes, strict=True)))
        shared = collisions([image for image, _ in distinct], [size for _, size in distinct])
        files = {item: self._file(*item, i in shared, usual) for i, item in enumerate(distinct)}
        out = []
        for item, bucket, resized, more in zip(
            zip(images, original_sizes, strict=True), bucket_sizes, resized_sizes, further, strict=True
        ):
            path = files[item]
            if more or not self._may_hold(path, (bucket, resized)):
                path = further_path(path, bucket)
            out.append(path)
        return out

    def _file(self, image: str, size: Size, shared: bool, usual: Callable[[str, Size], str | Path]) -> Path:
        who = file_key(image), size
        if who not in self._files:
            path = Path(usual(image, size))
            if shared or self._owners.setdefault(file_key(path), who) != who:
                path = npz_path(image, size, self._arch, shared=True)
            self._files[who] = path
        return self._files[who]

    def _may_hold(self, path: Path, sizes: tuple[Size, Size]) -> bool:
        return self._arch.multi_resolution or self._held.setdefault(path, sizes) == sizes


def paths_of_run(parts: Sequence[Wanted], arch: Architecture, root: Path | None, images_root: Path) -> list[list[Path]]:
    """For each part, the file of each of its items: beside the images, or in the same folders under `root`."""
    names = NpzNames(arch)
    out: list[list[Path]] = [[] for _ in parts]
    for dataset in sorted({part.dataset for part in parts}):
        here = [(k, part) for k, part in enumerate(parts) if part.dataset == dataset]
        found = iter(
            names.add(
                [image for _, part in here for image in paths_beside(part.paths, root, images_root)],
                [size for _, part in here for size in _pairs(part.original_sizes)],
                [size for _, part in here for size in _pairs(part.bucket_sizes)],
                [size for _, part in here for size in _pairs(part.resized_sizes)],
                [part.further for _, part in here for _ in part.paths],
            )
        )
        for k, part in here:
            out[k] = [next(found) for _ in part.paths]
    return out


def paths_beside(images: Sequence[str], root: Path | None, images_root: Path) -> list[str]:
    """Where the images would be if their folders were under `root`.

    Raises:
        LatentStoreError: an image is not under `images_root`, so that it would be outside `root`.
    """
    if root is None:
        return list(images)
    inside = [os.path.relpath(image, images_root) for image in images]
    for image, name in zip(images, inside, strict=True):
        if name.startswith(os.pardir + os.sep):
            raise LatentStoreError(
                f"{image} is not in {images_root}, so its npz would land outside {root}: name a folder that holds "
                "all images, or leave out the output, and npz go beside the images"
            )
    return [str(root / name) for name in inside]


def has_whole_name(path: Path, image: str) -> bool:
    """Whether a file is named by the image's whole name, extension included, since another has the usual name."""
    stem, extension = os.path.splitext(os.path.basename(image))
    return bool(extension) and path.name.startswith(f"{stem}{extension}_")


def _pairs(sizes: IntArray) -> list[Size]:
    return [(width, height) for width, height in sizes.tolist()]
