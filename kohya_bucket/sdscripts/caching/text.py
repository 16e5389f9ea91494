"""sd-scripts' own loop over captions, with whole and checked files, or shards, under it.

sd-scripts names a file for the image alone. Where images of one stem, or data sets that share an image, have different
captions, whoever comes first has the usual file and the others have further ones.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.ranks import is_first_process, stop_all_ranks_on_error, wait_for_ranks
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.listing import file_key
from kohya_bucket.latents.encode.text_encoder import SAMPLE, encoders_hash, tokens_hash
from kohya_bucket.latents.fingerprint import Reason
from kohya_bucket.latents.items import Caption, Encoding
from kohya_bucket.latents.npz.read_write import check_text_npz, collection_of_file, text_marks, write_arrays
from kohya_bucket.sdscripts.caching.behind_mask import is_left_out
from kohya_bucket.sdscripts.caching.session import replaced, shared_by
from kohya_bucket.sdscripts.caching.text_shards import TextShardSession, caption_of
from kohya_bucket.sdscripts.objects import Dataset, ImageRecord, TextStrategy
from kohya_bucket.sdscripts.wording import recached_lines
from kohya_bucket.texts import counted

logger = logging.getLogger("kohya_bucket")

Original = Callable[[Any, Any, Any], Any]


class Strategies(NamedTuple):
    """sd-scripts' strategies of a run, as far as it has set them."""

    caching: TextStrategy | None
    tokenizing: Any
    encoding: Any


@stop_all_ranks_on_error()
def cache_text_outputs(
    dataset: Dataset, original: Original, strategies: Strategies, models: Any, accelerator: Any, options: AdapterOptions
) -> None:
    """`BaseDataset.new_cache_text_encoder_outputs`, with the cache of this package under it where it goes to disk."""
    global _encoded
    strategy = strategies.caching
    if strategy is None or not strategy.cache_to_disk or not dataset.image_data:
        if _ahead and (strategy is None or not strategy.cache_to_disk):
            raise ConfigError(_NOTHING)  # what is kept in memory would be lost
        original(dataset, models, accelerator)
        return
    session: TextShardSession | TextNpzSession
    if options.text_cache == "shards":
        family = collection_of_file(strategy.get_outputs_npz_path("x.png").removeprefix("x"))
        left_out = is_left_out(family, strategies.encoding)
        words = tokens_text(strategies.tokenizing, strategies.encoding, strategy) + " behind_mask=left_out" * left_out
        encoding = Encoding(encoders_hash(models), words)
        session = TextShardSession(dataset, strategy, accelerator, options, family, encoding, left_out=left_out)
    else:
        session = TextNpzSession(dataset, strategy, Encoding(encoders_hash(models), tokens_of(strategies.tokenizing)))
    numpys_savez = np.savez

    def save(file: Any, *args: Any, **arrays: Any) -> None:
        if args or not session.holds(file):
            numpys_savez(file, *args, **arrays)
        else:
            session.save(file, arrays)

    with replaced(strategy, session.methods()), replaced(np, {"savez": save}):
        try:
            original(dataset, models, accelerator)
        except BaseException:
            session.keep()
            raise
    session.finish()
    _there.update(session.captions)
    _encoded += session.saved
    if is_first_process() and session.reasons:
        logger.warning("\n".join(recached_lines(session.reasons)))


