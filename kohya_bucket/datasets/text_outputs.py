"""Outputs of text encoders beside latents: those of each image's caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.text.caption import Caption
from kohya_bucket.latents.text.exact_arrays import unpack
from kohya_bucket.latents.text.text_store import TEXT_FOLDER, TextStore

__all__ = ["CaptionOutputs"]

_HOW = (
    '`kohya-bucket precompute --text`, a training with text_cache = "shards", or `kohya-bucket cache import --text` '
    "puts them there"
)


class CaptionOutputs:
    """For N images the outputs of their captions, from the folder `text` of a store of latents.

    Args:
        layout: the store of latents.
        family: the model family whose outputs are wanted.
        captions: N texts, or None where an image has none: that of the empty text.
        verify: checksums, see `LatentStore`.

    Raises:
        LatentStoreError: there are none, or not of all captions.
    """

    def __init__(self, layout: Layout, family: str, captions: Sequence[str | None], verify: str) -> None:
        folder = layout.root / TEXT_FOLDER
        if not Layout(folder).exists():
            raise LatentStoreError(f"{folder} does not exist, so there are no outputs of text encoders: {_HOW}")
        self.store = TextStore(folder, verify=verify)
        keys = {text: Caption(text).key for text in {caption or "" for caption in captions}}
        found = self.store.find([keys[caption or ""] for caption in captions], family)
        if (found < 0).any():
            first = captions[int(np.flatnonzero(found < 0)[0])] or ""
            raise LatentStoreError(
                f"{folder} has no outputs of {family} for {int((found < 0).sum())} of {len(captions)} images, the "
                f"first with the caption {first[:80]!r}; it holds those of {self.store.collections()}: {_HOW}"
            )
        self._at: npt.NDArray[np.int64] = found

    def __getitem__(self, image: int) -> dict[str, torch.Tensor]:
        """The outputs of an image's caption by name, each as a tensor of the type that its encoder gave."""
        outputs = {}
        for name, packed in self.store.packed(int(self._at[image])).items():
            if packed.storage == "bfloat16":
                bits = unpack(replace(packed, storage="bits", given="<i2", bits=packed.bits.view(np.int16)))
                outputs[name] = torch.from_numpy(bits).view(torch.bfloat16)
            else:
                outputs[name] = torch.from_numpy(unpack(packed))
        return outputs
