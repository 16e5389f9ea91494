"""sd-scripts' cache of text-encoder outputs as a store of shards, behind every one of its caching strategies.

sd-scripts is given a caption's key in place of an npz path, so images with one caption share what is stored.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.ranks import is_first_process, wait_for_ranks
from kohya_bucket.adapter.store_folder import store_folder
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.stale import Reason, Stale
from kohya_bucket.latents.store.writer import write_manifest
from kohya_bucket.latents.text.caption import ENCODING_COLUMNS, Caption, Encoding, why_text_stale
from kohya_bucket.latents.text.exact_arrays import Array, pack
from kohya_bucket.latents.text.families import collection_of_file
from kohya_bucket.latents.text.text_store import TEXT_FOLDER, TextStore
from kohya_bucket.latents.text.text_writer import TextWriter
from kohya_bucket.sdscripts.caching.text_reader import StrategyReader, TextLoader, with_npz
from kohya_bucket.sdscripts.objects import Dataset, ImageRecord, TextStrategy
from kohya_bucket.texts import one_line

__all__ = ["TextShardCache", "TextShardSession"]

logger = logging.getLogger("kohya_bucket")


@dataclass
class TextShardCache:
    """Outputs by the caption's key, for one model family.

    Args:
        root: the folder of captions.
        collection: the family's name.
    """

    root: Path
    collection: str
    _store: TextStore | None = field(default=None, init=False)
    _writer: TextWriter | None = field(default=None, init=False)
    _at: dict[str, int] = field(default_factory=dict, init=False)
    _made_by: list[Encoding] | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writer": None, "_made_by": None}

    def refresh(self) -> None:
        """Look at what is on disk now, what other processes wrote included."""
        if self._writer is None:
            self._writer = TextWriter(self.root)
        if self._store is None:
            self._store = TextStore(self.root)
        else:
            self._store.refresh()
        sources, here = self._store.strings("source"), self._store.in_collection(self.collection)
        self._made_by = None
        self._at = {sources[i]: i for i in here.tolist()}

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def why_missing(self, key: str, encoding: Encoding) -> list[Reason]:
        """Why a caption must be encoded (again); none if the store has it as it should be."""
        if key not in self._at:
            return [Reason(Stale.MISSING)]
        if self._made_by is None:
            columns = [self.opened.strings(name) for name in ENCODING_COLUMNS]
            self._made_by = [Encoding(*values) for values in zip(*columns, strict=True)]
        return why_text_stale(self._made_by[self._at[key]], encoding)

    def save(self, caption: Caption, encoding: Encoding, arrays: Mapping[str, Any]) -> None:
        """Add a caption; it is on disk after `flush`."""
        if self._writer is None:
            self.refresh()
        assert self._writer is not None
        packed = {name: pack(np.asarray(array)) for name, array in arrays.items()}
        self._writer.add_text(caption.entry(self.collection, encoding), packed)

    def flush(self, *, index: bool = False) -> None:
        """Commit, and see it; with `index` (one process, at the end), bring the manifest up to date."""
        if self._writer is not None:
            self._writer.flush()
        self.refresh()
        if index:
            write_manifest(self.opened)

    def load(self, key: str) -> dict[str, Array]:
        """Arrays of a caption by name, as they were given to `save`.

        Raises:
            LatentStoreError: they are not there, or damaged.
        """
        if key not in self._at:
            raise LatentStoreError(f"{self.root} has no outputs for {key} of {self.collection}: cache again")
        return self.opened.arrays(self._at[key])

    def choices(self, key: str) -> tuple[tuple[str, ...], dict[str, Array]]:
        """Names of a caption's arrays, and those without axes."""
        i = self._at[key]
        return self.opened.names(i), self.opened.scalars(i)

    @property
    def opened(self) -> TextStore:
        """The store, as it was last looked at."""
        if self._store is None:
            self.refresh()
        assert self._store is not None
        return self._store


