"""The explorer: a page on which images are dropped, with or without those that are in it from the start."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket._version import __version__
from kohya_bucket.buckets import Reason, list_presets, load_preset
from kohya_bucket.buckets.families import FAMILIES
from kohya_bucket.buckets.focus import BESIDE
from kohya_bucket.buckets.sizes import FloatArray
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import IMAGE_EXTENSIONS
from kohya_bucket.images.focus_files import focus_lines
from kohya_bucket.inputs import MAX_TABLE_BYTES
from kohya_bucket.reports.one_file import SHARED_SCRIPTS, one_file
from kohya_bucket.texts import counted, read_text
from kohya_bucket.trainers.door.subject import ImageTable

MOST_IMAGES = 200_000
"""More would make a page that no browser opens in reasonable time."""

_OWN = (
    "turns", "headers", "formats", "avif", "rules", "collection", "focus", "focus_mark", "placing", "toml", "config",
    "preset", "thumbs", "gallery", "settings", "panels", "with_config", "explorer",
)  # fmt: skip
_SCRIPTS = (*SHARED_SCRIPTS, *(f"explorer/{name}.js" for name in _OWN))
_FALLBACK = (
    '<div class="plain"><h1>Bucket explorer</h1><p>This page places images by the script inside it: it needs '
    "JavaScript, but no network. Without JavaScript, <code>kohya-bucket analyze FOLDER</code> prints the same "
    "numbers, and <code>--html</code> writes them as a page that can be read without it.</p></div>"
)


@dataclass(frozen=True)
class GivenConfig:
    """A dataset config that the page begins with.

    Attributes:
        name: of its file.
        text: which is saved with what is changed.
        datasets: for each table of images the place of its dataset in the config, from 0.
    """

    name: str
    text: str
    datasets: Sequence[int]


@dataclass(frozen=True)
class GivenFocus:
    """The focus that a page begins with.

    Attributes:
        name: of its file.
        folder: that images are named relative to.
        text: its rows as JSON Lines.
    """

    name: str
    folder: str
    text: str

    @classmethod
    def from_file(cls, where: str, tables: Sequence[ImageTable] = (), focus: Sequence[FloatArray] = ()) -> GivenFocus:
        """A JSON Lines file as it is; of a Parquet file, or of files beside the images, the rows of these images.

        Args:
            where: as `images.focus_files.read_focus` takes it.
            tables: of images.
            focus: for each table [N, 4] the focus of its images, NaN where there is none.
        """
        if where != BESIDE and not where.lower().endswith(".parquet"):
            path = Path(where).absolute()
            return cls(path.name, path.parent.as_posix(), read_text(path, MAX_TABLE_BYTES))
        folder, names = _named(tables)
        rows = {n: box for n, box in zip(names, np.concatenate(focus).tolist(), strict=True) if box[0] == box[0]}
        return cls("focus.jsonl", folder.as_posix(), focus_lines(rows.items()))


@dataclass(frozen=True)
class StartSettings:
    """The settings that a page begins with, by the names of its script; see sd-scripts' keys."""

    resolution: tuple[int, int]
    min: int
    max: int
    steps: int
    batch: int = 1
    noUpscale: bool = False
    buckets: str = "kohya"


