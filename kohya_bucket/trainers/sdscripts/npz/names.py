"""The names of npz, and which one each image of a run has: sd-scripts' own, or a further one where that is taken.

sd-scripts names a file for the stem and the size of the image. So `a.png` and `a.jpg` may meet in one file, and so do
datasets that have an image at different sizes, for the families whose files hold one. The one that comes first has the
usual name; the order is that of the datasets, and by name within each, so that every run and every process agrees.
By these names the cache files beside images are found again, sd-scripts' and this package's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kohya_bucket.buckets.sizes import Size
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.images.listing import file_key
from kohya_bucket.images.origins import container_of
from kohya_bucket.images.remote import is_url
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.trainers.sdscripts.families import Family

_SHARDS = "only shards can hold its latents"
_FURTHER = re.compile(r"(.+)_at_(\d{4,})x(\d{4,})\.npz")


def npz_path(image: str | os.PathLike[str], size: Size, arch: Family, *, shared: bool = False) -> Path:
    """The file sd-scripts looks for: `<stem>_<width>x<height><suffix>` beside the image, of the image's own size.

    With `shared`, another image of the folder has the same stem and size (`a.png`, `a.jpg`): sd-scripts lets
    both use one file; here this one's file is named by the whole file name. SD and SDXL prefer an old
    `<stem>.npz` where one exists; so does this function.
    """
    text = os.fspath(image)
    stem = os.path.splitext(text)[0]
    if arch.plain_until and not shared and os.path.exists(stem + ".npz"):
        return Path(stem + ".npz")
    return Path(f"{text if shared else stem}_{size[0]:04d}x{size[1]:04d}{arch.suffix}")


def further_path(path: Path, bucket_size: Size) -> Path:
    """The file for a further size of an image, beside its usual npz.

    Its name does not end as sd-scripts' do, so that nothing but this package reads it.
    """
    width, height = bucket_size
    return path.with_name(f"{path.name.removesuffix('.npz')}_at_{width:04d}x{height:04d}.npz")


def usual_name(further: str) -> str | None:
    """The name of the usual npz beside which a file of that name holds a further size; None if it holds none."""
    match = _FURTHER.fullmatch(further)
    return f"{match[1]}.npz" if match else None


def collisions(images: Sequence[str], sizes: Sequence[Size]) -> set[int]:
    """Positions of images that would share a cache file with an earlier one (by name): same stem, same size."""
    first: dict[tuple[str, int, int], int] = {}
    shared = set()
    for i in sorted(range(len(images)), key=lambda i: images[i]):
        key = (os.path.splitext(images[i])[0], int(sizes[i][0]), int(sizes[i][1]))
        if first.setdefault(key, i) != i:
            shared.add(i)
    return shared


class NpzNames:
    """The files of one run of a model family, which its datasets take in their order."""

    def __init__(self, arch: Family) -> None:
        self._arch = arch
        self._files: dict[tuple[str, Size], Path] = {}  # by image and its size
        self._owners: dict[str, tuple[str, Size]] = {}  # by file: whose it is
        self._held: dict[tuple[Path, Size | None], tuple[Size, Size]] = {}  # bucket and resized size, by room for one

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
            room = path, bucket if self._arch.multi_resolution else None
            if more or self._held.setdefault(room, (bucket, resized)) != (bucket, resized):
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


def paths_of_run(parts: Sequence[LatentItems], arch: Family, root: Path | None, images_root: Path) -> list[list[Path]]:
    """For each part, the file of each of its items: beside the images, or in the same folders under `root`."""
    names = NpzNames(arch)
    out: dict[int, list[Path]] = {}
    for dataset in sorted({part.dataset for part in parts}):
        here = {k: part for k, part in enumerate(parts) if part.dataset == dataset}
        images = [image for part in here.values() for image in paths_beside(part.paths, root, images_root)]
        original, bucket, resized = (
            [(width, height) for part in here.values() for width, height in getattr(part, name).tolist()]
            for name in ("original_sizes", "bucket_sizes", "resized_sizes")
        )
        further = [part.further for part in here.values() for _ in part.paths]
        paths = iter(names.add(images, original, bucket, resized, further))
        out |= {k: [next(paths) for _ in part.paths] for k, part in here.items()}
    return [out[k] for k in range(len(parts))]


def paths_beside(images: Sequence[str], root: Path | None, images_root: Path) -> list[str]:
    """Where the images would be if their folders were under `root`. Raises `LatentStoreError` for an image in object
    storage, in a container, or outside `images_root`."""
    if far := next((image for image in images if is_url(image)), None):
        raise LatentStoreError(f"{far}: this image is in object storage, where no npz can lie beside it: {_SHARDS}")
    if inside_other := next(filter(container_of, images), None):
        raise LatentStoreError(
            f"{inside_other}: this image is in a file with others, where no npz can lie beside it: {_SHARDS}"
        )
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


def why_too_long(path: str | os.PathLike[str]) -> str:
    """Why no cache can have this name, and what to do; "" where one can."""
    folder, name = os.path.split(path)
    length = len(name if os.name == "nt" else os.fsencode(name))
    try:
        most = int(os.pathconf(folder, "PC_NAME_MAX"))
    except (AttributeError, OSError, ValueError):  # Windows, or the folder is not there yet
        most = 255
    if length <= most:
        return ""
    return f"its cache …{name[-40:]} would need a name of {length} bytes, {length - most} more than there can be: " \
           "shorten the image's name"  # fmt: skip


def refuse_too_long(files: Iterable[tuple[str, str]], otherwise: str) -> None:
    """Raise `LatentStoreError` for pairs of an image and its cache of which some cannot be named; before encoding.

    Args:
        otherwise: what helps too.
    """
    long = [(image, why) for image, path in files if (why := why_too_long(path))]
    if long:
        more = f", and {len(long) - 1} more like it" if len(long) > 1 else ""
        raise LatentStoreError(f"{long[0][0]}{more}: {long[0][1]}, or {otherwise}")


def has_whole_name(path: Path, image: str) -> bool:
    """Whether a file is named by the image's whole name, extension included, since another has the usual name."""
    stem, extension = os.path.splitext(os.path.basename(image))
    return bool(extension) and path.name.startswith(f"{stem}{extension}_")


