"""Seams of musubi-tuner's caching programs, and of the caches that its trainings read."""

from __future__ import annotations

import copy
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.ranks import exit_with_message
from kohya_bucket.trainers.door.seams import Door, Replaced, Seam, SeamGroup, where
from kohya_bucket.trainers.door.shapes import Behaves, Offers, Takes, TakesAmong, Uses, checksum, sample_picture
from kohya_bucket.trainers.musubi.cache_files import MadeBy, made_by
from kohya_bucket.trainers.musubi.caches import Caches, holds_clips
from kohya_bucket.trainers.musubi.caching import Session, cut, focus_in, save_behind
from kohya_bucket.trainers.musubi.families import family_of
from kohya_bucket.trainers.musubi.keys import CONTROL_IN_THE_MIDDLE
from kohya_bucket.trainers.musubi.objects import CachedDataset, Selector
from kohya_bucket.trainers.musubi.trained_items import Trained, items_of_config, pick_out_of

logger = logging.getLogger("kohya_bucket")


@dataclass
class _Run:
    """What lasts for a run in this process."""

    arguments: Namespace | None = None  # of the program, once the config is read
    sessions: WeakKeyDictionary[Any, Session] = field(default_factory=WeakKeyDictionary)  # by dataset that is cached
    trained: Trained | None = None  # of the dataset that makes its buckets at the moment


_run = _Run()


def _generate(seam: Replaced, self: Any, user_config: Any, argparse_namespace: Namespace, **runtime: Any) -> Any:
    _run.arguments = argparse_namespace
    known = _are_known(runtime.get("architecture"), seam.door)
    if known and getattr(argparse_namespace, "skip_existing", False):
        argparse_namespace.skip_existing = False  # it asks only whether there is a file
    return seam.original(self, user_config, argparse_namespace, **runtime)


def _package(door: Door) -> Path:
    return Path(str(door.owners.home.__file__)).parent.parent


def _are_known(architecture: Any, door: Door) -> bool:
    """Whether it is known how the caches of a model are named and found."""
    family = family_of(architecture, _package(door))
    return family is not None and family.plain


def _knows(dataset: Any, door: Door) -> bool:
    return _are_known(getattr(dataset, "architecture", None), door) and hasattr(dataset, "datasource")


def _caches(dataset: Any, door: Door, made: MadeBy | None = None) -> Caches:
    package = _package(door)
    if holds_clips(dataset):  # how they get their buckets depends on the version, so its own code is asked
        selector = clip_selector(type(dataset).retrieve_latent_cache_batches, copy.copy(dataset))
        if selector is None:
            raise ConfigError("musubi-tuner names no buckets for clips")
    else:
        keys = dataset.resolution, dataset.enable_bucket, dataset.bucket_no_upscale, dataset.architecture
        selector = door.owners.named("BucketSelector")(*keys)
    return Caches(dataset, selector, made or {}, package, door.options(), values=made is not None)


def clip_selector(retrieve: Any, dataset: Any) -> Selector | None:
    """What the code that caches clips chooses sizes with; the dataset loses its source."""
    dataset.datasource = _NoClips()
    for _ in inspect.unwrap(retrieve)(dataset, 1):
        pass
    selector: Selector | None = dataset.datasource.selector
    return selector


