"""Crops that keep a focus in musubi-tuner's caches: which are current for it, and how pictures are cut."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_folder import Folder
from PIL import Image

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.seams import Replaced
from kohya_bucket.trainers.musubi.caching import PickedSource, Session, cut, focus_in
from kohya_bucket.trainers.musubi.caching_seams import _retrieve_latents
from kohya_bucket.trainers.musubi.door import MusubiDoor

LEFT, RIGHT, ALL = [0, 0, 0.1, 1], [0.9, 0, 1, 1], [0, 0, 1, 1]


def focus_file(folder: Folder, **focus: list[float]) -> Path:
    path = folder.root / "focus.jsonl"
    rows = [{"image": f"im/{name}.png", "focus": box} for name, box in focus.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_only_what_a_moved_focus_crops_otherwise_is_made_again_and_says_so(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 3, size=(128, 64))
    folder.make(focus=focus_file(folder, a0=LEFT, a1=ALL))
    assert folder.reasons(focus=tmp_path / "focus.jsonl") == [[]] * 3
    # all of it is in the middle, and so is what has no focus
    moved = folder.reasons(focus=focus_file(folder, a0=RIGHT, a2=ALL))
    assert moved == [["its focus moved (the crop 0x0 -> 64x0)"], [], []]
    assert folder.reasons() == [["its focus moved (the crop 0x0 -> 32x0)"], [], []]


def test_what_says_nothing_of_a_focus_was_cut_in_the_middle(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 3, size=(128, 64))
    folder.make()
    for file in (tmp_path / "cache").glob("*_zi.safetensors"):
        file.write_bytes(file.read_bytes().replace(b"kohya_bucket", b"nobody_knows"))
    assert folder.reasons() == [[]] * 3
    found = folder.reasons(focus=focus_file(folder, a0=LEFT, a1=[0.4, 0, 0.6, 1]))
    assert found == [["its focus moved (the crop 32x0 -> 0x0)"], [], []]


def test_control_images_and_the_captions_that_are_encoded_with_them_follow_the_focus(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2, family="qie")  # as large as their bucket: no crop of theirs can move
    folder.controls = {folder.paths[0]: [folder.paths[1]]}
    folder.make(focus=focus_file(folder, a0=LEFT, a1=LEFT))
    assert folder.reasons(focus=tmp_path / "focus.jsonl") == [[]] * 2
    found = folder.reasons(focus=focus_file(folder, a0=RIGHT, a1=RIGHT))
    assert len(found[0]) == 2
    assert all(reason.startswith("its focus moved") for reason in found[0])
    assert found[1] == []


@pytest.mark.parametrize("size", ["3000000000x0005", f"{10**30}x0064", "0072x0000"])
def test_a_file_named_after_a_size_that_no_image_has_is_no_cache(tmp_path: Path, size: str) -> None:
    folder = Folder(tmp_path, 3)
    folder.make()
    (own,) = (tmp_path / "cache").glob("a0_*x*_zi.safetensors")
    own.with_name(f"a0_{size}_zi.safetensors").write_bytes(own.read_bytes())
    assert len(folder.caches().named["a0"]) == 1
    assert folder.reasons() == [[], [], []]
    own.unlink()
    assert folder.reasons() == [["not encoded yet"], [], []]


class Fetches:
    caption_only, multiple_target = False, True

    def __init__(self, *found: Any) -> None:
        self.found = found

    def __iter__(self) -> Any:
        return iter([lambda: self.found])


def ramp(size: tuple[int, int]) -> Image.Image:
    """The value of a pixel is its share of the width."""
    row = np.linspace(0, 255, size[0]).astype(np.uint8)
    return Image.fromarray(np.broadcast_to(row[None, :, None], (size[1], size[0], 3)).copy())


@pytest.mark.parametrize("size", [(128, 64), (96, 64), (40, 32), (64, 64), (65, 64)])
def test_the_crop_keeps_the_focus_of_each_target_and_of_control_images(tmp_path: Path, size: tuple[int, int]) -> None:
    folder = Folder(tmp_path, 1)
    session = Session(folder.caches(focus=focus_file(folder, a0=RIGHT)), text=False)
    pictures = [ramp(size), ramp(size)], [ramp(size)]
    (fetch,) = PickedSource(Fetches("a0.png", pictures[0], "caption", pictures[1]), session)
    _, images, _, controls = fetch()
    for picture in (*images, *controls):
        found = cut(picture, (64, 64), focus_in(picture))
        assert found.shape == (64, 64, 3)
        assert found[:, -1].min() >= 253
        mirrored = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert np.array_equal(found[:, ::-1], cut(mirrored, (64, 64), (0, 0, 0.1, 1)))
    assert focus_in(np.zeros((4, 4, 3))) is None


def test_control_images_with_sizes_of_their_own_are_cut_in_the_middle(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1)
    session = Session(folder.caches(focus=focus_file(folder, a0=RIGHT)), text=False)
    session.caches.dataset.control_resolution = (64, 64)  # type: ignore[attr-defined]
    (fetch,) = PickedSource(Fetches("a0.png", [ramp((128, 64))], "caption", [ramp((128, 64))]), session)
    _, (image,), _, (control,) = fetch()
    assert focus_in(image) == (0.9, 0, 1, 1)
    assert focus_in(control) is None


def test_frames_of_a_clip_are_cut_while_they_are_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1)
    session = Session(folder.caches(focus=focus_file(folder, a0=RIGHT)), text=False)
    session.caches.clips = True
    seen = []

    class Clips(SimpleNamespace):
        caption_only = False

        def __iter__(self) -> Any:
            def read() -> Any:
                frames = [np.asarray(ramp((128, 64)))] * 3
                seen.extend(focus_in(frame) for frame in frames)
                return "a0.png", frames, "caption", None

            return iter([read])

    (fetch,) = PickedSource(Clips(), session)
    fetch()
    assert seen == [(0.9, 0, 1, 1)] * 3
    assert focus_in(np.zeros((4, 4, 3))) is None


def test_where_caching_is_not_known_a_focus_is_refused(tmp_path: Path) -> None:
    door = MusubiDoor()
    door.check_options(AdapterOptions(focus="beside"))
    door.unknown["caching"] = "resize_image_to_bucket takes (image)"
    door.check_options(AdapterOptions())
    with pytest.raises(ConfigError, match="resize_image_to_bucket takes"):
        door.check_options(AdapterOptions(focus="beside"))
    door.unknown = {"planning": "BucketSelector gives 64x64"}
    door.check_options(AdapterOptions(focus="beside"))
    door.unknown = {"caching": "resize_image_to_bucket takes (image)"}
    door._options = AdapterOptions(focus="beside")
    door.owners = SimpleNamespace(home=SimpleNamespace(__file__=tmp_path / "musubi_tuner" / "dataset" / "home.py"))
    with pytest.raises(SystemExit, match="focus"):
        list(_retrieve_latents(Replaced(lambda *_: iter([]), door), SimpleNamespace(architecture="of tomorrow"), 1))