class TextNpzSession:
    """One caching call with sd-scripts' own files.

    Attributes:
        captions: by file.
        reasons: why files are made again.
    """

    def __init__(self, dataset: Dataset, strategy: TextStrategy, encoding: Encoding) -> None:
        self.strategy, self.encoding = strategy, encoding
        self.captions: dict[str, Caption] = {}
        self.reasons: dict[str, list[Reason]] = {}
        self._accepts = strategy.is_disk_cached_outputs_expected
        self._paths: dict[str, str] = {}
        self._saved: set[str] = set()
        taken = shared_by(strategy).captions
        records: list[ImageRecord] = list(dataset.image_data.values())
        for info in records:
            caption = caption_of(info)
            path = _file_of(_npz(strategy.get_outputs_npz_path(info.absolute_path)), caption, taken)
            self._paths[info.absolute_path] = path
            self.captions[path] = caption

    @property
    def saved(self) -> int:
        """How many captions this process has encoded."""
        return len(self._saved)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Replacements for the strategy's methods, by name."""
        return {"get_outputs_npz_path": self._paths.__getitem__, "is_disk_cached_outputs_expected": self._is_expected}

    def holds(self, path: Any) -> bool:
        """Whether this is a caption's file."""
        return isinstance(path, str) and _npz(path) in self.captions

    def save(self, path: str, arrays: Mapping[str, Any]) -> None:
        """Whole or not at all. It is not waited for: what a power failure cuts off shows when every byte is read."""
        path = _npz(path)
        marks = text_marks(self.captions[path].text, self.encoding.encoders, self.encoding.tokens)
        write_arrays(Path(path), {name: np.asarray(array) for name, array in {**arrays, **marks}.items()}, sync=False)
        self._saved.add(path)

    def keep(self) -> None:
        """Where the loop ended half-way: every file is on disk already."""

    def finish(self) -> None:
        """After sd-scripts' loop."""
        wait_for_ranks()

    def _is_expected(self, path: str) -> bool:
        if not os.path.exists(path):  # noqa: PTH110
            return False
        if self.strategy.skip_disk_cache_validity_check:
            return True
        reason = check_text_npz(path, (), self.captions[path], self.encoding)
        if reason is not None:
            self.reasons[path] = [reason]
        return reason is None and bool(self._accepts(path))


def _file_of(usual: str, caption: Caption, taken: dict[str, list[Caption]]) -> str:
    known = taken.setdefault(file_key(usual), [])
    if caption not in known:
        known.append(caption)
    number = known.index(caption) + 1
    return usual if number == 1 else f"{usual.removesuffix('.npz')}_{number}.npz"


def _npz(path: str) -> str:
    return path if path.endswith(".npz") else path + ".npz"


# Captions encoded ahead of a training: the trainer's own run, ended where it would make its loader.
#
# What outputs depend on (weights, their type, tokenizers, lengths, autocast) is decided all over a trainer, so nothing
# but the trainer itself asks for the same ones.


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


# How sd-scripts' strategies encode captions, in words.


# by strategy, of which a run has one: what it says of itself before it has worked
_said: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def tokens_text(tokenizing: Any, encoding: Any, caching: TextStrategy) -> str:
    """What outputs depend on besides caption and weights, in words: options of the strategies, precision, tokens.

    The tokens are those of a sample, by which another tokenizer, template or length shows, and the vocabularies.
    """
    parts = [*_options(tokenizing), *_options(encoding)]
    if caching.is_weighted:
        parts.append("is_weighted=True")
    if tokens := tokens_of(tokenizing):
        parts.append(f"tokens={tokens}")
    return " ".join([*parts, f"autocast={_autocast()}"])


def tokens_of(tokenizing: Any) -> str:
    """Hash of a sample's tokens and of the vocabularies; "" without a strategy."""
    if tokenizing is None:
        return ""
    if tokenizing not in _said:
        _said[tokenizing] = tokens_hash(tokenizing.tokenize(SAMPLE), vars(tokenizing))
    return _said[tokenizing]


def _options(strategy: Any) -> list[str]:
    """Plain values; what is left out of cached outputs later, by chance, is no part of them."""
    values = vars(strategy) if hasattr(strategy, "__dict__") else {}
    return [
        f"{name}={value!r}"
        for name, value in sorted(values.items())
        if isinstance(value, (bool, int, float, str)) and name[0] != "_" and "dropout" not in name
    ]


def _autocast() -> str:
    import torch

    if not hasattr(torch, "get_autocast_dtype"):  # until torch 2.3
        if torch.is_autocast_enabled():
            return str(torch.get_autocast_gpu_dtype()).removeprefix("torch.")
        return str(torch.get_autocast_cpu_dtype()).removeprefix("torch.") if torch.is_autocast_cpu_enabled() else "off"
    on = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    return str(torch.get_autocast_dtype(on[0])).removeprefix("torch.") if on else "off"
