"""What `precompute` and `cache` ask of a trainer that keeps caches beside images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_bucket.latents.items import LatentItems
from kohya_bucket.trainers.door.options import AdapterOptions


@dataclass
class Exchange:
    """What was converted: `done` latents; `skipped` lists (file, reason)."""

    done: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class CacheFiles:
    """The caches that a trainer keeps beside images, and the way from and to stores.

    Attributes:
        version: of a version's name or a checkout's folder, or "" for the checkout at hand, the version that reads
            caches like it; "" for the newest.
        check_kind: refuses a kind of latents that the files cannot hold, and a folder that cannot have them.
        check_encoder: refuses a VAE that is not of a family.
        writer: of (family, folder, version) a `LatentOutput` with the method `with_files`.
        import_latents, export_latents: between files and a store.
        end_with_captions: lets the trainer that runs next in this process end once its captions are encoded.
    """

    version: Callable[[str], str]
    check_kind: Callable[[str, Path | None], None]
    check_encoder: Callable[[Any, str], None]
    writer: Callable[[str, Path | None, str], Any]
    import_latents: Callable[..., Exchange]
    export_latents: Callable[..., Exchange]
    end_with_captions: Callable[[], None]


@dataclass(frozen=True)
class ConfigLatents:
    """The latents that training with a config reads.

    Attributes:
        options: of its `[kohya_bucket]` table.
        paths: of the images of each dataset; batch_sizes: of each.
        wanted: of an `EncodeOptions` and the folder that names start from, all that the trainer would cache, one part
            for each kind of caching; it reads headers.
    """

    options: AdapterOptions
    paths: Sequence[Sequence[str]]
    batch_sizes: Sequence[int]
    wanted: Callable[..., list[LatentItems]]
