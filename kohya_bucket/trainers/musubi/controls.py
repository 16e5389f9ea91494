"""Control images and control clips: which each item of a dataset gets, and what musubi-tuner stops at.

Source: kohya-ss/musubi-tuner 0.3.4 and 0.3.6, the classes of `dataset/datasources.py`, and `ImageDataset` for how many
each family takes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kohya_bucket.checks import path_meant, quoted
from kohya_bucket.images.formats import VIDEO_EXTENSIONS
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.sizes import scan_sizes
from kohya_bucket.trainers.musubi.architectures import Family
from kohya_bucket.trainers.musubi.keys import CommonKeys, ImageKeys

_BY_INDEX = ("wan", "fp", "mmh3")  # families of which `fp_1f_clean_indices` says how many
_MISSING = "missing-control-image"

Owned = Sequence[tuple[str, Sequence[str]]]
"""(item, its control images in order) of each item."""


def controls_wanted(keys: CommonKeys, model: Family) -> int | None:
    """How many control images the family takes with each image; None for any number, or where no model is named."""
    if not isinstance(keys, ImageKeys) or not model.name:
        return None
    indices = keys.fp_1f_clean_indices if model.name in _BY_INDEX else None
    return model.controls if indices is None else len(indices)


def controls_in_folder(
    keys: CommonKeys, paths: Sequence[str], images: Sequence[str], place: str, findings: Findings, model: Family
) -> list[list[str]]:
    """The control images or clips of each item of a folder.

    Args:
        paths: the items.
        images: the images in `control_directory`.
    """
    folder = keys.control_directory
    if folder is None:
        _check_none(keys, len(paths), place, findings, model)
        return [[] for _ in paths]
    if not os.path.isdir(folder):
        message = f"control_directory {quoted(folder)} is not a folder, and musubi-tuner stops at that"
        findings.error("missing-folder", place, message, path_meant(folder), (folder,))
        return [[] for _ in paths]
    pairs = _of_images(paths, images) if keys.what == "image" else [(path, _of_clip(path, folder)) for path in paths]
    if odd := [one for path, ones in pairs for one in ones if _number(one, path) is None]:
        message = f"{counted(len(odd), 'control image')} with the name of an image and no number behind it, at which "
        message += f"musubi-tuner stops ({some(odd, 2)})"
        findings.error("control-name", place, message, "name them as the image, or im_0.png, im_1.png, …", odd)
    return _read(pairs, controls_wanted(keys, model), folder, place, findings, model)


def _of_images(paths: Sequence[str], images: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each control image goes to the image whose name it begins with; of several, to the one with the longest name."""
    stems: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: len(os.path.basename(path)), reverse=True):
        stems.setdefault(os.path.splitext(os.path.basename(path))[0], path)
    controls_of_item: dict[str, list[str]] = {path: [] for path in paths}
    for one in images:
        name = os.path.basename(one)
        suiting = [stems[name[:i]] for i, sign in enumerate(name) if sign in "._" and name[:i] in stems]
        if suiting:
            controls_of_item[max(suiting, key=lambda path: len(os.path.basename(path)))].append(one)
    return [(path, sorted(ones, key=lambda one: _number(one, path) or 0)) for path, ones in controls_of_item.items()]


def _number(control: str, item: str) -> int | None:
    """Which of its item's control images one is, from 0; None where its name does not say it."""
    control_stem, stem = (os.path.splitext(os.path.basename(path))[0] for path in (control, item))
    digits = control_stem.rpartition("_")[2]
    return 0 if control_stem == stem else int(digits) + 1 if digits.isdecimal() else None


def _of_clip(path: str, folder: str) -> list[str]:
    """The clip or the folder of frames of the same name."""
    name = os.path.basename(path)
    base = os.path.join(folder, os.path.splitext(name)[0])
    if os.path.exists(same := os.path.join(folder, name)):
        return [same]
    if os.path.isdir(base):
        return [base]
    others = (base + case(ending) for case in (str.lower, str.upper) for ending in VIDEO_EXTENSIONS)
    return [one for one in others if os.path.exists(one)][:1]


def controls_in_rows(
    keys: CommonKeys, rows: Sequence[tuple[str, Mapping[str, Any]]], place: str, findings: Findings,
    model: Family,
) -> list[list[str]]:  # fmt: skip
    """The same of (item, line) of a list."""
    if keys.control_directory is not None:
        message = "control_directory is ignored beside a list of files: nothing in it is trained"
        findings.warning("control-directory", place, message, "write a control_path into each line")
    clips = keys.what == "clip"
    controls_of_row = [(item, paths_in(row, clips)) for item, row in rows]
    if not any(values for _, values in controls_of_row):
        _check_none(keys, len(rows), place, findings, model)
        return [[] for _ in rows]
    odd = [f"{item}: {value!r}" for item, values in controls_of_row for value in values if not isinstance(value, str)]
    if odd:
        message = f"{counted(len(odd), 'control_path', 'is', 'are')} not text, at which musubi-tuner stops "
        several = "" if clips else "; for several write control_path_0, control_path_1, …"
        findings.error("control-path", place, message + f"({some(odd, 2)})", f"write one path in quotes{several}", odd)
    # Lines with what is no text stop musubi-tuner: they keep their place, and have no control images here.
    sound = [all(isinstance(value, str) for value in values) for _, values in controls_of_row]
    sound_rows = [one for one, is_sound in zip(controls_of_row, sound, strict=True) if is_sound]
    wanted, file = controls_wanted(keys, model), keys.jsonl_file or ""
    read = _read(sound_rows, wanted, file, place, findings, model, may_lack=not clips and not wanted)
    if gone := [one for ones in read for one in ones if (one or not clips) and not os.path.exists(one)]:
        message = f"{counted(len(gone), f'control {keys.what}')} cannot be found, at which musubi-tuner stops "
        message += f"({some(gone, 2)})"
        findings.error(_MISSING, place, message, path_meant(gone[0]), gone)
    of_sound = iter(read)
    return [[one for one in next(of_sound) if one] if is_sound else [] for is_sound in sound]


