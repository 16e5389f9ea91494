"""Where musubi-tuner's caches are made, and where a training takes its items from them."""

from __future__ import annotations

import copy
import functools
import inspect
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.adapter.seams import Door, Owners, Seam, Subject
from kohya_bucket.adapter.shapes import Offers, TakesAmong, Uses
from kohya_bucket.errors import ConfigError
from kohya_bucket.musubi.caching.families import FAMILIES
from kohya_bucket.musubi.caching.geometry import holds_clips
from kohya_bucket.musubi.caching.judge import Caches
from kohya_bucket.musubi.caching.made_by import made_by
from kohya_bucket.musubi.caching.names import item_stem, without_clip
from kohya_bucket.musubi.caching.saving import save_latents, save_text
from kohya_bucket.musubi.caching.session import pick_items, session_of
from kohya_bucket.musubi.caching.sources import table_of
from kohya_bucket.musubi.from_config import items_of_config, only_these, pick_out
from kohya_bucket.musubi.objects import CachedDataset, Selector

__all__ = ["CACHING"]

_given: list[Namespace] = []  # what the program's arguments are, once the config is read


def _generate(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def generate(self: Any, user_config: Any, argparse_namespace: Namespace, **runtime_params: Any) -> Any:
        _given[:] = [argparse_namespace]
        if getattr(argparse_namespace, "skip_existing", False):
            argparse_namespace.skip_existing = False  # it asks only whether there is a file
        return original(self, user_config, argparse_namespace, **runtime_params)

    return generate


def _knows(dataset: Any) -> bool:
    return getattr(dataset, "architecture", None) in FAMILIES and hasattr(dataset, "datasource")


class _NoClips:
    """A source without clips, which keeps the selector that it is given."""

    selector: Selector | None = None

    def set_bucket_selector(self, selector: Selector) -> None:
        self.selector = selector

    def set_source_and_target_fps(self, *_: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _selector(dataset: Any, door: Door) -> Selector:
    """What gives the data set's buckets. How clips get theirs depends on the version, so its own code is asked."""
    if not holds_clips(dataset):
        make = door.owners.named("BucketSelector")
        made: Selector = make(
            dataset.resolution, dataset.enable_bucket, dataset.bucket_no_upscale, dataset.architecture
        )
        return made
    asked = copy.copy(dataset)
    asked.datasource = _NoClips()
    for _ in inspect.unwrap(type(dataset).retrieve_latent_cache_batches)(asked, 1):
        pass
    if asked.datasource.selector is None:
        raise ConfigError("musubi-tuner names no buckets for clips")
    return asked.datasource.selector  # type: ignore[no-any-return]


def _caches(dataset: CachedDataset, door: Door) -> Caches:
    with exit_with_message():
        return Caches(dataset, _selector(dataset, door), made_by(_given[0] if _given else None))


def _shown(self: Any) -> bool:
    """Whether items are only looked at."""
    return bool(_given) and getattr(_given[0], "debug_mode", None) is not None


def _retrieve_latents(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def retrieve_latent_cache_batches(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if not _knows(self) or _shown(self):
            yield from original(self, *args, **kwargs)
            return
        session = session_of(self)
        if session is None or not session.text:
            session = session_of(self, lambda: _caches(self, door))
        if session is None:
            return
        with pick_items(self, session):
            for key, batch in original(self, *args, **kwargs):
                taken = [item for item in batch if session.take(item)]
                if taken:
                    yield key, taken

    return retrieve_latent_cache_batches


def _retrieve_text(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def retrieve_text_encoder_output_cache_batches(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        session = session_of(self) if _knows(self) else None
        if session is None:
            yield from original(self, *args, **kwargs)
            return
        with pick_items(self, session):
            for batch in original(self, *args, **kwargs):
                taken = [item for item in batch if session.take(item)]
                if taken:
                    yield taken

    return retrieve_text_encoder_output_cache_batches


def _all_latents(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def get_all_latent_cache_files(self: Any) -> list[str]:
        session = session_of(self)
        found: list[str] = original(self)
        return found if session is None or session.text else session.removable(found)

    return get_all_latent_cache_files


def _all_text(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def get_all_text_encoder_output_cache_files(self: Any) -> list[str]:
        found: list[str] = original(self)
        if not _knows(self):
            return found
        session = session_of(self, lambda: _caches(self, door), text=True)
        return found if session is None else session.removable(found)

    return get_all_text_encoder_output_cache_files


def _path(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def path(self: Any, item_info: Any) -> str:
        if not _knows(self):
            return str(original(self, item_info))
        session = session_of(self)
        table = table_of(self)
        clips = holds_clips(self)
        source = table.of_item(item_info, clips=clips)
        clips = clips and item_info.frame_count is not None
        if source is None:
            return str(original(self, item_info))
        if session is not None and clips:
            session.note_clip(source, item_info.item_key)
        key, _ = without_clip(item_info.item_key) if clips else (item_info.item_key, None)
        own = item_stem(item_info.item_key)
        renamed = copy.copy(item_info)
        renamed.item_key = source.stem + own[len(item_stem(key)) :] + Path(key).suffix
        return str(original(self, renamed))

    return path


def _save_latents(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def save_latent_cache_common(item_info: Any, *args: Any, **kwargs: Any) -> None:
        with exit_with_message():
            save_latents(item_info, lambda: original(item_info, *args, **kwargs))

    return save_latent_cache_common


def _save_text(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def save_text_encoder_output_cache_common(item_info: Any, *args: Any, **kwargs: Any) -> None:
        with exit_with_message():
            save_text(item_info, lambda: original(item_info, *args, **kwargs))

    return save_text_encoder_output_cache_common


def _prepare(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def prepare_for_training(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _knows(self):
            original(self, *args, **kwargs)
            return
        with exit_with_message():
            caches = Caches(self, _selector(self, door))
            program = Path(str(door.owners.home.__file__)).parent.parent
            items = items_of_config(caches, program, getattr(_given[0], "dataset_config", "") if _given else "")
        with only_these(items):
            original(self, *args, **kwargs)

    return prepare_for_training


def _make_manager(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def init(self: Any, bucketed_item_info: dict[Any, list[Any]], *args: Any, **kwargs: Any) -> None:
        pick_out(bucketed_item_info)
        original(self, bucketed_item_info, *args, **kwargs)

    return init


_KINDS = ("ImageDataset", "VideoDataset")


def _caching(owners: Owners) -> tuple[Seam, ...]:
    base = "BaseDataset"
    item = (TakesAmong("item_info"),)
    return (
        Seam("BlueprintGenerator.generate", (TakesAmong("user_config", "argparse_namespace"),), _generate),
        Seam("BucketSelector", (Offers(Selector),)),
        *(Seam(kind, (Offers(CachedDataset),)) for kind in _KINDS),
        *(
            seam
            for kind in _KINDS
            for seam in (
                Seam(
                    f"{kind}.retrieve_latent_cache_batches",
                    (TakesAmong("num_workers"), Uses("datasource", "get_latent_cache_path")),
                    _retrieve_latents,
                ),
                Seam(
                    f"{kind}.retrieve_text_encoder_output_cache_batches",
                    (TakesAmong("num_workers"), Uses("datasource")),
                    _retrieve_text,
                ),
            )
        ),
        Seam(f"{base}.get_all_latent_cache_files", (), _all_latents),
        Seam(f"{base}.get_all_text_encoder_output_cache_files", (), _all_text),
        Seam(f"{base}.get_latent_cache_path", (*item, Uses("item_key", "original_size")), _path),
        Seam(f"{base}.get_text_encoder_output_cache_path", (*item, Uses("item_key")), _path),
        Seam("save_latent_cache_common", (*item, Uses("latent_cache_path")), _save_latents),
        Seam("save_text_encoder_output_cache_common", (*item, Uses("text_encoder_output_cache_path")), _save_text),
        *(Seam(f"{kind}.prepare_for_training", (Uses("BucketBatchManager"),), _prepare) for kind in _KINDS),
        Seam("BucketBatchManager.__init__", (TakesAmong("bucketed_item_info", "batch_size"),), _make_manager),
    )


CACHING = Subject("caching", "caches are made by musubi-tuner's own code, and whatever lies there is trained", _caching)