class TextShardSession:
    """One caching call: which captions there are, which of them this process encodes, and why.

    Attributes:
        captions: by key.
        images: by key, of the first image that has the caption.
        owners: by key, the rank that sd-scripts gives that image to.
        reasons: why captions are encoded again, by image.
    """

    def __init__(
        self, dataset: Dataset, strategy: TextStrategy, accelerator: Any, options: AdapterOptions, encoding: Encoding
    ) -> None:
        self.strategy, self.encoding = strategy, encoding
        self.rank, ranks = int(accelerator.process_index), int(accelerator.num_processes)
        self.captions: dict[str, Caption] = {}
        self.images: dict[str, str] = {}
        self.owners: dict[str, int] = {}
        self.reasons: dict[str, list[Reason]] = {}
        self._keys: dict[str, str] = {}
        self._asked: set[str] = set()
        records: list[ImageRecord] = list(dataset.image_data.values())
        for number, info in enumerate(records):
            text = info.caption if isinstance(info.caption, str) else tuple(info.caption)
            caption = Caption(text, float(getattr(info, "caption_dropout_rate", 0.0)))  # where a version has it
            key = caption.key
            self._keys[info.absolute_path] = key
            if key not in self.captions:
                self.captions[key], self.images[key] = caption, str(info.absolute_path)
                self.owners[key] = number % ranks
        self._reader = StrategyReader(functools.partial(type(strategy).load_outputs_npz, strategy))
        self._accepts = functools.partial(type(strategy).is_disk_cached_outputs_expected, strategy)
        self._accepted: dict[object, bool] = {}
        root = store_folder(options, str(records[0].absolute_path)) / TEXT_FOLDER
        self.cache = TextShardCache(root, collection_of_file(strategy.get_outputs_npz_path("x.png").removeprefix("x")))
        self.cache.refresh()
        if is_first_process():
            logger.info("text-encoder outputs are kept in %s", one_line(root))

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What stands in for the strategy's methods."""
        return {"get_outputs_npz_path": self._keys.__getitem__, "is_disk_cached_outputs_expected": self._is_expected}

    def holds(self, path: Any) -> bool:
        """Whether this is a key of a caption of this call, in place of a path."""
        return isinstance(path, str) and path in self.captions

    def save(self, key: str, arrays: Mapping[str, Any]) -> None:
        """Add outputs; the first are refused at once if they could not be read again."""
        self._reader.order(tuple(sorted(arrays)))
        self.cache.save(self.captions[key], self.encoding, arrays)

    def keep(self) -> None:
        """Where the loop ended half-way, by Ctrl-C or an error: put on disk what is encoded."""
        with suppress(LatentStoreError):  # the first error is the one to report
            self.cache.flush()

    def finish(self) -> None:
        """After sd-scripts' loop: every rank sees everything, and its loaders read through the store.

        Raises:
            LatentStoreError: captions were left out, or cannot be read as this version does.
        """
        self.cache.flush()
        wait_for_ranks()
        self.cache.flush(index=is_first_process())
        wait_for_ranks()
        self.cache.refresh()
        missing = [key for key in self.captions if self._why_missing(key)]
        if missing:
            raise LatentStoreError(
                f"{len(missing)} of {len(self.captions)} captions were not encoded into {self.cache.root}, the first "
                f'that of {self.images[missing[0]]}: this sd-scripts saves them otherwise; use text_cache = "npz"'
            )
        for names in {self.cache.choices(key)[0] for key in self.captions}:
            self._reader.order(names)
        # Stays: loader workers read through it.
        self.strategy.load_outputs_npz = TextLoader(self.cache, self._reader.orders)

    def _is_expected(self, key: str) -> bool:
        if self.owners[key] != self.rank or key in self._asked:
            return True  # is encoded for another image that has the same caption
        self._asked.add(key)
        reasons = self._why_missing(key)
        trusted = self.strategy.skip_disk_cache_validity_check
        if not reasons and not trusted and not self._accepts_choices(key):
            reasons = [Reason(Stale.TOKENS, "other options", "those of this run")]
        if any(reason.kind is not Stale.MISSING for reason in reasons):
            self.reasons[self.images[key]] = reasons
        return not reasons

    def _why_missing(self, key: str) -> list[Reason]:
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
