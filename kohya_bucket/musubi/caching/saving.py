"""Saving what was encoded: whole or not at all, with what it was made from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kohya_bucket.latents.stale import Stale
from kohya_bucket.musubi.caching.geometry import fingerprint_of_clip, fingerprint_of_image
from kohya_bucket.musubi.caching.note import REPAIRED, LatentsNote, TextNote, texts_of
from kohya_bucket.musubi.caching.session import ORIGIN, Origin
from kohya_bucket.musubi.caching.sources import identity
from kohya_bucket.musubi.caching.tensor_file import TensorFile, write_with_texts

__all__ = ["save_latents", "save_text"]

_LATENTS, _TEXT = "latent_cache_path", "text_encoder_output_cache_path"


def save_latents(item: Any, save: Callable[[], object]) -> None:
    """What `save` writes to the item's path.

    Raises:
        LatentStoreError: the disk refuses.
    """
    origin: Origin | None = getattr(item, ORIGIN, None)

    def texts(file: TensorFile) -> dict[str, str]:
        return {} if origin is None else texts_of(_latents_note(item, origin, file), file)

    _save(item, _LATENTS, save, texts)


def save_text(item: Any, save: Callable[[], object]) -> None:
    """As `save_latents`. `save` adds to a file that is there: only what another pass has made of this caption is."""
    origin: Origin | None = getattr(item, ORIGIN, None)

    def texts(file: TensorFile) -> dict[str, str]:
        if origin is None:
            return {}
        made = _made(origin) | ({REPAIRED: "true"} if origin.session.caches.repair else {})
        session, source = origin.session, origin.source
        settings = session.caches.settings_of_text(source)
        clips = sorted(session.clips.get(source.number, []))
        return texts_of(TextNote(session.identities.get(source.number, []), made, settings, clips), file)

    keeps = Path(getattr(item, _TEXT)) if origin is None or _adds(origin, item.caption) else None
    _save(item, _TEXT, save, texts, keeps)


def _save(
    item: Any,
    attribute: str,
    save: Callable[[], object],
    texts: Callable[[TensorFile], dict[str, str]],
    keeps: Path | None = None,
) -> None:
    path = getattr(item, attribute)

    def write(temporary: Path) -> None:
        if keeps is not None and keeps.exists():
            shutil.copyfile(keeps, temporary)
        setattr(item, attribute, os.fspath(temporary))
        try:
            save()
        finally:
            setattr(item, attribute, path)

    write_with_texts(Path(path), write, texts)


def _adds(origin: Origin, caption: str) -> bool:
    caches = origin.session.caches
    reasons = caches.text(origin.source, caption).reasons if caches.family.passes else None
    return reasons is not None and all(reason.kind is Stale.PART for reason in reasons)


def _latents_note(item: Any, origin: Origin, file: TensorFile) -> LatentsNote:
    session, source = origin.session, origin.source
    known = session.identities.get(source.number) or [identity(path, content=True) for path in source.files]
    vae, dtype = session.caches.made_by.get("vae", ""), next(iter(file.shapes), "").rpartition("_")[2]
    size: tuple[int, int] = tuple(item.original_size)
    if session.caches.clips:
        fingerprint = fingerprint_of_clip(known[0], size, vae, dtype)
    else:
        fingerprint = fingerprint_of_image(known[0], size, tuple(item.bucket_size[:2]), vae, dtype)
    clips = sorted(session.clips.get(source.number, []))
    return LatentsNote(fingerprint, known[1:], session.caches.settings_of(source), clips, _made(origin))


def _made(origin: Origin) -> dict[str, str]:
    return origin.session.caches.made_by
