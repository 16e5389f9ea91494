"""sd-scripts' own loop over captions, with whole and checked files, or shards, under it.

sd-scripts names a file for the image alone. Where images of one stem, or datasets that share an image, have different
captions, the one that comes first has the usual file and the others have further ones.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kohya_bucket.errors import ConfigError, LatentStoreError
from kohya_bucket.images.listing import file_key
from kohya_bucket.latents.encode.text_encoder import SAMPLE, encoders_hash, tokens_hash
from kohya_bucket.latents.fingerprint import Stale, StaleReason, why_different
from kohya_bucket.latents.items import TEXT_FOLDER, Caption, CaptionItems, Encoding
from kohya_bucket.latents.store.exact_arrays import Array
from kohya_bucket.texts import counted, one_line
from kohya_bucket.trainers.door.options import AdapterOptions, store_folder
from kohya_bucket.trainers.door.ranks import (
    end_run,
    is_first_process,
    stop_all_ranks_on_error,
    wait_for_ranks,
    warn_once,
)
from kohya_bucket.trainers.sdscripts.caching.session import replaced, shared_by
from kohya_bucket.trainers.sdscripts.caching.shards import StoreCache
from kohya_bucket.trainers.sdscripts.npz.read_write import (
    check_text_npz,
    collection_of_file,
    text_marks,
    write_arrays,
    write_text_npz,
)
from kohya_bucket.trainers.sdscripts.objects import Dataset, ImageRecord, TextStrategy
from kohya_bucket.trainers.sdscripts.wording import say_recached

logger = logging.getLogger("kohya_bucket")

Original = Callable[[Any, Any, Any], Any]


@stop_all_ranks_on_error()
def cache_text_outputs(
    dataset: Dataset, original: Original, strategies: Sequence[Any], models: Any, accelerator: Any,
    options: AdapterOptions,
) -> None:  # fmt: skip
    """`BaseDataset.new_cache_text_encoder_outputs`, with the cache of this package under it where it goes to disk.

    `strategies` are the run's for caching, tokenizing and encoding; None where it has set none.
    """
    strategy, tokenizing, encoding = strategies
    if strategy is None or not strategy.cache_to_disk or not dataset.image_data:
        if ahead.asked and (strategy is None or not strategy.cache_to_disk):
            raise ConfigError(_NOTHING)  # what is kept in memory would be lost
        original(dataset, models, accelerator)
        return
    if strategy.skip_disk_cache_validity_check:
        warn_once(
            "--skip_cache_check: cached text-encoder outputs are trained without a look at them, also of captions "
            "that were edited since, of other text encoders, or cut off"
        )
    session: TextShardSession | TextNpzSession
    if options.text_cache == "shards":
        family = collection_of_file(strategy.get_outputs_npz_path("x.png").removeprefix("x"))
        made_by = Encoding(encoders_hash(models), tokens_text(tokenizing, encoding, strategy))
        session = TextShardSession(dataset, strategy, accelerator, options, family, made_by)
    else:
        session = TextNpzSession(dataset, strategy, Encoding(encoders_hash(models), tokens_of(tokenizing)))
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
    ahead.there.update(session.captions)
    ahead.encoded += session.saved
    say_recached(session.reasons)


class TextNpzSession:
    """One caching call with sd-scripts' own files.

    Attributes:
        captions: by file.
        reasons: why files are made again.
    """

    def __init__(self, dataset: Dataset, strategy: TextStrategy, encoding: Encoding) -> None:
        self.strategy, self.encoding = strategy, encoding
        self.captions: dict[str, Caption] = {}
        self.reasons: dict[str, list[StaleReason]] = {}
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
        write_text_npz(Path(path), {name: np.asarray(array) for name, array in {**arrays, **marks}.items()}, sync=False)
        self._saved.add(path)

    def keep(self) -> None:
        """Where the loop ended half-way: every file is on disk already."""

    def finish(self) -> None:
        wait_for_ranks()

    def _is_expected(self, path: str) -> bool:
        if not os.path.exists(path):  # noqa: PTH110
            return False
        if self.strategy.skip_disk_cache_validity_check:
            return True
        reason = check_text_npz(path, self.captions[path], self.encoding)
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


@dataclass
class EncodedAhead:
    """What a run encodes that ends where it would train.

    Attributes:
        asked: this process encodes captions, and does not train.
        there: files or keys of the captions whose outputs are there.
        encoded: how many of them this process has encoded.
    """

    asked: bool = False
    there: set[str] = field(default_factory=set)
    encoded: int = 0

    def end_before_training(self) -> None:
        """Called where a trainer makes its loader, with all of its caches made: a run that only encodes ends here."""
        if not self.asked:
            return
        if not self.there:
            end_run(_NOTHING)
        if is_first_process():
            print(
                f"kohya_bucket: the outputs of {counted(len(self.there), 'caption')} are there, {self.encoded} of them "
                "encoded by this process",
                file=sys.stderr,
            )
        raise SystemExit(0)


ahead = EncodedAhead()


# How sd-scripts' strategies encode captions, in words: by strategy, of which a run has one, what it says of itself
# before it has worked.
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
    """Plain values, but not how often captions are left out of cached outputs by chance: that happens later."""
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


# The same as a store of shards: sd-scripts is given a caption's key in place of an npz path, so images with one caption
# share what is stored.


def caption_of(info: ImageRecord) -> Caption:
    """An image's caption, and how often it is left out, where a version saves that with the outputs."""
    text = info.caption if isinstance(info.caption, str) else tuple(info.caption)
    return Caption(text, float(getattr(info, "caption_dropout_rate", 0.0)))


