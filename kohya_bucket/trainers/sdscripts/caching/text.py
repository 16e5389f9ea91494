"""sd-scripts' own loop over captions, with whole and checked files under it.

sd-scripts names a file for the image alone. Where images of one stem, or datasets that share an image, have different
captions, the first one gets the usual file and the others get further ones.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import ConfigError, LatentStoreError
from kohya_bucket.images.listing import file_key
from kohya_bucket.latents.encode.pipeline import Caching
from kohya_bucket.latents.encode.text_encoder import SAMPLE, encoders_hash, tokens_hash
from kohya_bucket.latents.fingerprint import Stale, StaleReason
from kohya_bucket.latents.items import Caption, Encoding
from kohya_bucket.latents.store.storage import is_there
from kohya_bucket.latents.vae.device import Span, modes_here
from kohya_bucket.texts import counted
from kohya_bucket.trainers.door.ranks import end_run, stop_all_ranks_on_error, wait_for_ranks, warn_once
from kohya_bucket.trainers.sdscripts.caching.session import (
    refuse_not_finite,
    replaced,
    shared_by,
)
from kohya_bucket.trainers.sdscripts.npz.names import refuse_too_long
from kohya_bucket.trainers.sdscripts.npz.read_write import place_text_npz, text_marks, text_stale_reasons
from kohya_bucket.trainers.sdscripts.objects import Dataset, ImageRecord, TextStrategy
from kohya_bucket.trainers.sdscripts.wording import say_recached

logger = logging.getLogger("kohya_bucket")

Original = Callable[[Any, Any, Any], Any]

# Ends of the files of sd-scripts' model families: what other strategies save may be of the image too.
_OF_CAPTION_ALONE = ("_te_outputs.npz", "_sd3_te.npz", "_flux_te.npz", "_lumina_te.npz", "_hi_te.npz", "_anima_te.npz")
_MOST_SAVED = 4  # captions at once, while another is encoded


@stop_all_ranks_on_error()
def cache_text_outputs(
    dataset: Dataset, original: Original, strategies: Sequence[Any], models: Any, accelerator: Any
) -> None:
    """`BaseDataset.new_cache_text_encoder_outputs`, with the cache of this package under it where it goes to disk.

    `strategies` are the run's for caching and for tokenizing; None where it has set none.
    """
    strategy, tokenizing = strategies
    if strategy is None or not strategy.cache_to_disk or not dataset.image_data:
        if ahead.asked and (strategy is None or not strategy.cache_to_disk):
            raise ConfigError(_NOTHING)  # what is kept in memory would be lost
        original(dataset, models, accelerator)
        for info in dataset.image_data.values():
            outputs = getattr(info, "text_encoder_outputs", None)
            refuse_not_finite(outputs or (), f"{info.absolute_path}: what text encoders make of its caption")
        return
    if strategy.skip_disk_cache_validity_check:
        warn_once(
            "--skip_cache_check: cached text-encoder outputs are trained unchecked, even if a caption was edited, "
            "the text encoders changed, or a file is cut off"
        )
    encoding = Encoding(encoders_hash(models), tokens_of(tokenizing))
    session = TextSession(dataset, strategy, encoding)
    session.cache(original, models, accelerator)
    wait_for_ranks()
    ahead.files.update(session.captions)
    ahead.encoded += len(session.saved)
    say_recached(session.reasons)


class TextSession:
    """One caching call.

    A strategy tokenizes, encodes and saves a batch in one method. Several of these calls run at once, on threads of
    their own, and take turns where they use the tokenizers or the encoders.

    Attributes:
        captions: by file.
        reasons: why files are made again.
        saved: the files that this process has written.
    """

    def __init__(self, dataset: Dataset, strategy: TextStrategy, encoding: Encoding) -> None:
        self.dataset, self.strategy, self.encoding = dataset, strategy, encoding
        self.captions: dict[str, Caption] = {}
        self.reasons: dict[str, list[StaleReason]] = {}
        self.saved: set[str] = set()
        self._accepts = strategy.is_disk_cached_outputs_expected
        self._encode_and_save = strategy.cache_batch_outputs
        self._made: dict[str, dict[str, Any]] = {}  # what the strategy has saved, by file, until that is there
        self._to_make: dict[Caption | str, list[str]] = {}  # files by caption, or each by itself
        self._paths: dict[str, str] = {}
        self._tokenizing, self._encoding, self._is_inside = threading.RLock(), threading.RLock(), False
        self._encodes_in_turn = False  # known after the first batch: the strategy asks what is given to it for outputs
        captions_of_file = shared_by(strategy).captions
        records: list[ImageRecord] = list(dataset.image_data.values())
        for info in records:
            caption = _caption_of(info)
            usual = _npz(strategy.get_outputs_npz_path(info.absolute_path))
            path = _file_of(usual, caption, captions_of_file)
            self._paths[info.absolute_path] = path
            self.captions[path] = caption
            self._of_caption = usual.endswith(_OF_CAPTION_ALONE)
        refuse_too_long(self._paths.items(), "leave --cache_text_encoder_outputs_to_disk out")

    def cache(self, original: Original, models: Any, accelerator: Any) -> None:
        """The trainer's own loop over the captions, whose batches are made behind it."""
        batch_size = self.strategy.batch_size or self.dataset.batch_size
        saving = min((os.cpu_count() or 1) // accelerator.num_processes, _MOST_SAVED // batch_size)
        writers = 2 + max(1, saving)  # one is encoded, one tokenized, the others are saved
        self._device, self._modes = accelerator.device, modes_here(accelerator.device)
        self._caching = Caching(
            "caption", 0, keep=self._make, writers=writers, behind=writers, processes=accelerator.num_processes
        )
        methods: dict[str, Callable[..., Any]] = {
            "get_outputs_npz_path": self._paths.__getitem__,
            "is_disk_cached_outputs_expected": self._is_expected,
            "cache_batch_outputs": self._put,
        }
        with ExitStack() as self._patches:
            self._patches.enter_context(replaced(self.strategy, methods))
            self._patches.enter_context(replaced(np, {"savez": partial(self._savez, np.savez)}))
            with self._caching.running():
                original(self.dataset, models, accelerator)
        self._caching.say_speed()

    def _put(self, *arguments: Any) -> None:
        infos = arguments[-1]
        if not self._caching.encoded:
            in_turn = (arguments[0], "tokenize", self._tokenize), (arguments[-2], "encode_tokens", self._encode)
            for strategy, name_begins, method in in_turn:
                names = [name for name in dir(type(strategy)) if name.startswith(name_begins)]
                methods = {name: partial(method, getattr(strategy, name)) for name in names}
                self._patches.enter_context(replaced(strategy, methods))
        files = sum(len(self._equal_to(info.text_encoder_outputs_npz)) for info in infos)
        self._caching.put(arguments, files)
        if not self._encodes_in_turn:
            self._caching.finish()

    def _tokenize(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """In place of a method that uses tokenizers, which work on one thread at a time."""
        with self._tokenizing:
            return function(*arguments, **options)

    def _encode(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """In place of a method that uses encoders."""
        with self._encoding:
            if self._caching.stopped:
                raise CancelledError
            if self._is_inside:  # one method of an encoding strategy may use another
                return function(*arguments, **options)
            self._is_inside, self._encodes_in_turn, span = True, True, Span(self._device)
            try:
                outputs = function(*arguments, **options)
            finally:
                self._is_inside = False
            span.end()
        seconds = span.seconds()  # waits for a GPU, while other threads add theirs
        self._caching.busy += seconds
        return outputs

    def _make(self, arguments: tuple[Any, ...]) -> int:
        """All of a batch, by the strategy; how many files that are."""
        with self._modes():
            self._encode_and_save(*arguments)
        return sum(self._put_in_place(info.text_encoder_outputs_npz) for info in arguments[-1])

    def _savez(self, savez: Callable[..., None], file: Any, *arrays: Any, **named: Any) -> None:
        """In place of numpy's function: what a strategy saves waits until it is whole, and says what it is of."""
        if arrays or not isinstance(file, str) or file not in self.captions:
            savez(file, *arrays, **named)
            return
        refuse_not_finite(named.values(), f"{file}: what text encoders make of its caption")
        self._made[file] = named

    def _put_in_place(self, path: str) -> int:
        """A file, and those of other images with the same caption, each whole; how many.

        Nothing is synced: what a power failure cuts off shows when every byte is read.
        """
        equal_files = self._equal_to(path) or [path]
        made = self._made.pop(path, None)
        if made is None:  # the strategy saves in a way of its own
            if len(equal_files) > 1:
                raise LatentStoreError(
                    f"{path}: is saved in a way that is not known, so images of equal captions cannot share it"
                )
            return 1
        marks = text_marks(self.captions[path].text, self.encoding.encoders, self.encoding.tokens)
        for number, equal in enumerate(equal_files):
            if number and self._caching.stopped:
                return number
            place_text_npz(Path(equal), made, marks)
            self.saved.add(equal)
        return len(equal_files)

    def _is_expected(self, path: str) -> bool:
        """Whether the trainer need not encode it: of equal captions it encodes the first."""
        if self._is_current(path):
            self._caching.current += 1
            return True
        self._caching.to_do += 1
        equal = self._equal_to(path)
        equal.append(path)
        return len(equal) > 1

    def _equal_to(self, path: str) -> list[str]:
        """The files to make of outputs of the same caption."""
        return self._to_make.setdefault(self.captions[path] if self._of_caption else path, [])

    def _is_current(self, path: str) -> bool:
        if self.strategy.skip_disk_cache_validity_check:
            return is_there(Path(path))
        reasons = text_stale_reasons(path, self.captions[path], self.encoding)
        if any(reason.kind is not Stale.MISSING for reason in reasons):
            self.reasons[path] = reasons
        return not reasons and bool(self._accepts(path))


def _caption_of(info: ImageRecord) -> Caption:
    """An image's caption, and how often it is left out, where a version saves that with the outputs."""
    text = info.caption if isinstance(info.caption, str) else tuple(info.caption)
    return Caption(text, float(getattr(info, "caption_dropout_rate", 0.0)))


def _file_of(usual: str, caption: Caption, captions_of_file: dict[str, list[Caption]]) -> str:
    captions = captions_of_file.setdefault(file_key(usual), [])
    if caption not in captions:
        captions.append(caption)
    number = captions.index(caption) + 1
    return usual if number == 1 else f"{usual.removesuffix('.npz')}_{number}.npz"


def _npz(path: str) -> str:
    return path if path.endswith(".npz") else path + ".npz"


# Captions encoded ahead of a training: the trainer's own run, ended where it would make its loader.
#
# What outputs depend on (weights, their type, tokenizers, lengths, autocast) is decided all over a trainer, so nothing
# but the trainer itself asks for the same ones.


_NOTHING = (
    "precompute --text: this run caches no text-encoder outputs on disk: give the trainer the arguments of the "
    "training, with --cache_text_encoder_outputs and --cache_text_encoder_outputs_to_disk"
)


@dataclass
class EncodedAhead:
    """What a run encodes that ends where it would train.

    Attributes:
        asked: this process encodes captions, and does not train.
        files: those of the captions whose outputs are on disk.
        encoded: how many of them this process has encoded.
    """

    asked: bool = False
    files: set[str] = field(default_factory=set)
    encoded: int = 0

    def end_before_training(self) -> None:
        """Called where a trainer makes its loader, with all of its caches made: a run that only encodes ends here."""
        if not self.asked:
            return
        if not self.files:
            end_run(_NOTHING)
        if is_first_process():
            captions = counted(len(self.files), "caption")
            print(f"kohya_bucket: {captions} cached, {self.encoded} of them encoded by this process", file=sys.stderr)
        raise SystemExit(0)


ahead = EncodedAhead()


# How captions are tokenized, by strategy, of which a run has one: as it is before it has worked.
_tokens: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def tokens_of(tokenizing: Any) -> str:
    """Hash of a sample's tokens and of the vocabularies; "" without a strategy."""
    if tokenizing is None:
        return ""
    if tokenizing not in _tokens:
        _tokens[tokenizing] = tokens_hash(tokenizing.tokenize(SAMPLE), vars(tokenizing))
    return _tokens[tokenizing]
