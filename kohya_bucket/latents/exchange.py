"""Between a store and sd-scripts' npz, both ways and for every model family."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kohya_bucket.buckets.geometry import cover_resize
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.dtypes import from_float32, to_float32
from kohya_bucket.latents.entries import Entry
from kohya_bucket.latents.fingerprint import UNKNOWN_VAE, Fingerprint, source_identity
from kohya_bucket.latents.layout import LatentSpace, is_text, relative_source
from kohya_bucket.latents.npz import (
    ARCHITECTURES,
    Architecture,
    NpzLatents,
    buckets_in,
    collisions,
    npz_path,
    read_npz,
    size_from_name,
    stored_fingerprint,
    write_npz,
)
from kohya_bucket.latents.sinks import convert_values
from kohya_bucket.latents.state import source_paths
from kohya_bucket.latents.store import LatentStore
from kohya_bucket.latents.writer import StoreWriter, write_manifest

__all__ = ["Exchange", "export_npz", "import_npz"]


@dataclass
class Exchange:
    """What was converted: `done` latents; `skipped` lists (file, reason)."""

    done: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


def import_npz(
    images: Sequence[str],
    output: str | os.PathLike[str],
    arch: Architecture,
    *,
    images_root: Path,
    dtype: str = "float32",
    vae: str = "",
    collection: str = "",
    captions: Sequence[str | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exchange:
    """Take the npz beside `images` into a store.

    A file that says what it was made from keeps its fingerprint. Others, made by sd-scripts itself, are believed
    if they are not older than their image. Of a file with several resolutions the largest goes into
    `collection`, the others into `<collection>@<side>`, side being the root of the bucket's area.

    Args:
        dtype: storage type; float32 keeps every bit.
        vae: hash of the VAE where the files do not say; "": unknown, which no VAE's hash equals.
    """
    result = Exchange()
    found = _files_of(images, arch)
    with StoreWriter(output, images_root=images_root) as writer:
        for n, (image, (path, shared)) in enumerate(zip(images, found, strict=True), 1):
            if path is not None:
                _import_one(
                    image, path, writer, arch, images_root, dtype, vae, collection, shared,
                    None if captions is None else captions[n - 1], result,
                )  # fmt: skip
            if progress is not None:
                progress(n, len(images))
    write_manifest(LatentStore(output))
    return result


def _files_of(images: Sequence[str], arch: Architecture) -> list[tuple[Path | None, bool]]:
    """The cache file of each image, by exact name, and whether it is named by the image's whole file name."""
    folders: dict[str, dict[str, list[str]]] = {}
    out: list[tuple[Path | None, bool]] = []
    for image in images:
        folder, name = os.path.split(os.path.abspath(image))
        if folder not in folders:
            folders[folder] = {}
            for file in sorted(os.listdir(folder)):
                if file.endswith(arch.suffix):
                    stem = file[: -len(arch.suffix)].rpartition("_")[0]
                    folders[folder].setdefault(stem, []).append(file)
        stem = os.path.splitext(name)[0]
        old = os.path.join(folder, stem + ".npz")
        whole = [f for f in folders[folder].get(name, []) if size_from_name(f, name, arch)]
        plain = [f for f in folders[folder].get(stem, []) if size_from_name(f, stem, arch)]
        if whole:
            out.append((Path(folder, whole[0]), True))
        elif not arch.multi_resolution and os.path.exists(old):
            out.append((Path(old), False))
        else:
            out.append((Path(folder, plain[0]) if plain else None, False))
    return out


