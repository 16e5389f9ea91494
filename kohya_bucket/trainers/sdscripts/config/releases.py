"""What versions of sd-scripts read differently in configs, metadata and captions, and which of it a checkout reads."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.code import parsed, text_of
from kohya_bucket.trainers.sdscripts.families import version_numbers

_FILES = ("config_util.py", "train_util.py", "finetuning_dataset.py", "controlnet_dataset.py")
_LAST = {(0, 10): 6, (0, 11): 1, (0, 12): 0}
KNOWN = "0.10.1 to 0.12.0"
"""The versions whose keys were compared with this package's; `_LAST` is the last of each series."""


class Feature(enum.Enum):
    """One change: the version that brought it, and words that no earlier `library/` holds.

    Forks took over some changes and not others, so a checkout is judged by its words and not by a version.
    """

    # images can be skipped; control images to spare do not stop it; a metadata_cache.json keeps captions apart
    SKIPPING = ("0.10.2", "skip_image_resolution")
    # metadata keys without extension are looked up; width and height in .jsonl
    STEMS = ("0.10.6", '"width" in line_md')
    # control images are cut by the function that cuts their images
    CONTROL_CUTS = ("0.11", "cond_img, _, _ = trim_and_resize_if_required")
    # with enable_wildcard, the tags of an image without caption are trained
    TAGS_ALONE = ("0.11.2", "caption_lines")

    @property
    def since(self) -> str:
        return self.value[0]


@dataclass(frozen=True)
class Release:
    """A version of sd-scripts, by the changes that are in it; by default all.

    Attributes:
        changes: what it has; `change in release` asks.
        name: what messages call it.
        version: its numbers; () for the newest and for a checkout.
        schema: of a checkout, the keys in each of the dicts that its `ConfigSanitizer` puts tables together from, by
            their names there; None where that is not known.
    """

    changes: frozenset[Feature] = frozenset(Feature)
    name: str = field(default="the newest", compare=False)
    version: tuple[int, ...] = field(default=(), compare=False)
    schema: Mapping[str, frozenset[str]] | None = field(default=None, compare=False)

    def __contains__(self, change: Feature) -> bool:
        return change in self.changes

    @property
    def is_known(self) -> bool:
        """Whether a version of this number was published and compared; of a checkout, whether its keys can be read."""
        if self.version:
            major, minor, patch, *more = (*self.version, 0, 0)
            return patch <= _LAST.get((major, minor), -1) and not any(more)
        return self.schema is not None or self == NEWEST

    def is_since(self, version: str) -> bool:
        """Whether it has what a version brought."""
        if self.version:
            return version_numbers(version)[: len(self.version)] <= self.version
        return version_numbers(version) <= max(
            (version_numbers(change.since) for change in self.changes), default=(0, 10, 1)
        )

    @classmethod
    def from_version(cls, version: str) -> Release:
        """That of a version such as `v0.10.6`, or the last of a series such as `0.10`; else the newest."""
        numbers = version_numbers(version)
        changes = frozenset(change for change in Feature if version_numbers(change.since)[: len(numbers)] <= numbers)
        return cls(changes, version, numbers) if numbers else NEWEST

    @classmethod
    def in_checkout(cls, folder: Path) -> Release:
        """That of a checkout, by the source in its `library` folder."""
        files = [file for name in _FILES if (file := folder / "library" / name).is_file()]
        text = "".join(map(text_of, files))
        changes = frozenset(change for change in Feature if change.value[1] in text)
        return cls(changes, str(folder), schema=_schema_in(folder / "library" / "config_util.py"))


NEWEST = Release()


_NEEDED = {"SUBSET_ASCENDABLE_SCHEMA", "DATASET_ASCENDABLE_SCHEMA", "DB_SUBSET_DISTINCT_SCHEMA"}


def _schema_in(file: Path) -> Mapping[str, frozenset[str]] | None:
    """The keys of each dict called `…_SCHEMA` in a source, which is not run; None where the usual ones are lacking."""
    try:
        tree = parsed(file)
    except ConfigError:
        return None
    schemas = {
        target.id: frozenset(_keys_of(node.value))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("_SCHEMA")
    }
    return schemas if schemas.keys() >= _NEEDED else None


def _keys_of(table: ast.Dict) -> Iterator[str]:
    """The keys of `{"batch_size": int, Required("image_dir"): str}`."""
    for key in table.keys:
        inner = key.args[0] if isinstance(key, ast.Call) and key.args else key
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value
