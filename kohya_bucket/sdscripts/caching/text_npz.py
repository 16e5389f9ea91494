"""Outputs of text encoders in sd-scripts' npz: written whole, with the caption and the encoders that they are of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.errors import as_damage
from kohya_bucket.latents.fingerprint import Reason, Stale
from kohya_bucket.latents.npz.read_write import BROKEN, BrokenNpzError, OpenNpz, write_arrays
from kohya_bucket.latents.text.npz_files import CAPTION_KEY, DROPOUT_KEY, ENCODERS_KEY, TOKENS_KEY, caption_mark

__all__ = ["check_text_npz", "savez"]


def savez(file: Any, *args: Any, **arrays: Any) -> None:
    """In place of `np.savez` with a path: the same file, whole or not at all. Other targets go to numpy.

    It is not waited for until it is on disk: what a power failure leaves cut off shows in `check_text_npz`, which reads
    every byte.

    Raises:
        LatentStoreError: the disk refuses.
    """
    if args or not isinstance(file, (str, os.PathLike)):
        np.savez(file, *args, **arrays)
        return
    path = os.fspath(file)
    whole = Path(path if path.endswith(".npz") else path + ".npz")
    write_arrays(whole, {name: np.asarray(array) for name, array in arrays.items()}, sync=False)


def check_text_npz(
    path: str | os.PathLike[str],
    required: Iterable[str],
    caption: str | Iterable[str] | None = None,
    dropout: float | None = None,
    encoders: str = "",
    tokens: str = "",
) -> Reason | None:
    """Why cached text-encoder outputs cannot be used, or None: every byte is read, so what is broken shows.

    With `caption`, outputs of another caption are refused, with `dropout` those that are saved with another
    `caption_dropout_rate`, which is trained with, and with `encoders` and `tokens` (hashes) those of other text
    encoders or tokenizers; files that do not say theirs are believed.
    """
    try:
        with OpenNpz(Path(path)) as file:
            missing = [name for name in required if name not in file.names]
            if missing:
                return Reason(Stale.PART, missing[0])
            damaged = file.damaged()
            if damaged is not None:
                return Reason(Stale.CHECKSUM, damaged)
            keys = (CAPTION_KEY, ENCODERS_KEY, TOKENS_KEY, DROPOUT_KEY)
            notes = {name: file.array(name) for name in keys if name in file.names}
        marked = None if caption is None else caption_mark(caption).tobytes()
        if marked is not None and CAPTION_KEY in notes and notes[CAPTION_KEY].tobytes() != marked:
            return Reason(Stale.CAPTION)
        if encoders and ENCODERS_KEY in notes and notes[ENCODERS_KEY].tobytes() != encoders.encode():
            return Reason(Stale.ENCODERS)
        if tokens and TOKENS_KEY in notes and notes[TOKENS_KEY].tobytes() != tokens.encode():
            return Reason(Stale.TOKENS, notes[TOKENS_KEY].tobytes().decode("ascii", "replace"), tokens)
        if dropout is not None and DROPOUT_KEY in notes:
            with as_damage(DROPOUT_KEY, error=BrokenNpzError):
                rate = float(notes[DROPOUT_KEY])
            if rate != float(np.float32(dropout)):
                return Reason(Stale.DROPOUT, rate, dropout)
    except FileNotFoundError:
        return Reason(Stale.MISSING)
    except BROKEN as error:
        return Reason(Stale.BROKEN, error or type(error).__name__)
    return None
