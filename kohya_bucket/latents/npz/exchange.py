"""Between sd-scripts' npz and a store: what lies beside the images need not be encoded again, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.geometry import cover_resize
from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.files import GroupedSync, make_folder
from kohya_bucket.images.origins import container_of
from kohya_bucket.images.remote import is_url
from kohya_bucket.images.resize import choose_interpolation
from kohya_bucket.latents.architectures import ARCHITECTURES, Architecture
from kohya_bucket.latents.dtypes import from_float32, to_float32
from kohya_bucket.latents.fingerprint import UNKNOWN_VAE, Fingerprint, source_identity
from kohya_bucket.latents.npz.names import CacheFile, cache_files, collisions, npz_path
from kohya_bucket.latents.npz.read_write import (
    BROKEN,
    NpzLatents,
    OpenNpz,
    convert_values,
    mask_values,
    read_keys,
    read_note,
    sizes_in,
    write_npz,
)
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import is_text, relative_source
from kohya_bucket.latents.store.state import source_paths
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest

__all__ = ["Exchange", "export_npz", "import_npz", "npz_item"]


@dataclass
class Exchange:
    """What was converted: `done` latents; `skipped` lists (file, reason)."""

    done: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _ImportOptions:
    """What is recorded of files that do not say what they were made from, and how all are stored."""

    arch: Architecture
    images_root: Path
    dtype: str
    vae: str
    interpolation: str
    collection: str


def import_npz(
    images: Sequence[str],
    output: str | os.PathLike[str],
    arch: Architecture,
    *,
    images_root: Path,
    dtype: str = "float32",
    vae: str = "",
    interpolation: str = "auto",
    collection: str = "",
    captions: Sequence[str | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exchange:
    """Take the npz beside `images` into a store.

    All kinds of keys are read. A file that says what it was made from keeps its fingerprint. Others, made by
    sd-scripts itself, are believed if they are not older than their image. Of a file with several resolutions the
    largest goes into `collection`, the others into `<collection>@<side>`, side being the root of the bucket's area.
    Files of further sizes (`…_at_<width>x<height>.npz`) go into `<collection> to <width>x<height>`.

    Args:
        dtype: storage type; float32 keeps every bit.
        vae: hash of the VAE where the files do not say; "": unknown, which no VAE's hash equals, so that these
            latents are read but count as stale wherever one wants them from a certain VAE.
        interpolation: with which sd-scripts resized where the files do not say; counts with `vae` only. "auto" is
            what sd-scripts 0.10 does by itself, "auto-0.9" what it did before.

    Raises:
        LatentStoreError: the store cannot be written.
        KohyaBucketError: an interpolation that does not exist, or images in object storage.
    """
    if far := next((image for image in images if is_url(image)), None):
        raise KohyaBucketError(f"{far}: npz files are read from folders, not from object storage: copy them here first")
    choose_interpolation((1, 1), (1, 1), interpolation)
    options = _ImportOptions(arch, images_root, dtype, vae, interpolation, collection)
    result = Exchange()
    with StoreWriter(output, images_root=images_root) as writer:
        for n, (image, files) in enumerate(zip(images, cache_files(images, arch), strict=True), 1):
            for found in files:
                _import_one(image, found, writer, options, None if captions is None else captions[n - 1], result)
            if progress is not None:
                progress(n, len(images))
    write_manifest(LatentStore(output))
    return result


def _import_one(
    image: str, found: CacheFile, writer: StoreWriter, options: _ImportOptions, caption: str | None, result: Exchange
) -> None:
    path, arch = found.path, options.arch
    try:
        sizes = _latents_of(image, found, arch)
    except BROKEN as error:
        result.skipped.append((str(path), f"is broken ({error}): delete it, it will be made again"))
        return
    if not sizes:
        result.skipped.append((str(path), f"has no latents of {arch.name}"))
        return
    source = relative_source([image], options.images_root)[0]
    if not is_text(source):
        result.skipped.append(
            (str(path), "the image's name is not UTF-8, and a store cannot hold such names: rename it")
        )
        return
    for rank, (bucket, (item, known, why)) in enumerate(sorted(sizes.items(), key=lambda s: -s[0][0] * s[0][1])):
        if why:
            result.skipped.append((str(path), why))
            continue
        name = options.collection if rank == 0 else f"{options.collection}@{round((bucket[0] * bucket[1]) ** 0.5)}"
        if found.further:
            name = f"{options.collection} to {bucket[0]}x{bucket[1]}".strip()
        mask: npt.NDArray[np.uint8] | None = None
        if item.alpha_mask is not None and not (item.alpha_mask == 1).all():
            mask = np.rint(np.nan_to_num(item.alpha_mask).clip(0, 1) * 255).astype(np.uint8)
        fingerprint = _fingerprint(image, bucket, item, known, options)
        writer.add(
            StoreEntry(source, fingerprint, item.original_size, item.crop_ltrb, caption, name),
            from_float32(item.latents, options.dtype),
            flipped=None if item.flipped is None else from_float32(item.flipped, options.dtype),
            mask=mask, space=arch.space,
        )  # fmt: skip
        result.done += 1


def _latents_of(
    image: str, found: CacheFile, arch: Architecture
) -> dict[tuple[int, int], tuple[NpzLatents, Fingerprint | None, str]]:
    """By bucket what a file holds: latents, fingerprint, and why they are not to be trusted, or "".

    Of two kinds of keys for one bucket those are taken that are to be trusted, or else those that are read first.

    Raises:
        one of `BROKEN`.
    """
    name = os.path.basename(image)
    out: dict[tuple[int, int], tuple[NpzLatents, Fingerprint | None, str]] = {}
    with OpenNpz(found.path) as file:
        for bucket, keys in sorted(sizes_in(file, arch), key=lambda size: not size[1]):
            known = read_note(file, keys)
            why = ""
            if known is not None and known[1] not in ("", name) and not found.whole:
                why = f"it was made from {known[1]}, not from {name}"
            elif known is None and found.path.stat().st_mtime_ns < source_identity(image)[1]:
                why = "it is older than its image and does not say what it was made from"
            if bucket not in out or (out[bucket][2] and not why):
                out[bucket] = read_keys(file, keys, arch), None if known is None else known[0], why
    return out


def _fingerprint(
    image: str, bucket: tuple[int, int], item: NpzLatents, known: Fingerprint | None, options: _ImportOptions
) -> Fingerprint:
    flip, mask = item.flipped is not None, item.alpha_mask is not None
    if known is not None:
        return Fingerprint(**(vars(known) | {"dtype": options.dtype, "kind": "latents", "flip": flip, "mask": mask}))
    nbytes, mtime, _ = source_identity(image)
    (width, height), (bucket_width, bucket_height) = item.original_size, bucket
    sides = (np.array([value], dtype=np.float64) for value in (width, height, width / height,
                                                               *bucket, bucket_width / bucket_height))  # fmt: skip
    resized_width, resized_height = (int(side[0]) for side in cover_resize(*sides))
    resized = (resized_width, resized_height)
    crop = ((resized_width - bucket_width) // 2, (resized_height - bucket_height) // 2)
    return Fingerprint(
        nbytes, mtime, "", options.vae or UNKNOWN_VAE, bucket, resized, crop,
        _resizing(item.original_size, resized, options.interpolation) if options.vae else "unknown",
        options.dtype, "latents", flip, mask,
    )  # fmt: skip


def _resizing(size: tuple[int, int], resized: tuple[int, int], interpolation: str) -> str:
    """The filter and library that sd-scripts resizes with, which always has OpenCV."""
    if size == resized:
        return "none"
    name = choose_interpolation(size, resized, interpolation)
    return f"{name}/{'pillow' if name in ('lanczos', 'box') else 'cv2'}"


def npz_item(store: LatentStore, i: int, arch: Architecture) -> NpzLatents:
    """Item `i`, with the values that npz of this family have.

    Raises:
        LatentStoreError: it is damaged, or has values that this family's npz cannot have.
    """
    info = store.info(i)
    dtype, bucket = info.latents.dtype, (int(store.column("bucket_width")[i]), int(store.column("bucket_height")[i]))

    def values(flipped: bool) -> npt.NDArray[np.float32]:
        return convert_values(to_float32(store.read(i, flipped=flipped), dtype), info.space, arch)

    return NpzLatents(
        values(False), store.original_size(i), store.crop_ltrb(i), values(True) if store.column("flip")[i] else None,
        mask_values(store.read_mask(i), bucket) if store.column("mask")[i] else None,
    )  # fmt: skip


def export_npz(
    store: LatentStore,
    arch: Architecture,
    output: str | os.PathLike[str] | None = None,
    *,
    images_root: Path | None = None,
    collection: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Exchange:
    """Write the items of a collection as sd-scripts' npz: beside the images, or in the same folders of `output`.

    Args:
        arch: the family, with the keys that are to be written, see `Architecture.read_by`.

    Raises:
        LatentStoreError: no such collection; `output` or an image is in object storage, or an image in a container; an
            item does not fit `arch`, is a posterior, or has its image outside the folder that sources are named from,
            so that it has no place in `output`.
    """
    if output is not None and is_url(os.fspath(output)):
        raise LatentStoreError(f"{output}: npz files are read from folders, not from object storage: give a folder")
    result = Exchange()
    items = store.in_collection(collection).tolist()
    if not items:
        raise LatentStoreError(
            f"{store.layout.root} has no collection {collection!r} to export: it holds {store.collections()}"
        )
    paths = source_paths(store, images_root)
    sources = store.strings("source")
    entries = {i: store.entry(i) for i in items}
    shared = collisions([sources[i] for i in items], [entries[i].original_size for i in items])
    if far := next((sources[i] for i in items if is_url(sources[i])), None):
        raise LatentStoreError(f"{far}: this image is in object storage, where no npz can lie beside it")
    if inside := next((paths[i] for i in items if container_of(paths[i])), None):
        raise LatentStoreError(f"{inside}: this image is in a file with others, where no npz can lie beside it")
    for source in () if output is None else (sources[i] for i in items):
        if os.path.isabs(source) or source.startswith("../"):
            raise LatentStoreError(
                f"{source}: this image lies outside the store's folder of images, so its npz would land outside "
                f"{output}: leave out the output, and npz go beside the images"
            )
    with ThreadPoolExecutor(4, "kohya-bucket-npz") as pool:
        groups = GroupedSync(pool)
        for n, i in enumerate(items):
            entry = entries[i]
            _refuse_other_values(store, i, sources[i], arch)
            beside = paths[i] if output is None else os.path.normpath(os.path.join(output, sources[i]))
            target = npz_path(beside, entry.original_size, arch, shared=n in shared)
            make_folder(target.parent)
            write_npz(
                target, npz_item(store, i, arch), entry.fingerprint.bucket_size, arch, entry.fingerprint,
                source_name=os.path.basename(sources[i]), sync=False,
            )  # fmt: skip
            groups.add(target)
            result.done += 1
            if progress is not None:
                progress(n + 1, len(items))
        groups.finish()
    return result


def _refuse_other_values(store: LatentStore, i: int, source: str, arch: Architecture) -> None:
    info = store.info(i)
    if info.is_posterior:
        raise LatentStoreError(
            f"{source} is stored as a posterior, but npz files hold latents: encode it without --posterior"
        )
    made_for = ARCHITECTURES.get(info.space.architecture, arch)
    if (made_for.scale_factor, made_for.shift_factor) != (arch.scale_factor, arch.shift_factor):
        raise LatentStoreError(
            f"{source} was encoded by a VAE of {made_for.name}, which {arch.name} is not trained with: choose that "
            "--arch, or encode with its VAE"
        )
