"""sd-scripts' own loop over captions, with whole and checked files under it.

sd-scripts names a file for the image alone. Where images of one stem, or datasets that share an image, have different
captions, the first one gets the usual file and the others get further ones.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zipfile import is_zipfile

from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import ConfigError, LatentStoreError
from kohya_bucket.images.listing import file_key
from kohya_bucket.latents.encode.text_encoder import SAMPLE, encoders_hash, tokens_hash
from kohya_bucket.latents.fingerprint import Stale, StaleReason
from kohya_bucket.latents.items import Caption, Encoding
from kohya_bucket.latents.store.storage import is_there
from kohya_bucket.texts import counted
from kohya_bucket.trainers.door.ranks import end_run, stop_all_ranks_on_error, wait_for_ranks, warn_once
from kohya_bucket.trainers.sdscripts.caching.one_encoder import OneEncoder
from kohya_bucket.trainers.sdscripts.caching.session import (
    refuse_not_finite,
    replaced,
    shared_by,
    temporary_folder,
)
from kohya_bucket.trainers.sdscripts.npz.names import refuse_too_long
from kohya_bucket.trainers.sdscripts.npz.read_write import OpenNpz, place_text_npz, text_marks, text_stale_reasons
from kohya_bucket.trainers.sdscripts.objects import Dataset, ImageRecord, TextStrategy
from kohya_bucket.trainers.sdscripts.wording import say_recached

logger = logging.getLogger("kohya_bucket")

Original = Callable[[Any, Any, Any], Any]

# Ends of the files of sd-scripts' model families: what other strategies save may be of the image too.
_OF_CAPTION_ALONE = ("_te_outputs.npz", "_sd3_te.npz", "_flux_te.npz", "_lumina_te.npz", "_hi_te.npz", "_anima_te.npz")
_MOST_SAVED = 4  # captions at once, while another is encoded
_FIRST_SECONDS = 10.0  # after which the time that is left is known


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
    with temporary_folder() as folder:
        session = TextSession(dataset, strategy, encoding, folder)
        batch_size = strategy.batch_size or dataset.batch_size
        saving = min((os.cpu_count() or 1) // accelerator.num_processes, _MOST_SAVED // batch_size)
        encoder = OneEncoder(2 + max(1, saving))
        try:
            with replaced(strategy, session.methods(encoder)), encoder.running():
                original(dataset, models, accelerator)
        except KeyboardInterrupt:
            session.say_kept()
            raise
    session.say_speed(encoder.busy)
    wait_for_ranks()
    ahead.files.update(session.captions)
    ahead.encoded += len(session.saved)
    say_recached(session.reasons)


class Made(NamedTuple):
    """Outputs as the strategy saved them, in `file`, and the path that they are to get."""

    path: str
    file: Path


class TextSession:
    """One caching call.

    Args:
        folder: for files that are not in their places yet.

    Attributes:
        captions: by file.
        reasons: why files are made again.
        saved: the files that this process has written.
    """

    def __init__(self, dataset: Dataset, strategy: TextStrategy, encoding: Encoding, folder: Path) -> None:
        self.strategy, self.encoding, self._folder = strategy, encoding, folder
        self.captions: dict[str, Caption] = {}
        self.reasons: dict[str, list[StaleReason]] = {}
        self.saved: set[str] = set()
        self._accepts = strategy.is_disk_cached_outputs_expected
        self._encode_and_save = strategy.cache_batch_outputs
        self._numbers = itertools.count()
        self._current, self._encoded = 0, 0
        self._to_make: dict[Caption | str, list[str]] = {}  # files by caption, or each by itself
        self._began, self._told = 0.0, False
        self._paths: dict[str, str] = {}
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

    def methods(self, encoder: OneEncoder) -> dict[str, Callable[..., Any]]:
        """Replacements for the strategy's methods, by name."""
        return {
            "get_outputs_npz_path": self._paths.__getitem__,
            "is_disk_cached_outputs_expected": self._is_expected,
            "cache_batch_outputs": partial(self._encode, encoder),
        }

    def _encode(self, encoder: OneEncoder, *arguments: Any) -> None:
        self._began = self._began or time.monotonic()
        infos: Sequence[Any] = arguments[-1]
        batch = [Made(info.text_encoder_outputs_npz, self._folder / f"{next(self._numbers)}.npz") for info in infos]
        keep = partial(self._put_in_place, batch, encoder)
        encoder.encode(arguments[-2], partial(self._encode_batch, batch, arguments), keep)
        self._encoded += len(infos)
        self._say_time_left()

    def _encode_batch(self, batch: Sequence[Made], arguments: Sequence[Any]) -> None:
        """The strategy saves a batch into a folder of its own."""
        infos = arguments[-1]
        try:
            for info, made in zip(infos, batch, strict=True):
                info.text_encoder_outputs_npz = str(made.file)
            self._encode_and_save(*arguments)
        finally:
            for info, made in zip(infos, batch, strict=True):
                info.text_encoder_outputs_npz = made.path

    def _put_in_place(self, batch: Iterable[Made], encoder: OneEncoder) -> None:
        """From there each file is put in place whole, also for other images of the same caption.

        Nothing is synced: what a power failure cuts off shows when every byte is read.
        """
        for path, file in batch:
            equal_files = self._equal_to(path) or [path]
            if not is_zipfile(file):  # it is saved elsewhere, or in a way of the strategy's own
                if len(equal_files) > 1:
                    raise LatentStoreError(
                        f"{path}: is saved in a way that is not known, so images of equal captions cannot share it"
                    )
                continue
            content = file.read_bytes()
            file.unlink()
            with OpenNpz(file, content) as made:
                if made.fault():
                    arrays = [made.array(name) for name in made.names]
                    refuse_not_finite(arrays, f"{path}: what text encoders make of its caption")
            marks = text_marks(self.captions[path].text, self.encoding.encoders, self.encoding.tokens)
            for number, equal in enumerate(equal_files):
                if number and encoder.stopped:
                    break
                place_text_npz(Path(equal), content, marks)
                self.saved.add(equal)

    def _is_expected(self, path: str) -> bool:
        """Whether the trainer need not encode it: of equal captions it encodes the first."""
        if self._is_current(path):
            self._current += 1
            return True
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

    # -- for the user --------------------------------------------------------------------------------

    def _say_time_left(self) -> None:
        """Once, after the first batches."""
        seconds, left = time.monotonic() - self._began, len(self._to_make) - self._encoded
        if left > 0 and seconds > _FIRST_SECONDS and not self._told and is_first_process():
            self._told = True
            left_seconds = seconds * left / self._encoded
            wait = f"{left_seconds / 60:.0f} min" if left_seconds > 120 else f"{left_seconds:.0f} s"
            captions = counted(len(self._to_make), "caption")
            logger.info("%s of %s are encoded; the others take about %s", f"{self._encoded:,}", captions, wait)

    def say_speed(self, busy: float) -> None:
        """`busy` is how many seconds the encoder ran."""
        if self._encoded and is_first_process():
            seconds = time.monotonic() - self._began
            logger.info(
                "%s for %s were encoded in %.1f s: %.1f captions/s; the encoder ran %.0f%% of the time",
                counted(self._encoded, "caption"), counted(len(self.saved), "file"), seconds, self._encoded / seconds,
                100 * busy / seconds,
            )  # fmt: skip

    def say_kept(self) -> None:
        """After an interrupt."""
        if self._encoded and is_first_process():
            total = self._current + sum(map(len, self._to_make.values()))
            kept = self._current + len(self.saved)
            logger.warning("%s of %s kept; the same command goes on", f"{kept:,}", counted(total, "caption"))


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