def _import_one(
    image: str, path: Path, writer: StoreWriter, arch: Architecture, images_root: Path, dtype: str, vae: str,
    collection: str, shared: bool, caption: str | None, result: Exchange,
) -> None:  # fmt: skip
    try:
        buckets = sorted(buckets_in(path, arch), key=lambda b: -b[0] * b[1])
        items = [(bucket, read_npz(path, bucket, arch), stored_fingerprint(path, bucket, arch)) for bucket in buckets]
    except LatentStoreError as error:
        result.skipped.append((str(path), str(error).removeprefix(f"{path} ")))
        return
    source = relative_source([image], images_root)[0]
    if not is_text(source):
        result.skipped.append((str(path), "the image's name is no UTF-8, which a store cannot hold: rename it"))
        return
    for rank, (bucket, item, known) in enumerate(items):
        if known is not None and known[1] not in ("", os.path.basename(image)) and not shared:
            result.skipped.append((str(path), f"it was made from {known[1]}, not from {os.path.basename(image)}"))
            continue
        if known is None and path.stat().st_mtime_ns < source_identity(image)[1]:
            result.skipped.append((str(path), "it is older than its image and does not say what it was made from"))
            continue
        fingerprint = _fingerprint(image, bucket, item, known[0] if known else None, dtype, vae)
        name = collection if rank == 0 else f"{collection}@{round((bucket[0] * bucket[1]) ** 0.5)}"
        mask = None
        if item.alpha_mask is not None and not (item.alpha_mask == 1).all():
            mask = np.rint(item.alpha_mask * 255).astype(np.uint8)
        space = LatentSpace(arch.scale_factor, arch.shift_factor, arch.values, arch.stride, arch.name)
        writer.add(
            Entry(source, fingerprint, item.original_size, item.crop_ltrb, caption, name),
            from_float32(item.latents, dtype),
            flipped=None if item.flipped is None else from_float32(item.flipped, dtype),
            mask=mask, space=space,
        )  # fmt: skip
        result.done += 1


def _fingerprint(
    image: str, bucket: tuple[int, int], item: NpzLatents, known: Fingerprint | None, dtype: str, vae: str
) -> Fingerprint:
    flip, mask = item.flipped is not None, item.alpha_mask is not None
    if known is not None:
        return Fingerprint(**(vars(known) | {"dtype": dtype, "flip": flip, "mask": mask}))
    nbytes, mtime, _ = source_identity(image)
    (width, height), (bucket_width, bucket_height) = item.original_size, bucket
    sides = (np.array([value], dtype=np.float64) for value in (width, height, width / height,
                                                               *bucket, bucket_width / bucket_height))  # fmt: skip
    resized_width, resized_height = (int(side[0]) for side in cover_resize(*sides))
    crop = ((resized_width - bucket_width) // 2, (resized_height - bucket_height) // 2)
    return Fingerprint(
        nbytes, mtime, "", vae or UNKNOWN_VAE, bucket, (resized_width, resized_height), crop, "unknown", dtype,
        "latents", flip, mask,
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

    Raises:
        LatentStoreError: no such collection; an item does not fit `arch`, is a posterior, or has its image outside
            the folder that sources are named from, so that it has no place in `output`.
    """
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
    for source in () if output is None else (sources[i] for i in items):
        if os.path.isabs(source) or source.startswith("../"):
            raise LatentStoreError(
                f"{source}: this image lies outside the store's folder of images, so its npz would land outside "
                f"{output}: leave out the output, and npz go beside the images"
            )
    for n, i in enumerate(items):
        entry, info = entries[i], store.info(i)
        if info.is_posterior:
            raise LatentStoreError(f"{sources[i]} is stored as a posterior, and npz hold latents: encode it without")
        made_for = ARCHITECTURES.get(info.space.architecture, arch)
        if (made_for.scale_factor, made_for.shift_factor) != (arch.scale_factor, arch.shift_factor):
            raise LatentStoreError(f"{sources[i]} was encoded by a VAE of {made_for.name}, which {arch.name} is not "
                                   "trained with: choose that --arch, or encode with its VAE")  # fmt: skip
        beside = paths[i] if output is None else os.path.normpath(os.path.join(output, sources[i]))
        target = npz_path(beside, entry.original_size, arch, shared=n in shared)
        dtype, bucket = store.storage(i), entry.fingerprint.bucket_size
        plain = convert_values(to_float32(store.read(i), dtype)[None], info.space, arch)[0]
        flipped = None
        if entry.fingerprint.flip:
            flipped = convert_values(to_float32(store.read(i, flipped=True), dtype)[None], info.space, arch)[0]
        alpha = None
        if entry.fingerprint.mask:
            mask = store.read_mask(i)
            alpha = np.ones(bucket[::-1], np.float32) if mask is None else mask.astype(np.float32) / np.float32(255)
        target.parent.mkdir(parents=True, exist_ok=True)
        item = NpzLatents(plain, entry.original_size, entry.crop_ltrb, flipped, alpha)
        write_npz(target, item, bucket, arch, entry.fingerprint, source_name=os.path.basename(sources[i]))
        result.done += 1
        if progress is not None:
            progress(n + 1, len(items))
    return result
