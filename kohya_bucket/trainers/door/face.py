"""What a trainer is to the launcher and the commands: its programs, its configs, its models.

Each trainer is a folder in `kohya_bucket/trainers/` with a file `trainer.py`, in which `TRAINER` is its `Trainer`
(`registry.py` finds them). That file imports the rest of the folder only in methods: it is read for every command.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.programs import Programs

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.buckets.clips import ClipBuckets
    from kohya_bucket.trainers.door.cache_files import CacheFiles, ConfigLatents
    from kohya_bucket.trainers.door.door import TrainerDoor
    from kohya_bucket.trainers.door.file_findings import Section
    from kohya_bucket.trainers.door.findings import Finding, Teller
    from kohya_bucket.trainers.door.options import AdapterOptions
    from kohya_bucket.trainers.door.plan import Plan
    from kohya_bucket.trainers.door.subject import Explored, HeaderReader, Subject


@dataclass(frozen=True)
class Asked:
    """What a user names.

    Attributes:
        config: the file; None for what the rest names.
        arch: a model, or a trainer's program.
        version: of the trainer, or the folder of its checkout.
        arguments: those that the trainer itself is started with, or keys of a dataset; None where one is not given.
    """

    config: Path | None = None
    arch: str | None = None
    version: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """The config; `ConfigError` where none is named."""
        if self.config is None:
            raise ConfigError("name a config")
        return self.config


@dataclass(frozen=True)
class OneItem:
    """One image or clip; `size` and `orientation` are as it is stored."""

    size: tuple[int, int]
    orientation: int = 1
    file: Path | None = None
    is_clip: bool = False


@dataclass(frozen=True)
class Way:
    """One way in which an item is trained.

    Attributes:
        name: for a reader.
        rule: where the picture goes.
        size: what it counts as there.
        clips: which frames are taken of a clip; None for an image.
        source_fps: the rate that a clip is said to have.
    """

    name: str
    rule: BucketRule
    size: tuple[int, int]
    clips: ClipBuckets | None = None
    source_fps: float | None = None


class Trainer(ABC):
    """One trainer.

    Attributes:
        name: for messages.
        package: the package that holds its code.
        marks: files by which that package is told from others of its name, relative to its folder.
        commands: those that take its configs; each has a method below.
        takes_any: configs that no other trainer recognises are its own, and commands without a config are about it.
        takes_arch: `Asked.arch` may be said beside a config. Where it takes any, so may all the rest.
        takes_clips: `ways` knows clips.
        turns_images: it turns images as EXIF asks.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    commands: ClassVar[tuple[str, ...]] = ()
    takes_any: ClassVar[bool] = False
    takes_arch: ClassVar[bool] = False
    takes_clips: ClassVar[bool] = False
    turns_images: ClassVar[bool] = False

    # -- its programs ------------------------------------------------------------------------------

    @abstractmethod
    def door(self) -> TrainerDoor:
        """Its door in this process."""

    def starts_with(self, program: Path) -> bool:
        """Whether a file is one of its programs, which does not bring the adapter by itself."""
        folder = program.resolve().parent / self.package
        return f"../{program.name}" in self.marks and all((folder / mark).is_file() for mark in self.marks)

    # -- its models --------------------------------------------------------------------------------

    def models(self) -> Sequence[str]:
        """What `Asked.arch` may be."""
        return ()

    def programs(self, asked: Asked) -> Programs:
        """What advice has to hold for. Raises `ConfigError` for an `arch` or a version that is unknown."""
        return Programs(self.name, {})

    def endings(self) -> Collection[str]:
        """How the names of images end that it lists in a folder."""
        raise NotImplementedError

    def cached_families(self) -> Mapping[str, Any]:
        """By name, the model families of which `cache_files` are."""
        raise NotImplementedError

    def cache_files(self) -> CacheFiles:
        """The caches that `cache` and `precompute` know: those of the usual trainer."""
        raise NotImplementedError

    # -- its configs -------------------------------------------------------------------------------

    def recognises(self, config: Path, content: Any) -> bool:
        """Whether a file is a config of this trainer; `content` is None where it holds no TOML, JSON or YAML."""
        return False

    def plan(
        self, asked: Asked, gpus: Sequence[int] | None, accumulate: int | None, images: bool, tell: Teller
    ) -> Plan:
        """What a config trains, with `images` also each image. `gpus`, `accumulate`: None for what the config says.

        Raises:
            KohyaBucketError: the config cannot be read, or there must be one. What is wrong with one that can be read
                is among the findings.
        """
        raise NotImplementedError

    def examine(self, asked: Asked, tell: Teller, quick: bool) -> Iterator[Section]:
        """What `doctor` says: what stops a training with the config, or harms it; without, what is there to train with.

        With `quick`, no image is decoded and nothing of the trainer is imported. Raises as `plan` does.
        """
        raise NotImplementedError

    def subjects(
        self, asked: Asked, batch_size: int | None, reader: HeaderReader
    ) -> tuple[list[Subject], list[Finding]]:
        """What `analyze` is about: every dataset that can be trained, and what is wrong with the config.

        Raises:
            ConfigError: there is none.
        """
        raise NotImplementedError

    def ways(self, asked: Asked, item: OneItem, focus: str | None) -> tuple[list[Way], AdapterOptions]:
        """What `simulate` explains: how each dataset trains an image or a clip, and the options.

        Without a config it is one dataset, of `asked.arguments`. `focus` stands in place of that of the options.

        Raises:
            ConfigError: a mistake that decides it, a rule that depends on all images, no dataset of such items; or a
                focus that training would not keep.
        """
        raise NotImplementedError

    def explored(self, asked: Asked, reader: HeaderReader) -> Explored:
        """What the page of `explore` begins with.

        Raises:
            ConfigError: no dataset has images, or their crops cannot keep the focus.
        """
        raise NotImplementedError

    def latents(self, asked: Asked) -> ConfigLatents:
        """What `precompute` encodes. Raises `ConfigError` for a config with mistakes."""
        raise NotImplementedError
