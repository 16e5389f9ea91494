"""Between sd-scripts' npz and a store: what lies beside the images need not be encoded again, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import Size
from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.extras import argument
from kohya_bucket.files import GroupedSync, make_folder
from kohya_bucket.images.remote import is_url
from kohya_bucket.images.stamps import Stamp
from kohya_bucket.latents.dtypes import from_float32, to_float32
from kohya_bucket.latents.fingerprint import UNKNOWN_VAE, Fingerprint, as_text, source_now
from kohya_bucket.latents.items import EncodeOptions
from kohya_bucket.latents.maintenance import source_paths
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import is_text, relative_source
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.trainers.door.cache_files import Exchange
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES, Family
from kohya_bucket.trainers.sdscripts.npz.check import made_from, trainers_fingerprint
from kohya_bucket.trainers.sdscripts.npz.names import CacheFile, cache_files, collisions, npz_path, paths_beside
from kohya_bucket.trainers.sdscripts.npz.read_write import (
    NpzLatents,
    OpenNpz,
    convert_values,
    mask_values,
    read_keys,
    refuse_foreign,
    sizes_in,
    write_npz,
)

Progress = Callable[[int, int], None]


def import_npz(
    images: Sequence[str],
    output: str | os.PathLike[str],
    arch: Family,
    *,
    images_root: Path,
    dtype: str = "float32",
    vae: str = "",
    collection: str = "",
    progress: Progress | None = None,
) -> Exchange:
    """Take the npz beside `images` into a store.

    All kinds of keys are read. A file that says what it was made from keeps its fingerprint. Others, made by
    sd-scripts itself, are believed if their image was not changed or renamed since. Of a file with several resolutions
    the largest goes into `collection`, the others into `<collection>@<side>`, side being the root of the bucket's area.
    Files of further sizes (`…_at_<width>x<height>.npz`) go into `<collection> to <width>x<height>`.

    Args:
        dtype: storage type; float32 keeps every bit.
        vae: hash of the VAE where the files do not say; "": unknown, which no VAE's hash equals, so that these
            latents are read but count as stale wherever one wants them from a certain VAE.

    Raises:
        LatentStoreError: the store cannot be written.
        KohyaBucketError: images in object storage.
    """
    if far := next((image for image in images if is_url(image)), None):
        raise KohyaBucketError(f"{far}: npz files are read from folders, not from object storage: copy them here first")
    encoding = EncodeOptions(vae, dtype, collection=collection)
    result = Exchange()
    with StoreWriter(output, images_root=images_root) as writer:
        store = LatentStore(output)
        items = zip(store.strings("collection"), store.strings("source"), strict=True)
        captions = dict(zip(items, store.strings("caption"), strict=True))  # stay
        for n, (image, caches) in enumerate(zip(images, cache_files(images, arch), strict=True), 1):
            source = relative_source([image], images_root)[0]
            for cache in caches:
                reasons = _add_latents(writer, image, source, cache, arch, encoding, captions)
                result.skipped += [(str(cache.path), reason) for reason in reasons if reason]
                result.done += reasons.count("")
            if progress is not None:
                progress(n, len(images))
    write_manifest(LatentStore(output))
    return result


def _add_latents(
    writer: StoreWriter, image: str, source: str, cache: CacheFile, arch: Family, encoding: EncodeOptions,
    captions: Mapping[tuple[str, str], str | None],
) -> list[str]:  # fmt: skip
    """Add what a file holds to a store; for each of its sizes, or for the file, "" or why it is not added."""
    sizes: dict[Size, tuple[NpzLatents, Fingerprint | None, str]] = {}
    stamp = source_now(image)  # before its cache is compared with it
    try:
        with OpenNpz(cache.path) as file:
            for bucket, keys in sorted(sizes_in(file, arch), key=lambda found: not found[1]):  # plain keys last
                noted, reasons = made_from(file, keys, Path(image))
                # Of two kinds of keys for one bucket those that are to be trusted, or else those that are read first.
                if bucket not in sizes or (sizes[bucket][2] and not reasons):
                    sizes[bucket] = read_keys(file, keys, arch), noted, as_text(reasons)
    except (FileNotFoundError, LatentStoreError) as error:
        return [f"is broken ({error}): delete it, it will be made again"]
    if not sizes:
        return [f"has no latents of {arch.name}"]
    if not is_text(source):
        return ["the image's name is not UTF-8, and a store cannot hold such names: rename it"]
    # The largest has the collection's own name, so that a store holds no image twice in one.
    by_area = sorted(sizes.items(), key=lambda found: -found[0][0] * found[0][1])
    for rank, (bucket, (item, noted, why)) in enumerate(by_area):
        if why:
            continue
        name = encoding.collection if rank == 0 else f"{encoding.collection}@{round((bucket[0] * bucket[1]) ** 0.5)}"
        if cache.further:
            name = f"{encoding.collection} to {bucket[0]}x{bucket[1]}".strip()
        mask: npt.NDArray[np.uint8] | None = None
        if item.alpha_mask is not None and not (item.alpha_mask == 1).all():
            mask = np.rint(np.nan_to_num(item.alpha_mask).clip(0, 1) * 255).astype(np.uint8)
        fingerprint = _fingerprint(stamp, bucket, item, noted, encoding)
        entry = StoreEntry(source, fingerprint, item.original_size, item.crop_ltrb, captions.get((name, source)), name)
        plain = from_float32(item.latents, encoding.dtype)
        flipped = None if item.flipped is None else from_float32(item.flipped, encoding.dtype)
        writer.add(entry, plain, flipped=flipped, mask=mask, space=arch.space)
    return [why for _, (_, _, why) in by_area]


def _fingerprint(
    stamp: Stamp, bucket: tuple[int, int], item: NpzLatents, noted: Fingerprint | None, encoding: EncodeOptions
) -> Fingerprint:
    flip, mask = item.flipped is not None, item.alpha_mask is not None
    if noted is not None:
        return replace(noted, dtype=encoding.dtype, kind="latents", flip=flip, mask=mask)
    vae = encoding.vae or UNKNOWN_VAE
    made = trainers_fingerprint(*stamp, vae, item.original_size, bucket, flip=flip, mask=mask)
    return replace(made, dtype=encoding.dtype, interpolation=made.interpolation if encoding.vae else "unknown")


def npz_item(store: LatentStore, i: int, arch: Family) -> NpzLatents:
    """Item `i`, with the values that npz of this family have. Raises `LatentStoreError` if it is damaged, or has values
    that this family's npz cannot have."""
    info = store.info(i)
    dtype, bucket = info.latents.dtype, store.numbers("bucket_size", i)

    def values(flipped: bool) -> npt.NDArray[np.float32]:
        return convert_values(to_float32(store.read(i, flipped=flipped), dtype), info.space, arch)

    return NpzLatents(
        values(False), store.numbers("original_size", i), store.numbers("crop_ltrb", i),
        values(True) if store.column("flip")[i] else None,
        mask_values(store.read_mask(i), bucket) if store.column("mask")[i] else None,
    )  # fmt: skip