@dataclass
class TextCache(StoreCache):
    """Outputs by the caption's key.

    Args:
        collection: the model family's name.
    """

    collection: str
    _at: dict[str, int] = field(default_factory=dict, init=False)

    def refresh(self) -> None:
        super().refresh()
        store = self.opened()
        sources = store.strings("source")
        self._at = {sources[i]: i for i in store.in_collection(self.collection).tolist()}

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def why_missing(self, key: str, encoding: Encoding) -> list[StaleReason]:
        """Why a caption must be encoded (again); none if the store has it as it should be."""
        i = self._at.get(key)
        if i is None:
            return [StaleReason(Stale.MISSING)]
        columns = {name: self.opened().words(name) for name in ("vae", "interpolation")}
        stored = {name: words[codes[i]] for name, (words, codes) in columns.items()}
        return why_different(stored, encoding.columns)

    def save(self, caption: Caption, encoding: Encoding, arrays: Mapping[str, Any]) -> None:
        """Add a caption; it is on disk after `flush`."""
        CaptionItems([caption], encoding, self.collection).add(self._writing(), [0], [arrays])

    def load(self, key: str) -> dict[str, Array]:
        """Arrays of a caption by name, as they were given to `save`.

        Raises:
            LatentStoreError: they are not there, or damaged.
        """
        if key not in self._at:
            raise LatentStoreError(f"{self.root} has no outputs for {key} of {self.collection}: cache again")
        return self.opened().arrays(self._at[key])

    def choices(self, key: str) -> tuple[tuple[str, ...], dict[str, Array]]:
        """Names of a caption's arrays, and those without axes."""
        i = self._at[key]
        return self.opened().names(i), self.opened().scalars(i)


