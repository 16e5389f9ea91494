"""sd-scripts' own loop over captions, with whole and checked files, or shards, under it.

sd-scripts names a file for the image alone. Where images of one stem, or data sets that share an image, have different
captions, whoever comes first has the usual file and the others have further ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.ranks import is_first_process, stop_all_ranks_on_error, wait_for_ranks
from kohya_bucket.images.listing import file_key
from kohya_bucket.latents.fingerprint import Reason
from kohya_bucket.latents.text.npz_files import collection_of_file, text_marks
from kohya_bucket.latents.text.text_store import Encoding
from kohya_bucket.latents.text.transformers_encoder import encoders_hash
from kohya_bucket.sdscripts.caching.ahead import count_captions, refuse_memory
from kohya_bucket.sdscripts.caching.behind_mask import is_left_out, without_unread
from kohya_bucket.sdscripts.caching.replaced import replaced
from kohya_bucket.sdscripts.caching.text_identity import tokens_of, tokens_text
from kohya_bucket.sdscripts.caching.text_npz import check_text_npz, savez
from kohya_bucket.sdscripts.caching.text_shards import TextShardSession
from kohya_bucket.sdscripts.datasets.wording import recached_lines
from kohya_bucket.sdscripts.objects import Dataset, ImageRecord, TextStrategy

__all__ = ["Strategies", "cache_text_outputs", "forget_texts"]

logger = logging.getLogger("kohya_bucket")

Original = Callable[[Any, Any, Any], Any]


class Strategies(NamedTuple):
    """sd-scripts' strategies of a run, as far as it has set them."""

    caching: TextStrategy | None
    tokenizing: Any
    encoding: Any


Text = tuple[str, float]  # a caption, and how often it is left out: some strategies save that with the outputs

# by strategy, of which sd-scripts has one in each run: the texts that its datasets have, by usual file
_texts: WeakKeyDictionary[Any, dict[str, list[Text]]] = WeakKeyDictionary()


@stop_all_ranks_on_error()
def cache_text_outputs(
    dataset: Dataset,
    original: Original,
    strategies: Strategies,
    models: Any,
    accelerator: Any,
    options: AdapterOptions,
) -> None:
    """`BaseDataset.new_cache_text_encoder_outputs`, with the cache of this package under it where it goes to disk."""
    strategy = strategies.caching
    if strategy is None or not strategy.cache_to_disk or not dataset.image_data:
        if strategy is None or not strategy.cache_to_disk:
            refuse_memory()
        original(dataset, models, accelerator)
    elif options.text_cache == "shards":
        _cache_in_shards(dataset, original, strategies, models, accelerator, options)
    else:
        _cache_in_npz(dataset, original, strategies, models, accelerator)


def _cache_in_shards(
    dataset: Dataset,
    original: Original,
    strategies: Strategies,
    models: Any,
    accelerator: Any,
    options: AdapterOptions,
) -> None:
    strategy = strategies.caching
    assert strategy is not None
    family = collection_of_file(strategy.get_outputs_npz_path("x.png").removeprefix("x"))
    left_out = is_left_out(family, strategies.encoding)
    words = tokens_text(strategies.tokenizing, strategies.encoding, strategy) + " behind_mask=left_out" * left_out
    encoding = Encoding(encoders_hash(models), words)
    session = TextShardSession(dataset, strategy, accelerator, options, family, encoding)
    numpys_savez = np.savez

    def save(file: Any, *args: Any, **arrays: Any) -> None:
        if args or not session.holds(file):
            numpys_savez(file, *args, **arrays)
        else:
            session.save(file, without_unread(arrays) if left_out else arrays)

    with replaced(strategy, session.methods()), replaced(np, {"savez": save}):
        try:
            original(dataset, models, accelerator)
        except BaseException:
            session.keep()
            raise
    session.finish()
    count_captions(session.captions, session.saved)
    _tell(session.reasons)


def _cache_in_npz(dataset: Dataset, original: Original, strategies: Strategies, models: Any, accelerator: Any) -> None:
    strategy = strategies.caching
    assert strategy is not None
    taken = _texts.setdefault(strategy, {})
    paths: dict[str, str] = {}
    texts: dict[str, Text] = {}
    records: list[ImageRecord] = list(dataset.image_data.values())
    for info in records:
        text = info.caption, float(getattr(info, "caption_dropout_rate", 0.0))  # where a version has it
        path = _file_of(_npz(strategy.get_outputs_npz_path(info.absolute_path)), text, taken)
        paths[info.absolute_path] = path
        texts[path] = text
    encoders, tokens = encoders_hash(models), tokens_of(strategies.tokenizing)
    accepts = strategy.is_disk_cached_outputs_expected
    reasons: dict[str, list[Reason]] = {}

    def is_expected(path: str) -> bool:
        if not os.path.exists(path):  # noqa: PTH110
            return False
        if strategy.skip_disk_cache_validity_check:
            return True
        reason = check_text_npz(path, (), *texts[path], encoders, tokens)
        if reason is None:
            return bool(accepts(path))
        reasons[path] = [reason]
        return False

    numpys_savez, saved = np.savez, set[str]()

    def save_whole(file: Any, *args: Any, **arrays: Any) -> None:
        if args or not isinstance(file, str):
            numpys_savez(file, *args, **arrays)
            return
        text = texts.get(_npz(file))
        marks = {} if text is None else text_marks(text[0], encoders, tokens)
        savez(file, **arrays, **marks)
        saved.add(_npz(file))

    methods: dict[str, Callable[..., Any]] = {
        "get_outputs_npz_path": paths.__getitem__,
        "is_disk_cached_outputs_expected": is_expected,
    }
    with replaced(strategy, methods), replaced(np, {"savez": save_whole}):
        original(dataset, models, accelerator)
    wait_for_ranks()
    count_captions(texts, len(saved))
    _tell(reasons)


def _tell(reasons: dict[str, list[Reason]]) -> None:
    if is_first_process() and reasons:
        logger.warning("\n".join(recached_lines(reasons)))


def forget_texts() -> None:
    """Let go of what datasets share, of which there is a row for each image, once all have cached."""
    _texts.clear()


def _file_of(usual: str, text: Text, taken: dict[str, list[Text]]) -> str:
    known = taken.setdefault(file_key(usual), [])
    if text not in known:
        known.append(text)
    number = known.index(text) + 1
    return usual if number == 1 else f"{usual.removesuffix('.npz')}_{number}.npz"


def _npz(path: str) -> str:
    return path if path.endswith(".npz") else path + ".npz"