class CacheFile(NamedTuple):
    """A cache file; `further`, it is of a further size."""

    path: Path
    further: bool = False


def cache_files(images: Sequence[str], arch: Family) -> Iterator[list[CacheFile]]:
    """The cache files of each image, by exact name: sd-scripts' own, then those of further sizes."""
    folders: dict[str, tuple[dict[str, str], dict[str, list[str]]]] = {}
    for image in images:
        folder, name = os.path.split(os.path.abspath(image))
        if folder not in folders:
            folders[folder] = _listed(folder, arch)
        usual, further = folders[folder]
        stem = os.path.splitext(name)[0]
        plain = f"{stem}.npz" if arch.plain_until and os.path.exists(os.path.join(folder, f"{stem}.npz")) else ""
        first = usual.get(name) or plain or usual.get(stem)
        more = [CacheFile(Path(folder, file), further=True) for file in further.get(first or "", [])]
        yield [CacheFile(Path(folder, first)), *more] if first else []


def _listed(folder: str, arch: Family) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Cache files of a folder: sd-scripts' by the image's stem or name, further ones by the file they belong to."""
    form = re.compile(r"(?s)(.+)_\d{4,}x\d{4,}" + re.escape(arch.suffix))
    usual: dict[str, str] = {}
    further: dict[str, list[str]] = {}
    for file in sorted(os.listdir(folder)):
        if match := form.fullmatch(file):
            usual.setdefault(match[1], file)
        elif (owner := usual_name(file)) is not None:
            further.setdefault(owner, []).append(file)
    return usual, further
