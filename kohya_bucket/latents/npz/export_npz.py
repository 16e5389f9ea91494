"""Writing a store's latents as sd-scripts' npz, for every model family."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import GroupedSync, make_folder
from kohya_bucket.images.origins import in_container
from kohya_bucket.images.remote import is_url
from kohya_bucket.latents.architectures import ARCHITECTURES, Architecture
from kohya_bucket.latents.npz.from_store import npz_item
from kohya_bucket.latents.npz.import_npz import Exchange
from kohya_bucket.latents.npz.names import collisions, npz_path
from kohya_bucket.latents.npz.read_write import write_npz
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.state import source_paths

__all__ = ["export_npz"]


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
    entries = dict(zip(items, store.entries(items), strict=True))
    shared = collisions([sources[i] for i in items], [entries[i].original_size for i in items])
    if far := next((sources[i] for i in items if is_url(sources[i])), None):
        raise LatentStoreError(f"{far}: this image is in object storage, where no npz can lie beside it")
    if inside := next((paths[i] for i in items if in_container(paths[i])), None):
        raise LatentStoreError(f"{inside}: this image is in a file with others, where no npz can lie beside it")
    for source in () if output is None else (sources[i] for i in items):
        if os.path.isabs(source) or source.startswith("../"):
            raise LatentStoreError(
                f"{source}: this image lies outside the store's folder of images, so its npz would land outside "
                f"{output}: leave out the output, and npz go beside the images"
            )
    with ThreadPoolExecutor(4, "kohya-bucket-npz") as pool:
        groups = GroupedSync(pool, lambda _: None)
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
            groups.add(target, i)
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
