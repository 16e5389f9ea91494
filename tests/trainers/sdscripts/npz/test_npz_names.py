"""Whose npz is whose, over the datasets of one run."""

from pathlib import Path

import pytest

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.names import NpzNames, has_whole_name, paths_beside

SIZE, SMALL, LARGE = (640, 480), (512, 384), (1024, 768)
SD, SDXL = (ARCHITECTURES[name].read_by("0.10.1") for name in ("sd", "sdxl"))  # a file holds one size


def add(names, folder, images, bucket, further=False, resized=None):
    """Names of the files of one dataset's images, all of one size."""
    n = len(images)
    paths = names.add(
        [str(folder / image) for image in images], [SIZE] * n, [bucket] * n, [resized or bucket] * n, [further] * n
    )
    assert all(path.parent == folder for path in paths)
    return [path.name for path in paths]


@pytest.mark.parametrize("arch", [SD, SDXL], ids=lambda arch: arch.name)
def test_the_first_dataset_has_the_usual_file_and_other_sizes_further_ones(tmp_path, arch):
    names = NpzNames(arch)
    usual, further = f"a_0640x0480_{arch.name}.npz", f"a_0640x0480_{arch.name}_at_1024x0768.npz"
    assert add(names, tmp_path, ["a.png"], SMALL) == [usual]
    assert add(names, tmp_path, ["a.png"], LARGE) == [further]
    assert add(names, tmp_path, ["a.png"], SMALL) == [usual]
    assert add(names, tmp_path, ["a.png"], SMALL, resized=(600, 450)) == [usual.replace(".npz", "_at_0512x0384.npz")]
    assert add(names, tmp_path, ["a.png"], LARGE, further=True) == [further]
    assert add(NpzNames(arch), tmp_path, ["a.png"], LARGE) == [usual]


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda arch: arch.name)
def test_one_file_for_all_sizes_where_a_file_holds_several(tmp_path, arch):
    names, usual = NpzNames(arch), f"a_0640x0480{arch.suffix}"
    assert add(names, tmp_path, ["a.png"], SMALL) == add(names, tmp_path, ["a.png"], LARGE) == [usual]
    assert add(names, tmp_path, ["a.jpg"], LARGE) == [f"a.jpg_0640x0480{arch.suffix}"]
    # at one size, but of another picture: not resized to cover the bucket
    further = usual.replace(".npz", "_at_0512x0384.npz")
    assert add(names, tmp_path, ["a.png"], SMALL, resized=(600, 450)) == [further]


def test_a_size_besides_does_not_take_the_usual_file(tmp_path):
    names = NpzNames(SD)
    assert add(names, tmp_path, ["a.png"], LARGE, further=True) == ["a_0640x0480_sd_at_1024x0768.npz"]
    assert add(names, tmp_path, ["a.png"], SMALL) == ["a_0640x0480_sd.npz"]


def test_images_of_one_name_in_one_dataset_and_in_two(tmp_path):
    together = NpzNames(SD)
    assert add(together, tmp_path, ["a.png", "a.jpg"], SMALL) == ["a.png_0640x0480_sd.npz", "a_0640x0480_sd.npz"]
    assert add(together, tmp_path, ["a.png", "a.jpg"], LARGE) == [
        "a.png_0640x0480_sd_at_1024x0768.npz", "a_0640x0480_sd_at_1024x0768.npz"
    ]  # fmt: skip
    apart = NpzNames(SD)
    assert add(apart, tmp_path, ["a.png"], SMALL) == ["a_0640x0480_sd.npz"]
    assert add(apart, tmp_path, ["a.jpg"], SMALL) == ["a.jpg_0640x0480_sd.npz"]
    assert add(apart, tmp_path, ["a.jpg", "a.png"], SMALL) == ["a.jpg_0640x0480_sd.npz", "a_0640x0480_sd.npz"]
    assert has_whole_name(Path("a.jpg_0640x0480_sd.npz"), "x/a.jpg")
    assert not has_whole_name(Path("a_0640x0480_sd.npz"), "x/a.jpg")


def test_one_folder_named_in_two_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = NpzNames(SD)
    assert add(names, tmp_path, ["a.png"], SMALL) == ["a_0640x0480_sd.npz"]
    (path,) = names.add(["./a.png"], [SIZE], [LARGE], [LARGE], [False])
    assert path == tmp_path / "a_0640x0480_sd_at_1024x0768.npz"


def test_no_file_lies_outside_the_folder_for_them(tmp_path):
    a, b = (str(tmp_path / name / "x.png") for name in "ab")
    assert paths_beside([a], tmp_path / "out", tmp_path / "a") == [str(tmp_path / "out" / "x.png")]
    assert paths_beside([a, b], None, tmp_path / "a") == [a, b]
    with pytest.raises(KohyaBucketError, match="outside"):
        paths_beside([a, b], tmp_path / "out", tmp_path / "a")
