"""Outputs of text encoders between sd-scripts' npz, one for each image, and a store, one for each caption.

Source of the model families and their files: the `TextEncoderOutputsCachingStrategy` classes of kohya-ss/sd-scripts
0.10 to 0.11.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.images.listing import file_key
from kohya_bucket.latents.npz.exchange import Exchange
from kohya_bucket.latents.npz.read_write import BROKEN, BrokenNpzError, OpenNpz, write_arrays
from kohya_bucket.latents.store.exact_arrays import Array, check_outputs, pack
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.latents.text.captions import Caption, Encoding, caption_bytes

__all__ = [
    "CAPTION_KEY",
    "DROPOUT_KEY",
    "ENCODERS_KEY",
    "TEXT_FAMILIES",
    "TOKENS_KEY",
    "TextFamily",
    "caption_mark",
    "collection_of_file",
    "export_text_npz",
    "import_text_npz",
    "text_marks",
]


@dataclass(frozen=True)
class TextFamily:
    """How sd-scripts caches one family's outputs.

    Attributes:
        name: its name here and in `--arch`.
        suffix: what stands in place of an image's ending.
        arrays: names of the arrays that its files must have.
    """

    name: str
    suffix: str
    arrays: tuple[str, ...]


TEXT_FAMILIES = {
    family.name: family
    for family in (
        TextFamily("sdxl", "_te_outputs.npz", ("hidden_state1", "hidden_state2", "pool2")),
        TextFamily("sd3", "_sd3_te.npz", ("lg_out", "lg_pooled", "t5_out", "clip_l_attn_mask", "clip_g_attn_mask",
                                          "t5_attn_mask", "apply_lg_attn_mask", "apply_t5_attn_mask")),
        TextFamily("flux", "_flux_te.npz", ("l_pooled", "t5_out", "txt_ids", "t5_attn_mask", "apply_t5_attn_mask")),
        TextFamily("lumina", "_lumina_te.npz", ("hidden_state", "attention_mask", "input_ids")),
        TextFamily("hunyuan_image", "_hi_te.npz", ("vlm_embed", "vlm_mask", "byt5_embed", "byt5_mask", "ocr_mask")),
        TextFamily("anima", "_anima_te.npz", ("prompt_embeds", "attn_mask", "t5_input_ids", "t5_attn_mask",
                                              "caption_dropout_rate")),
    )
}  # fmt: skip


def collection_of_file(suffix: str) -> str:
    """The family whose files end so; of one that is not known, the ending itself."""
    return next((family.name for family in TEXT_FAMILIES.values() if family.suffix == suffix), suffix)


CAPTION_KEY = "kohya_bucket_caption"
ENCODERS_KEY = "kohya_bucket_text_encoders"
TOKENS_KEY = "kohya_bucket_tokens"
DROPOUT_KEY = "caption_dropout_rate"  # sd-scripts' own, for some model families

_MOST_HASH = 128  # signs
_TOKENS = re.compile(r"\btokens=(\w+)")

Progress = Callable[[int, int], None]


def caption_mark(caption: str | Iterable[str]) -> npt.NDArray[np.uint8]:
    """The array to save as `CAPTION_KEY` beside text-encoder outputs: which caption they are of."""
    return np.frombuffer(caption_bytes(caption), dtype=np.uint8)


def text_marks(caption: str | Iterable[str], encoders: str, tokens: str) -> dict[str, npt.NDArray[np.uint8]]:
    """What to save beside outputs: their caption, and where they are known hashes of the encoders and the tokens."""
    marks = {CAPTION_KEY: caption_mark(caption)}
    hashes = {ENCODERS_KEY: encoders, TOKENS_KEY: tokens}
    return marks | {key: np.frombuffer(text.encode(), dtype=np.uint8) for key, text in hashes.items() if text}


def import_text_npz(
    images: Sequence[str],
    captions: Sequence[str | None],
    output: str | os.PathLike[str],
    family: TextFamily,
    *,
    images_root: Path,
    progress: Progress | None = None,
) -> Exchange:
    """Take the npz beside `images` into a store of captions.

    A file that says its caption and its text encoders, as those of the adapter do, is taken at its word. Of one that
    sd-scripts made itself nobody knows the encoders: it is believed, as it is where it lies.

    Args:
        captions: for each image the text that files are of which do not say theirs; None: those are skipped.

    Raises:
        LatentStoreError: the store cannot be written.
    """
    result = Exchange()
    with StoreWriter(output, images_root=images_root) as writer:
        for n, (image, text) in enumerate(zip(images, captions, strict=True)):
            for path in _files_of(image, family):
                try:
                    caption, encoders, arrays = _read(path, family, text)
                    packed = {name: pack(array) for name, array in arrays.items()}
                    check_outputs(packed)
                except (*BROKEN, LatentStoreError) as error:
                    result.skipped.append((str(path), str(error) or type(error).__name__))
                    continue
                writer.add_text(caption.entry(family.name, Encoding(encoders)), packed)
                result.done += 1
            if progress is not None:
                progress(n + 1, len(images))
    write_manifest(LatentStore(output))
    return result


def export_text_npz(
    store: LatentStore,
    images: Sequence[str],
    captions: Sequence[str | None],
    family: TextFamily,
    *,
    progress: Progress | None = None,
) -> Exchange:
    """Write sd-scripts' npz beside `images`, each with the outputs of its caption.

    Raises:
        LatentStoreError: the store has nothing of this family, an item is damaged, or a file cannot be written.
    """
    result = Exchange()
    sources = store.strings("source")
    at = {sources[i]: i for i in store.in_collection(family.name).tolist()}
    if not at:
        raise LatentStoreError(
            f"{store.layout.root} has no outputs of {family.name} to export: it holds {store.collections()}"
        )
    by_hash = {store.table["source_hash"][i].as_py(): i for i in at.values()}
    written: dict[str, str] = {}
    for n, (image, text) in enumerate(zip(images, captions, strict=True)):
        path = Path(os.path.splitext(image)[0] + family.suffix)
        caption = None if text is None else Caption(text)
        # one that is left out now and then has a key of its own, and the same text
        i = None if caption is None else at.get(caption.key, by_hash.get(caption.text_hash))
        if caption is None or i is None:
            why = "its caption is not known" if caption is None else "the store has no outputs of its caption"
            result.skipped.append((image, why))
        elif written.setdefault(file_key(str(path)), caption.key) != caption.key:
            result.skipped.append((image, f"{path.name} is that of another image, with another caption"))
        else:
            made = store.entry(i).fingerprint
            tokens = _TOKENS.search(made.interpolation)
            write_arrays(path, store.arrays(i) | text_marks(caption.text, made.vae, tokens[1] if tokens else ""))
            result.done += 1
        if progress is not None:
            progress(n + 1, len(images))
    return result


def _files_of(image: str, family: TextFamily) -> list[Path]:
    """The usual file of an image, and those that the adapter adds for further captions."""
    first = Path(os.path.splitext(image)[0] + family.suffix)
    found = [first] if first.is_file() else []
    number = 2
    while (further := first.with_name(f"{first.name.removesuffix('.npz')}_{number}.npz")).is_file():
        found.append(further)
        number += 1
    return found


def _read(path: Path, family: TextFamily, text: str | None) -> tuple[Caption, str, dict[str, Array]]:
    with as_damage("what it says cannot be read", error=BrokenNpzError), OpenNpz(path) as file:
        if missing := [name for name in family.arrays if name not in file.names]:
            raise BrokenNpzError(f"it has no {missing[0]}, so it does not belong to {family.name}")
        if damaged := file.damaged():
            raise BrokenNpzError(f"the checksum of {damaged} is wrong")
        arrays = {name: file.array(name) for name in file.names}
        marks: dict[str, Any] = {name: arrays.pop(name, None) for name in (CAPTION_KEY, ENCODERS_KEY, TOKENS_KEY)}
        if marks[CAPTION_KEY] is not None:
            text = marks[CAPTION_KEY].tobytes().decode("utf-8", "surrogatepass")
        if text is None:
            raise BrokenNpzError("it does not say its caption, and none that is older is beside it")
        encoders = "" if marks[ENCODERS_KEY] is None else marks[ENCODERS_KEY].tobytes().decode("ascii")
        if not encoders.isprintable() or len(encoders) > _MOST_HASH:
            raise BrokenNpzError("its entry for the text encoders is not a hash")
        return Caption(text, float(arrays.get(DROPOUT_KEY, 0.0))), encoders, arrays
