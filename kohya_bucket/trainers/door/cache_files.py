"""What `precompute` asks of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kohya_bucket.images.parallel import Progress
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.trainers.door.options import AdapterOptions


class ConfigLatents(Protocol):
    """The latents that training with a config reads.

    Attributes:
        options: of its `[kohya_bucket]` table.
        paths: of the images of each dataset.
        batch_sizes: of each dataset.
    """

    @property
    def options(self) -> AdapterOptions: ...

    @property
    def paths(self) -> Sequence[Sequence[str]]: ...

    @property
    def batch_sizes(self) -> Sequence[int]: ...

    def wanted(
        self, encoding: EncodeOptions, images_root: Path, gpus: Sequence[int], content_hash: bool,
        progress: Progress | None,
    ) -> list[LatentItems]:  # fmt: skip
        """All that the trainer would cache, one part for each kind of caching; reads headers."""
