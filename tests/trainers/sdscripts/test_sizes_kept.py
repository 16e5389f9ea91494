"""Sizes that one command or a training has read are read by no other: the files may lose their headers."""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kohya_bucket.latents.items import EncodeOptions
from kohya_bucket.trainers.door.options import required
from kohya_bucket.trainers.sdscripts.config import read_config
from kohya_bucket.trainers.sdscripts.config.releases import NEWEST
from kohya_bucket.trainers.sdscripts.doctor import config_section
from kohya_bucket.trainers.sdscripts.make_buckets import table_of
from kohya_bucket.trainers.sdscripts.plan import overview
from kohya_bucket.trainers.sdscripts.wanted_latents import wanted_by_config
from tests.pictures import make_pictures
from tests.thinned import weekly

Sizes = list[list[list[int]]]  # of each dataset


def by_plan(path: Path) -> Sizes:
    read = read_config(path)
    return [dataset.sizes.tolist() for dataset in overview(read, required(read.options, read.findings)).datasets]


def by_doctor(path: Path) -> Sizes:
    section, examined = config_section(path, {}, NEWEST, lambda _: nullcontext(None), decode=False)
    left_out = [finding for finding in section.findings if finding.code == "left-out"]
    assert not left_out, left_out[0].message
    assert examined is not None
    return by_plan(path)


def by_precompute(path: Path) -> Sizes:
    read = read_config(path)
    wanted = wanted_by_config(read, EncodeOptions("x"), path.parent, options=required(read.options, read.findings))
    assert not any(part.without_bucket for part in wanted)
    numbers = sorted({part.dataset for part in wanted})
    return [[size for part in wanted if part.dataset == i for size in part.original_sizes.tolist()] for i in numbers]


def by_training(path: Path) -> Sizes:
    read = read_config(path)
    sizes = []
    for dataset in read.datasets:
        (configured,) = dataset.config.subsets
        subset = SimpleNamespace(image_dir=configured.image_dir)
        if configured.metadata_file:
            subset.metadata_file = configured.metadata_file
        images = dataset.images
        stated = [tuple(size) if size[0] > 0 else None for size in images.stated_sizes.tolist()]
        infos = [
            SimpleNamespace(image_key=key, absolute_path=path, image_size=size, num_repeats=1, is_reg=False)
            for key, path, size in zip(images.keys, images.paths, stated, strict=True)
        ]
        trained: Any = SimpleNamespace(image_to_subset=dict.fromkeys(images.keys, subset))
        found = table_of(trained, infos).sizes(required(read.options, read.findings).metadata_cache)  # type: ignore[arg-type]
        assert not found.unreadable
        sizes.append(found.sizes.tolist())
    return sizes


COMMANDS: dict[str, Callable[[Path], Sizes]] = {
    "plan": by_plan, "doctor": by_doctor, "precompute": by_precompute, "training": by_training,
}  # fmt: skip


def lose_headers(files: Iterable[Path]) -> None:
    """Same length and time, other content: only who reads the file notices."""
    for file in files:
        status = file.stat()
        file.write_bytes(b"\0" * status.st_size)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def datasets(folder: Path, kept: Path, *, compared: bool) -> tuple[Path, list[Path]]:
    """Several datasets whose sizes are kept in one file.

    Args:
        compared: one of them has sizes in its metadata. Only those who compare these with the headers read them.
    """
    files = make_pictures(folder / "a", [(300 + 10 * i, 400) for i in range(5)])
    files += make_pictures(folder / "b", [(500, 300 + 10 * i) for i in range(5)])
    tables = ["[general]\nenable_bucket = true\nresolution = 320\nmin_bucket_reso = 64"]
    tables += [f"[kohya_bucket]\nmetadata_cache = {str(kept)!r}"]
    for name in ("a", "b"):
        tables += [
            "[[datasets]]\nskip_image_resolution = 64",
            f"[[datasets.subsets]]\nimage_dir = {str(folder / name)!r}",
        ]
    if compared:
        files += make_pictures(folder / "c", [(400, 300 + 10 * i) for i in range(4)])
        stated = {str(file): {"caption": "x", "image_size": [400, 300 + 10 * i]} for i, file in enumerate(files[-4:])}
        (folder / "meta.json").write_text(json.dumps(stated), encoding="utf-8")
        tables += ["[[datasets]]", f"[[datasets.subsets]]\nmetadata_file = {str(folder / 'meta.json')!r}"]
    (folder / "config.toml").write_text("\n".join(tables), encoding="utf-8")
    return folder / "config.toml", files


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"), [pair if "plan" in pair else weekly(*pair) for pair in product(COMMANDS, COMMANDS)]
)
def test_whoever_comes_second_reads_no_header(first: str, second: str, tmp_path: Path) -> None:
    kept = tmp_path / "sizes.parquet"
    config, files = datasets(tmp_path, kept, compared=first in ("plan", "doctor"))
    expected = COMMANDS[first](config)
    lose_headers(files)
    assert COMMANDS[second](config) == COMMANDS[first](config) == expected


@pytest.mark.weekly
def test_many_images_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept without being asked for, in the user's cache folder."""
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    n = 20_000
    first = make_pictures(tmp_path / "images", [(300, 400), (400, 300), (333, 333)])
    for i in range(3, n):
        os.link(first[i % 3], tmp_path / "images" / f"{i}.png")
    config = tmp_path / "config.toml"
    config.write_text(
        "[[datasets]]\nresolution = 320\nenable_bucket = true\n[[datasets.subsets]]\nclass_tokens = 'x'\n"
        f"image_dir = {str(tmp_path / 'images')!r}\n",
        encoding="utf-8",
    )
    expected = by_training(config)
    assert len(expected[0]) == n
    lose_headers(first)
    for command in (by_doctor, by_precompute):  # the doctor's is also the plan
        assert sorted(command(config)[0]) == sorted(expected[0])
