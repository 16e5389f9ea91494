"""A plan for other programs: one function, and what it returns. `plan --json` prints the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kohya_bucket.checks import whole
from kohya_bucket.errors import ConfigError
from kohya_bucket.files import write_file
from kohya_bucket.trainers.door.face import Asked
from kohya_bucket.trainers.door.findings import Severity, Teller
from kohya_bucket.trainers.door.registry import trainer_for


@dataclass(frozen=True)
class PreviewBucket:
    """One bucket of a dataset.

    Attributes:
        dataset: number of the dataset in the config, from 1 on.
        size: (width, height) in pixels; of clips (width, height, frames).
        files: images or clips that are trained in it, as the trainer names them.
        samples: how many are trained in an epoch, repeats included.
        batches: in an epoch on one GPU.
    """

    dataset: int
    size: tuple[int, ...]
    files: tuple[str, ...]
    samples: int
    batches: int


@dataclass(frozen=True)
class NotTrained:
    """One file that no epoch trains.

    Attributes:
        dataset: number of the dataset in the config, from 1 on; 0 where it fills no batch of all of them.
        reason: why, in words.
        mend: keys of the config with values that were tried and let it train; empty where none of those tried does.
    """

    dataset: int
    file: str
    reason: str
    mend: Mapping[str, Any]


@dataclass(frozen=True)
class Preview:
    """What a config trains.

    Attributes:
        steps: of each GPU in an epoch.
        errors: what makes the trainer stop, and what to do; datasets with one are not planned.
        data: all that `plan --json --images` prints, see `plan.schema.json`.
    """

    steps: int
    buckets: tuple[PreviewBucket, ...]
    not_trained: tuple[NotTrained, ...]
    errors: tuple[str, ...]
    data: Mapping[str, Any]


def preview(
    config: str | os.PathLike[str] | Mapping[str, Any], *, gpus: int | None = None, arch: str | None = None,
    sd_scripts: str | None = None,
) -> Preview:  # fmt: skip
    """What training with a dataset config of sd-scripts or musubi-tuner will be. Reads headers, opens no image.

    Args:
        config: path of what `kohya-bucket plan` takes, or the content of a dataset config. Relative paths in it start
            from the current folder, as in the trainers.
        gpus: how many train together; by default as the file says, or 1.
        arch: what is trained, as `plan --arch` takes it.
        sd_scripts: its checkout or version; by default the checkout that this is called in, or the newest version.

    Raises:
        KohyaBucketError: the config cannot be read, or an argument has an unknown value. What is wrong with a config
            that can be read is in `errors`, and all findings are in `data["findings"]`.

    Examples:
        >>> found = preview("dataset.toml", gpus=2, arch="sd")
        >>> found.steps
        2
        >>> [(bucket.size, bucket.samples, bucket.batches) for bucket in found.buckets]
        [((448, 576), 2, 1), ((576, 448), 4, 2)]
        >>> found.not_trained, found.errors
        ((), ())
    """
    counts = None if gpus is None else [whole("gpus", gpus, 1)]
    with _file_of(config) as file:
        plan = trainer_for("plan", file).plan(Asked(file, arch, sd_scripts), counts, None, True, Teller())
    data = plan.as_dict()
    if isinstance(config, Mapping):
        data["config"] = None
    buckets: list[PreviewBucket] = []
    without: list[NotTrained] = []
    for entry in data["datasets"]:
        number, files = entry["number"], _files(entry)
        for row in entry["buckets"]:
            size = tuple(row["bucket"])
            buckets.append(PreviewBucket(number, size, tuple(files.get(size, ())), row["samples"], row["batches"]))
        without += [
            NotTrained(number, row.get("image") or row["path"], row["reason"], row["mend"])
            for row in entry["not_trained"]
        ]
    for row in data["gpus"]:
        why, mend = "it is in buckets that fill no batch", {"small_buckets": "keep"}
        without += [NotTrained(0, name, why, mend) for name in row["never_trained"]]
    errors = tuple(one.text for one in plan.findings.of(Severity.ERROR))
    steps = next((row["steps"] for row in data["gpus"]), 0)
    return Preview(steps, tuple(buckets), tuple(without), errors, data)


def _files(entry: Mapping[str, Any]) -> dict[tuple[int, ...], list[str]]:
    """Names by the size of their bucket; of clips they may be in several, by their frames."""
    files_of_size: dict[tuple[int, ...], list[str]] = {}
    for row in entry.get("image_rows", ()) or entry.get("rows", ()):
        size = tuple(row["bucket"])
        for one in {(*size, frames) for frames in row["items"]} if "items" in row else (size,):
            files_of_size.setdefault(one, []).append(row.get("key") or row["path"])
    return files_of_size


@contextmanager
def _file_of(config: Any) -> Iterator[Path]:
    if isinstance(config, (str, os.PathLike)):
        yield Path(config)
        return
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is {config!r}, but must be the path of a dataset config, or its content as a dict")
    try:
        content = json.dumps(config, default=os.fspath).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"config holds what no dataset config can ({error}): use texts, numbers, lists, dicts"
        ) from None
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        write_file(file, [content], sync=False)
        try:
            yield file
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(file), "config")) from None