def paths_in(row: Mapping[str, Any], clips: bool) -> list[Any]:
    """The control images or the control clip that a line names, in order."""
    numbered = {0: row["control_path"]} if "control_path" in row else {}
    for key, value in row.items():
        start, _, digits = key.rpartition("_")
        if start == "control_path" and digits.isdecimal() and not clips:
            numbered.setdefault(int(digits), value)
    return [numbered[number] for number in sorted(numbered)]


Sizes = tuple[tuple[int, int] | None, ...]
"""(width, height) of an item's control images as they are cached, equal in all items of a batch; None for one that has
the size of its item's bucket."""


def sizes_in_batch(keys: CommonKeys, controls: Sequence[Sequence[str]], model: Family) -> list[Sizes]:
    """Those of the control images of each item; none where the family caches none.

    Source: `retrieve_latent_cache_batches` and `prepare_for_training` of its `ImageDataset`.
    """
    if not isinstance(keys, ImageKeys) or not model.keeps_controls:
        return [() for _ in controls]
    most = keys.control_resolution
    if most is None and not keys.no_resize_control:
        return [(None,) * len(ones) for ones in controls]
    paths = list(dict.fromkeys(path for ones in controls for path in ones))
    size_of = {}
    for path, (width, height) in zip(paths, scan_sizes(paths).sizes.tolist(), strict=True):
        if most is None:
            size_of[path] = width - width % model.steps, height - height % model.steps
        elif keys.no_resize_control and width * height <= most[0] * most[1]:
            stride = model.stride or model.steps
            size_of[path] = width - width % stride, height - height % stride
        else:
            size_of[path] = _size_of_area((width, height), most[0] * most[1], model.steps)
    return [tuple(size_of[path] for path in ones) for ones in controls]


def _size_of_area(size: tuple[int, int], area: int, steps: int) -> tuple[int, int]:
    """Of five widths around the one that keeps an image's aspect, each with the tallest height in the area, the size of
    the nearest aspect; (0, 0) where there is none. Unlike an image's bucket it is of no set.
    """
    if min(size) < 1:
        return 0, 0
    aspect = size[0] / size[1]
    middle = int(math.sqrt(area * aspect)) // steps * steps
    widths = [middle + i * steps for i in range(-2, 3) if middle + i * steps > 0]
    candidates = [(width, area // width // steps * steps) for width in widths]
    candidates = [(width, height) for width, height in candidates if height > 0]
    return min(candidates, key=lambda one: abs(one[0] / one[1] - aspect), default=(0, 0))


def _check_none(keys: CommonKeys, items: int, place: str, findings: Findings, model: Family) -> None:
    if model.needs_control and items and keys.what == "image":
        message = f"names no control images, but {model.title} takes one with each image, and musubi-tuner stops"
        findings.error(_MISSING, place, message, "set control_directory, or write a control_path into each line")


def _read(
    pairs: Owned, wanted: int | None, where: str, place: str, findings: Findings, model: Family,
    may_lack: bool = False,
) -> list[list[str]]:  # fmt: skip
    """The control images that are read, of those that each item has; what is missing or too much is named.

    With `may_lack`, an item may have none.
    """
    bare = [] if may_lack else [item for item, ones in pairs if not ones]
    if bare:
        message = f"{len(bare):,} of {counted(len(pairs), 'item')} without a control image in {where!r}, at which "
        message += f"musubi-tuner stops ({some(bare, 2)})"
        findings.error(_MISSING, place, message, "add them under the same name, or remove the items", bare)
    if few := [item for item, ones in pairs if 0 < len(ones) < (wanted or 0)]:
        message = f"{counted(len(few), 'item')} with fewer control images than the {wanted} that {model.title} takes, "
        message += f"at which musubi-tuner stops ({some(few, 2)})"
        findings.error(_MISSING, place, message, "add the others: im_0.png, im_1.png, …", few)
    if more := [item for item, ones in pairs if wanted is not None and len(ones) > wanted]:
        message = f"{counted(len(more), 'item')} with more control images than the {wanted} that {model.title} takes: "
        message += f"the others are not trained ({some(more, 2)})"
        findings.warning("more-control-images", place, message, f"leave those behind the first {wanted} out", more)
    return [list(ones[:wanted]) for _, ones in pairs]