def render_explorer(
    name: str = "",
    images: Sequence[ImageTable] = (),
    config: GivenConfig | None = None,
    trained: Collection[str] | None = None,
    focus: GivenFocus | None = None,
    settings: StartSettings | None = None,
) -> str:
    """The explorer as the text of an HTML file.

    Args:
        name: what the images are called.
        images: those that are in the page from the start, one table; with a config one for each of its datasets.
        config: a dataset config, or a preset of the GUI, to begin with.
        trained: endings of files that the trainer reads; others that are dropped are named. None for all images.
        focus: what crops keep from the start.
        settings: those of the page at the start, where no config has them; sd-scripts' defaults without.

    Raises:
        KohyaBucketError: more than `MOST_IMAGES` images.
    """
    count = sum(map(len, images))
    if count > MOST_IMAGES:
        raise KohyaBucketError(
            f"{name} has {count:,} images, but the explorer shows {MOST_IMAGES:,} at most: name a folder in it, or see "
            "kohya-bucket analyze --html, whose page does not grow"
        )
    start = images and {
        "name": name,
        "images": _columns(images, None if config is None else config.datasets),
        "config": config and {"name": config.name, "text": config.text},
        "dataset": config.datasets[0] if config else 0,
        "focus": focus and asdict(focus),
    }
    bundled = map(load_preset, list_presets())
    data = {
        "version": __version__,
        "endings": sorted(IMAGE_EXTENSIONS),
        "trained": None if trained is None else sorted(trained),
        "reasons": {int(r): r.text for r in Reason},
        "families": list(FAMILIES.values()),
        "sets": {s.name: {"sizes": [list(b) for b in s], "about": s.description} for s in bundled},
        "start": start or None,
        "settings": settings and asdict(settings),
    }
    title = f"{name}: {counted(count, 'image')} - bucket explorer" if images else "Bucket explorer - kohya-bucket"
    return one_file(
        data,
        _SCRIPTS,
        ("shared/page.css", "explorer/explorer.css"),
        title=title,
        about="Drop a folder of images: see every image in its bucket, what is cut off and what is enlarged. Offline.",
        fallback=_FALLBACK,
        # Pictures of images that are in the page from the start are read where they lie.
        pictures="data: blob: file:" if images else "data: blob:",
    )


def _columns(tables: Sequence[ImageTable], datasets: Sequence[int] | None) -> dict[str, Any]:
    """All images as columns, which are short, and quick to read for a browser.

    A group is [folder, repeats, its dataset's number in a list, caption ending]: with a config there is no ending, and
    without one no dataset.
    """
    shared, names = _named(tables)
    groups: dict[tuple[str, int, int], tuple[int, list[str]]] = {}  # number of each, and the names in it
    out: dict[str, Any] = {"group": [], "names": [], "sizes": [], "turned": {}, "failures": {}}
    row = 0
    for dataset, images in zip(datasets or [0], tables, strict=True):
        not_read = images.not_read
        for i in range(len(images)):
            folder, _, name = names[row].rpartition("/")
            key = folder, int(images.repeats[i]), dataset
            number, members = groups.setdefault(key, (len(groups), []))
            members.append(name)
            out["group"].append(number)
            out["names"].append(name)
            if images.orientation[i] > 1:
                out["turned"][row] = int(images.orientation[i])
            if i in not_read:
                out["failures"][row] = not_read[i]
            row += 1
        out["sizes"] += images.sizes.reshape(-1).tolist()
    out["groups"] = [
        [folder, repeats, None, _caption_ending(shared / folder, members)]
        if datasets is None
        else [folder, repeats, [dataset]]
        for (folder, repeats, dataset), (_, members) in groups.items()
    ]
    return out | {"root": shared.as_posix(), "base": f"{shared.as_uri().rstrip('/')}/"}


def _caption_ending(folder: Path, names: Sequence[str]) -> str | None:
    """What the captions beside most images of a folder end in; None where there are none."""
    try:
        file_names = set(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return None
    count = {e: sum(f"{os.path.splitext(name)[0]}{e}" in file_names for name in names) for e in (".caption", ".txt")}  # noqa: PTH122
    ending = max(count, key=count.__getitem__)
    return ending if count[ending] else None


def with_repeats_of_folders(images: ImageTable) -> ImageTable:
    """The same, with 10 repeats of each image in a folder `10_name`, as with sd-scripts' --train_data_dir."""
    folders = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in images.paths]  # noqa: PTH100, PTH119, PTH120
    matches = [re.match(r"0*([1-9]\d{0,5})_", folder) for folder in folders]
    return replace(images, repeats=np.array([int(one[1]) if one else 1 for one in matches], dtype=np.int64))


def _named(tables: Sequence[ImageTable]) -> tuple[Path, list[str]]:
    """The folder that all images share, and their paths in it."""
    paths = [path for images in tables for path in images.paths]
    images = ImageTable.sized(paths, np.zeros((0, 2), dtype=np.int32))
    names = [images.short_name(i) for i in range(len(paths))]
    length = len(paths[0]) - len(names[0]) if paths else 0
    folder = Path(paths[0][:length] if length else ".").absolute()
    return folder, [name.replace("\\", "/") for name in names] if os.name == "nt" else names
