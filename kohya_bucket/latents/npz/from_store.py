"""An item of a store as sd-scripts' npz hold it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.latents.architectures import Architecture
from kohya_bucket.latents.latent_space import to_float32
from kohya_bucket.latents.npz.convert_values import convert_values, mask_values
from kohya_bucket.latents.npz.read_write import NpzLatents
from kohya_bucket.latents.store.latent_store import LatentStore

__all__ = ["npz_item"]


def npz_item(store: LatentStore, i: int, arch: Architecture) -> NpzLatents:
    """Item `i`, with the values that npz of this family have.

    Raises:
        LatentStoreError: it is damaged, or has values that this family's npz cannot have.
    """
    entry, dtype, space = store.entry(i), store.storage(i), store.info(i).space

    def values(flipped: bool) -> npt.NDArray[np.float32]:
        return convert_values(to_float32(store.read(i, flipped=flipped), dtype), space, arch)

    known = entry.fingerprint
    return NpzLatents(
        values(False), entry.original_size, entry.crop_ltrb, values(True) if known.flip else None,
        mask_values(store.read_mask(i), known.bucket_size) if known.mask else None,
    )  # fmt: skip