class TextShardSession:
    """One caching call: which captions there are, which of them this process encodes, and why.

    Attributes:
        captions: by key.
        images: by key, of the first image that has the caption: the rank that sd-scripts gives it to encodes it.
        reasons: why captions are encoded again, by image.
        saved: how many captions this process has encoded.
    """

    def __init__(
        self, dataset: Dataset, strategy: TextStrategy, accelerator: Any, options: AdapterOptions, family: str,
        encoding: Encoding,
    ) -> None:  # fmt: skip
        self.strategy, self.encoding = strategy, encoding
        rank, ranks = int(accelerator.process_index), int(accelerator.num_processes)
        self.captions: dict[str, Caption] = {}
        self.images: dict[str, str] = {}
        self.reasons: dict[str, list[StaleReason]] = {}
        self._keys: dict[str, str] = {}
        self._mine: set[str] = set()  # of this process, and not asked for yet
        self.saved = 0
        records: list[ImageRecord] = list(dataset.image_data.values())
        for number, info in enumerate(records):
            caption = caption_of(info)
            key = caption.key
            self._keys[info.absolute_path] = key
            if key not in self.captions:
                self.captions[key], self.images[key] = caption, str(info.absolute_path)
                if number % ranks == rank:
                    self._mine.add(key)
        self._load = functools.partial(type(strategy).load_outputs_npz, strategy)
        self._orders: dict[tuple[str, ...], list[str | None]] = {}
        self._accepts = functools.partial(type(strategy).is_disk_cached_outputs_expected, strategy)
        self._accepted: dict[object, bool] = {}
        root = store_folder(options, str(records[0].absolute_path)) / TEXT_FOLDER
        self.cache = TextCache(root, None, family)
        self.cache.refresh()
        if is_first_process():
            logger.info("text-encoder outputs are kept in %s", one_line(root))

    def methods(self) -> dict[str, Callable[..., Any]]:
        return {"get_outputs_npz_path": self._keys.__getitem__, "is_disk_cached_outputs_expected": self._is_expected}

    def holds(self, path: Any) -> bool:
        """Whether this is a key of a caption of this call, in place of a path."""
        return isinstance(path, str) and path in self.captions

    def save(self, key: str, arrays: Mapping[str, Any]) -> None:
        """Add outputs; the first are refused at once if they could not be read again."""
        self._find_order(tuple(sorted(arrays)))
        self.cache.save(self.captions[key], self.encoding, arrays)
        self.saved += 1

    def keep(self) -> None:
        """Where the loop ended half-way, by Ctrl-C or an error: put on disk what is encoded."""
        self.cache.keep()

    def finish(self) -> None:
        """After sd-scripts' loop: every rank sees everything, and its loaders read through the store.

        Raises:
            LatentStoreError: captions were left out, or cannot be read as this version does.
        """
        self.cache.finish()
        missing = [key for key in self.captions if self._why_missing(key)]
        if missing:
            raise LatentStoreError(
                f"{len(missing)} of {len(self.captions)} captions were not encoded into {self.cache.root}, the first "
                f'that of {self.images[missing[0]]}: this sd-scripts saves them differently; use text_cache = "npz"'
            )
        for names in {self.cache.choices(key)[0] for key in self.captions}:
            self._find_order(names)
        # Stays: loader workers read through it.
        self.strategy.load_outputs_npz = TextLoader(self.cache, self._orders)

    def _is_expected(self, key: str) -> bool:
        if key not in self._mine:
            return True  # is encoded for another image that has the same caption
        self._mine.remove(key)
        reasons = self._why_missing(key)
        trusted = self.strategy.skip_disk_cache_validity_check
        if not reasons and not trusted and not self._accepts_choices(key):
            reasons = [StaleReason(Stale.TOKENS, "other options", "those of this run")]
        if any(reason.kind is not Stale.MISSING for reason in reasons):
            self.reasons[self.images[key]] = reasons
        return not reasons

    def _why_missing(self, key: str) -> list[StaleReason]:
        trusted = self.strategy.skip_disk_cache_validity_check and key in self.cache
        return [] if trusted else self.cache.why_missing(key, self.encoding)

    def _accepts_choices(self, key: str) -> bool:
        """Whether sd-scripts itself takes outputs with these names and choices, as of a mask that is applied."""
        names, scalars = self.cache.choices(key)
        case = names, tuple((name, value.tobytes()) for name, value in sorted(scalars.items()))
        if case not in self._accepted:
            arrays = {name: scalars.get(name, np.zeros(0, np.float32)) for name in names}
            # first without the large arrays, which only a version of its own kind looks at
            self._accepted[case] = bool(
                with_npz(arrays, self._accepts) or with_npz(self.cache.load(key), self._accepts)
            )
        return self._accepted[case]

    def _find_order(self, names: tuple[str, ...]) -> None:
        """In which order sd-scripts' own reader returns arrays, found out with an npz of numbers in place of them.

        Raises:
            LatentStoreError: it does more than return them.
        """
        if names in self._orders:
            return
        marks = {name: _PATTERN + 100 * number for number, name in enumerate(names)}
        try:
            found = [None if value is None else np.asarray(value) for value in with_npz(marks, self._load)]
        except Exception as error:  # whatever a reader of one's own raises
            raise LatentStoreError(_refusal(names, f"{type(error).__name__}: {error}")) from error
        order = [None if value is None else _name_of(value, marks) for value in found]
        if "" in order:
            raise LatentStoreError(_refusal(names, "it changes them"))
        self._orders[names] = order


_PATTERN = np.arange(12, dtype=np.int16).reshape(4, 3)


def _name_of(value: Array, marks: Mapping[str, Array]) -> str:
    """The name of the mark that this is, to the last bit, or an empty text."""
    same = (name for name, mark in marks.items() if value.dtype == mark.dtype and np.array_equal(value, mark))
    return next(same, "")


@dataclass
class TextLoader:
    """In place of a strategy's `load_outputs_npz`; travels to spawned workers."""

    cache: TextCache
    orders: dict[tuple[str, ...], list[str | None]]

    def __call__(self, key: str) -> list[Array | None]:
        arrays = self.cache.load(key)
        return [None if name is None else arrays[name] for name in self.orders[tuple(sorted(arrays))]]


def reads_store(strategy: TextStrategy) -> bool:
    """Whether a strategy's outputs are read from a store."""
    return isinstance(strategy.load_outputs_npz, TextLoader)


def with_npz(arrays: Mapping[str, Array], ask: Callable[[str], Any]) -> Any:
    """What `ask` says of the path of an npz with these arrays, which is gone then."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = str(Path(folder) / "outputs.npz")
        write_arrays(Path(path), dict(arrays), sync=False)
        return ask(path)


def _refusal(names: tuple[str, ...], why: str) -> str:
    return (
        f'text_cache = "shards" cannot give this sd-scripts its outputs ({", ".join(names)}): its reader does more '
        f'than return arrays of an npz ({why}). Use text_cache = "npz"'
    )
