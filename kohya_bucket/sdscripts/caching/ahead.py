"""Captions encoded ahead of a training: the trainer's own run, ended where it would make its loader.

What outputs depend on (weights, their type, tokenizers, lengths, autocast) is decided all over a trainer, so nothing
but the trainer itself asks for the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import counted

__all__ = ["count_captions", "encode_ahead", "end_before_training", "is_ahead", "refuse_memory"]

_NOTHING = (
    "precompute --text: this run caches no text-encoder outputs on disk: give the trainer the arguments of the "
    "training, with --cache_text_encoder_outputs and --cache_text_encoder_outputs_to_disk (sd-scripts 0.10 or newer)"
)

_ahead = False
_there: set[str] = set()
_encoded = 0


def encode_ahead(ahead: bool) -> None:
    """Say whether this process trains, or only encodes captions."""
    global _ahead, _encoded
    _ahead, _encoded = ahead, 0
    _there.clear()


def is_ahead() -> bool:
    """Whether this process only encodes captions."""
    return _ahead


def refuse_memory() -> None:
    """Called where outputs are kept in memory.

    Raises:
        ConfigError: this process only encodes captions, which would be lost.
    """
    if _ahead:
        raise ConfigError(_NOTHING)


def count_captions(there: Iterable[str], encoded: int) -> None:
    """Called when a data set's captions are all on disk."""
    global _encoded
    _there.update(there)
    _encoded += encoded


def end_before_training() -> None:
    """Called where a trainer makes its loader, with all of its caches made: a run that only encodes ends here."""
    if not _ahead:
        return
    if not _there:
        raise SystemExit(f"kohya_bucket: {_NOTHING}")
    if is_first_process():
        print(
            f"kohya_bucket: the outputs of {counted(len(_there), 'caption')} are there, {_encoded} of them "
            "encoded by this process",
            file=sys.stderr,
        )
    raise SystemExit(0)
