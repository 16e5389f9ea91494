"""sd-scripts' npz of outputs of text encoders: the model families, what a file says of itself, and whether it serves.

Source of the families: the `TextEncoderOutputsCachingStrategy` classes of kohya-ss/sd-scripts 0.10 to 0.11. Files that
are written here say besides which caption, encoders and tokens they are of; others are believed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import as_damage
from kohya_bucket.latents.captions import Caption, Encoding, caption_bytes, content_hash
from kohya_bucket.latents.fingerprint import Reason, Stale, why_different
from kohya_bucket.latents.npz.read_write import BROKEN, BrokenNpzError, OpenNpz


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


MARKS = ("kohya_bucket_caption", "kohya_bucket_text_encoders", "kohya_bucket_tokens")
CAPTION_KEY, ENCODERS_KEY, TOKENS_KEY = MARKS
DROPOUT_KEY = "caption_dropout_rate"  # sd-scripts' own, for some model families


def text_marks(caption: str | Iterable[str], encoders: str = "", tokens: str = "") -> dict[str, npt.NDArray[np.uint8]]:
    """What to save beside outputs: their caption, and where they are known hashes of the encoders and the tokens."""
    said = {CAPTION_KEY: caption_bytes(caption), ENCODERS_KEY: encoders.encode(), TOKENS_KEY: tokens.encode()}
    return {key: np.frombuffer(text, dtype=np.uint8) for key, text in said.items() if text or key == CAPTION_KEY}


def check_text_npz(
    path: str | os.PathLike[str], required: Iterable[str] = (), caption: Caption | None = None,
    encoding: Encoding | None = None,
) -> Reason | None:  # fmt: skip
    """Why cached outputs cannot be used, or None: every byte is read, so what is broken shows.

    With `caption`, those of another one, or saved with another `caption_dropout_rate`, which is trained with, are
    refused; with `encoding` those of other encoders or tokens. What a file does not say is believed.
    """
    try:
        with OpenNpz(Path(path)) as file:
            if missing := [name for name in required if name not in file.names]:
                return Reason(Stale.PART, missing[0])
            if damaged := file.damaged():
                return Reason(Stale.CHECKSUM, damaged)
            said = {name: file.array(name).tobytes() for name in MARKS if name in file.names}
            rate = None
            if caption is not None and DROPOUT_KEY in file.names:
                with as_damage(DROPOUT_KEY, error=BrokenNpzError):
                    rate = float(file.array(DROPOUT_KEY))
    except FileNotFoundError:
        return Reason(Stale.MISSING)
    except BROKEN as error:
        return Reason(Stale.BROKEN, error or type(error).__name__)
    stored = {
        "source_hash": content_hash(said[CAPTION_KEY]) if CAPTION_KEY in said else "",
        "vae": said.get(ENCODERS_KEY, b"").decode("ascii", "replace"),
        "interpolation": said.get(TOKENS_KEY, b"").decode("ascii", "replace"),
    }
    wanted = (encoding or Encoding()).columns | {"source_hash": "" if caption is None else caption.text_hash}
    for reason in why_different(stored, wanted):
        return reason
    if caption is not None and rate not in (None, float(np.float32(caption.dropout))):
        return Reason(Stale.DROPOUT, rate, caption.dropout)
    return None