def export_npz(
    store: LatentStore,
    arch: Family,
    output: str | os.PathLike[str] | None = None,
    *,
    images_root: Path | None = None,
    collection: str = "",
    progress: Progress | None = None,
) -> Exchange:
    """Write the items of a collection as sd-scripts' npz: beside the images, or in the same folders of `output`.

    A store's own words name no place outside it to write to: without `output`, `images_root` is to be given. Items that
    are damaged, and those whose image is outside the folder that sources are named from, are skipped by name; so are
    those whose file is there and not ours.

    Args:
        arch: the family, with the keys that are to be written, see `Family.read_by`.
        images_root: where the images are.

    Raises:
        LatentStoreError: no such collection; `output` or an image is in object storage, or an image in a container; an
            item does not fit `arch`, or is a posterior; a file cannot be written.
        UnreadableError: a file cannot be read now.
    """
    items, root = _asked_for(store, collection, output, images_root)
    sources, paths = store.strings("source"), source_paths(store, root)
    # Images at an address stay in: for one of them nothing is exported, see `paths_beside`.
    outside = [i for i in items if not is_url(paths[i]) and not Path(paths[i]).is_relative_to(root)]
    items = sorted(set(items) - set(outside))
    _refuse_unfit(store, {i: sources[i] for i in items}, arch)
    beside = paths_beside([paths[i] for i in items], None if output is None else Path(output), root)
    entries = {i: store.entry(i) for i in items}
    shared = collisions([sources[i] for i in items], [entries[i].original_size for i in items])
    why = f"its image is not in {root}: give a folder that holds all images by --image-dir"
    result = Exchange(skipped=[(sources[i], why) for i in outside])
    with ThreadPoolExecutor(4, "kohya-bucket-npz") as pool:
        groups = GroupedSync(pool)  # what is written is safe on disk a group at a time
        for n, i in enumerate(items):
            entry = entries[i]
            target = npz_path(beside[n], entry.original_size, arch, shared=n in shared)
            try:
                item = npz_item(store, i, arch)
                refuse_foreign(target)
            except LatentStoreError as error:
                result.skipped.append((sources[i], str(error).removeprefix(f"{sources[i]}: ")))
            else:
                make_folder(target.parent)
                name, bucket = os.path.basename(sources[i]), entry.fingerprint.bucket_size
                write_npz(target, item, bucket, arch, entry.fingerprint, source_name=name, sync=False)
                groups.add(target)
                result.done += 1
            if progress is not None:
                progress(len(outside) + n + 1, len(outside) + len(items))
        groups.finish()
    return result


def _asked_for(
    store: LatentStore, collection: str, output: str | os.PathLike[str] | None, images_root: Path | None
) -> tuple[list[int], Path]:
    """The items of a collection, and the folder that they are named from; see `export_npz` for what is raised."""
    if output is not None and is_url(os.fspath(output)):
        raise LatentStoreError(f"{output}: npz files are read from folders, not from object storage: give a folder")
    items = store.in_collection(collection).tolist()
    if not items:
        raise LatentStoreError(
            f"{store.layout.root} has no collection {collection!r} to export: it holds {store.collections()}"
        )
    root = Path(os.path.abspath(store.layout.images_root() if images_root is None else images_root))
    if output is None and images_root is None and not root.is_relative_to(os.fspath(store.layout.root)):
        raise LatentStoreError(
            f"{store.layout.store_file} says that the images are in {root}, which a store does not decide: to write "
            f"npz there, add --image-dir {argument(root)}; or name another folder by --output"
        )
    return items, root


def _refuse_unfit(store: LatentStore, sources: Mapping[int, str], arch: Family) -> None:
    """Raise `LatentStoreError` for a posterior, and for latents of a VAE that the family is not trained with."""
    for i, source in sources.items():
        info = store.info(i)
        if info.kind == "posterior":
            raise LatentStoreError(
                f"{source} is stored as a posterior, but npz files hold latents: encode it without --posterior"
            )
        made_for = ARCHITECTURES.get(info.space.architecture, arch)
        if (made_for.scale_factor, made_for.shift_factor) != (arch.scale_factor, arch.shift_factor):
            raise LatentStoreError(
                f"{source} was encoded by a VAE of {made_for.name}, which {arch.name} is not trained with: "
                "choose that --arch, or encode with its VAE"
            )