class _NoClips:
    """A source without clips, which keeps the selector that it is given."""

    selector: Selector | None = None

    def set_bucket_selector(self, selector: Selector) -> None:
        self.selector = selector

    def set_source_and_target_fps(self, *_: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _begin_session(dataset: Any, door: Door, *, text: bool) -> Session:
    with exit_with_message():
        caches = _caches(dataset, door, made_by(_run.arguments))
    if caches.focus and not caches.focus_of_controls:
        logger.warning("[kohya_bucket] %s", CONTROL_IN_THE_MIDDLE)
    session = _run.sessions[dataset] = Session(caches, text=text)
    return session


def _say_left_alone(dataset: Any) -> None:
    message = "[kohya_bucket] caches of %r are left to musubi-tuner: they are made, found and trained unchecked"
    logger.warning(message, getattr(dataset, "architecture", None))


def _say_what_focus_does(door: Door, *, known: bool) -> None:
    """What is asked for and not cropped here: only shown, or cached as of a family without a table of its own."""
    if not door.options().focus:
        return
    if known:
        logger.warning("[kohya_bucket] focus is set: --debug_mode shows crops in the middle, caching keeps the focus")
        return
    with exit_with_message():
        raise ConfigError("[kohya_bucket] focus is set, but this model's caches are not known: leave focus out")


def _retrieve_latents(seam: Replaced, self: Any, num_workers: int, **more: Any) -> Iterator[Any]:
    from kohya_bucket.trainers.musubi.loops import loop_over, workers_of

    looked_at = getattr(_run.arguments, "debug_mode", None) is not None
    known = _knows(self, seam.door)
    if not known:
        _say_left_alone(self)
    if not known or looked_at:
        _say_what_focus_does(seam.door, known=known)
        yield from seam.original(self, num_workers, **more)
        return
    session = _run.sessions.get(self)
    if session is None or not session.text:
        session = _begin_session(self, seam.door, text=False)
    session.captions_alone = False
    with loop_over(session, self, seam.original, workers_of(num_workers, _run.arguments), more) as batches:
        for key, batch in batches:
            if readable := [item for item in batch if session.take(item)]:
                yield key, readable


def _retrieve_text(seam: Replaced, self: Any, num_workers: int, **more: Any) -> Iterator[Any]:
    from kohya_bucket.trainers.musubi.loops import loop_over, workers_of

    session = _run.sessions.get(self) if _knows(self, seam.door) else None
    if session is None:
        yield from seam.original(self, num_workers, **more)
        return
    with loop_over(session, self, seam.original, workers_of(num_workers, _run.arguments), more) as batches:
        for batch in batches:
            if readable := [item for item in batch if session.take(item)]:
                yield readable


def _all_latents(seam: Replaced, self: Any, *args: Any, **kwargs: Any) -> list[str]:
    session = _run.sessions.get(self)
    files: list[str] = seam.original(self, *args, **kwargs)
    return files if session is None or session.text else session.removable(files)


def _all_text(seam: Replaced, self: Any, *args: Any, **kwargs: Any) -> list[str]:
    files: list[str] = seam.original(self, *args, **kwargs)
    return _begin_session(self, seam.door, text=True).removable(files) if _knows(self, seam.door) else files


def _path(seam: Replaced, self: Any, item_info: Any, **more: Any) -> str:
    if session := _run.sessions.get(self):
        session.note_clip(item_info)
    return str(seam.original(self, item_info, **more))


def _resize(seam: Replaced, image: Any, bucket_reso: Any) -> Any:
    focus = focus_in(image)
    return seam.original(image, bucket_reso) if focus is None else cut(image, bucket_reso, focus)


def _saving(*, text: bool) -> Callable[..., None]:
    def save(seam: Replaced, item_info: Any, sd: Any, *args: Any, **kwargs: Any) -> None:
        save_behind(item_info, sd, lambda item: seam.original(item, sd, *args, **kwargs), text=text)

    return save


def _encode_latents(seam: Replaced, datasets: Any, encode: Any, args: Any, **more: Any) -> None:
    from kohya_bucket.trainers.musubi.loops import limit_of, together

    known = [dataset for dataset in datasets if _knows(dataset, seam.door)]
    with together(known, encode, limit_of(args)) as encode_together:
        seam.original(datasets, encode_together, args, **more)


def _encode_captions(seam: Replaced, datasets: Any, encode: Any, **more: Any) -> None:
    from kohya_bucket.trainers.musubi.loops import together

    with together((), encode, None) as encode_measured:
        seam.original(datasets=datasets, encode=encode_measured, **more)


def _prepare(seam: Replaced, self: Any, *args: Any, **kwargs: Any) -> None:
    if not _knows(self, seam.door):
        _say_left_alone(self)
        seam.original(self, *args, **kwargs)
        return
    config = getattr(_run.arguments, "dataset_config", "")
    with exit_with_message():
        _run.trained = items_of_config(_caches(self, seam.door), config)
    try:
        seam.original(self, *args, **kwargs)
    finally:
        _run.trained = None


def _make_manager(
    seam: Replaced, self: Any, bucketed_item_info: dict[Any, list[Any]], *args: Any, **kwargs: Any
) -> None:
    if _run.trained is not None:
        pick_out_of(bucketed_item_info, _run.trained)
    seam.original(self, bucketed_item_info, *args, **kwargs)


def _pixels(theirs: Any) -> Iterator[tuple[str, ...]]:
    """A picture, smaller, larger and as it is; without OpenCV musubi-tuner's own filters differ."""
    picture = sample_picture()
    for bucket in ((24, 20), (90, 48), (60, 40), (48, 40), (60, 32)):
        both = theirs(picture, bucket), cut(picture, bucket, None)
        yield f"60x40 in the bucket {bucket}", *map(checksum, both)


_KINDS = ("ImageDataset", "VideoDataset")
_ASKED = TakesAmong("num_workers")  # here too, of a dataset without clips
_BASE, _PATHS = "BaseDataset", "get_latent_cache_path"
_LATENTS, _TEXT = "retrieve_latent_cache_batches", "retrieve_text_encoder_output_cache_batches"

CACHING = SeamGroup(
    "caching",
    "caches are made by musubi-tuner's own code, and whatever is there is trained",
    (
        Seam("BlueprintGenerator.generate", (), _generate),
        Seam("BucketSelector", (Offers(Selector),)),
        Seam("resize_image_to_bucket", (Takes("image", "bucket_reso"), Behaves(_pixels)), _resize),
        *(Seam(kind, (Offers(CachedDataset),)) for kind in _KINDS),
        *(Seam(f"{kind}.{_LATENTS}", (_ASKED, Uses("datasource", _PATHS)), _retrieve_latents) for kind in _KINDS),
        *(Seam(f"{kind}.{_TEXT}", (Uses("datasource"),), _retrieve_text) for kind in _KINDS),
        Seam(f"{_BASE}.get_all_latent_cache_files", (), _all_latents),
        Seam(f"{_BASE}.get_all_text_encoder_output_cache_files", (), _all_text),
        Seam(f"{_BASE}.{_PATHS}", (Uses("item_key", "original_size"),), _path),
        Seam(f"{_BASE}.get_text_encoder_output_cache_path", (Uses("item_key"),)),
        Seam("save_latent_cache_common", (Uses("latent_cache_path"),), _saving(text=False)),
        Seam("save_text_encoder_output_cache_common", (Uses("text_encoder_output_cache_path"),), _saving(text=True)),
        *(Seam(f"{kind}.prepare_for_training", (Uses("BucketBatchManager"),), _prepare) for kind in _KINDS),
        Seam("BucketBatchManager.__init__", (), _make_manager),
    ),
)

ENCODING = SeamGroup(
    "encoding",
    "images are encoded in batches of the dataset's own size, and Ctrl-C does not say what is kept",
    (
        *where(lambda owners: owners.has("encode_datasets"), Seam("encode_datasets", (), _encode_latents)),
        *where(
            lambda owners: owners.has("process_text_encoder_batches"),
            Seam("process_text_encoder_batches", (), _encode_captions),
        ),
    ),
)
