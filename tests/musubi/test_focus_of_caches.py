"""Crops that keep a focus in musubi-tuner's caches: which are current for it, and how pictures are cut."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_folder import Folder
from PIL import Image

from kohya_bucket.adapter.door import Place
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.errors import ConfigError
from kohya_bucket.musubi.caching import PickedSource, Session, bucket_in, cut, focus_in
from kohya_bucket.musubi.door import MusubiDoor
from kohya_bucket.musubi.seams import _retrieve_latents
from kohya_bucket.musubi.trained_items import items_of_config, pick_out_of

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


SIZE, OWN, OTHER = (72, 64), (64, 64), (80, 48)
WIDE = [0, 0.3, 1, 0.5]  # of pictures of that size, only the other bucket holds it


def movable(root: Path, family: str = "zi") -> tuple[Folder, Path]:
    """Three pictures, of which the first may move, and their focus file."""
    folder = Folder(root, 3, size=SIZE, family=family)
    return folder, focus_file(folder, a0=WIDE, a1=LEFT)


def test_a_changed_weight_makes_again_exactly_what_moves(tmp_path: Path) -> None:
    folder, focus = movable(tmp_path)
    folder.make(focus=focus)
    for weight in (0.0, 0.3):  # the other bucket cuts off a third
        assert folder.reasons(focus=focus, weight=weight) == [[]] * 3
    first, *others = folder.reasons(focus=focus, weight=0.4)
    assert first[0] == "the bucket changed (64x64 -> 80x48)"
    assert others == [[], []]
    folder.make(focus=focus, weight=0.4)
    assert folder.reasons(focus=focus, weight=0.4) == [[]] * 3
    first, *others = folder.reasons(focus=focus)
    assert first[0] == "the bucket changed (80x48 -> 64x64)"
    assert others == [[], []]


def test_what_does_not_say_its_bucket_has_it_in_the_names_of_its_tensors(tmp_path: Path) -> None:
    folder, focus = movable(tmp_path)
    folder.make()
    for file in (tmp_path / "cache").glob("*_zi.safetensors"):
        file.write_bytes(file.read_bytes().replace(b"kohya_bucket", b"nobody_knows"))
    found = folder.reasons(focus=focus, weight=0.4)
    assert found[0] == ["the bucket changed (64x64 -> 80x48)"]
    assert found[2] == []


@pytest.mark.parametrize("size", ["3000000000x0005", f"{10**30}x0064", "0072x0000"])
def test_a_file_named_after_a_size_that_no_image_has_is_no_cache(tmp_path: Path, size: str) -> None:
    folder, focus = movable(tmp_path)
    folder.make(focus=focus, weight=0.4)
    (own,) = (tmp_path / "cache").glob("a0_*x*_zi.safetensors")
    own.with_name(f"a0_{size}_zi.safetensors").write_bytes(own.read_bytes())
    for weight in (0.4, 0.0):
        assert len(folder.caches(focus=focus, weight=weight).named["a0"]) == 1
        assert folder.reasons(focus=focus, weight=weight)[1:] == [[], []]
    own.unlink()
    assert folder.reasons(focus=focus, weight=0.4) == [["not encoded yet"], [], []]


def test_a_training_has_an_image_in_the_bucket_to_which_its_focus_moves_it(tmp_path: Path) -> None:
    folder, focus = movable(tmp_path)
    folder.make(focus=focus, weight=0.4)
    trained = items_of_config(folder.caches(focus=focus, weight=0.4), "my.toml")
    assert [size for _, (size, _) in sorted(trained.items())] == [OTHER, OWN, OWN]
    items: list[Any] = [SimpleNamespace(latent_cache_path=path) for path in sorted(trained)]
    buckets: dict[Any, list[Any]] = {(*OWN, 9): items}
    pick_out_of(buckets, trained)
    assert buckets == {(*OTHER, 9): items[:1], (*OWN, 9): items[1:]}


def test_captions_that_are_encoded_with_control_images_follow_a_move(tmp_path: Path) -> None:
    folder, focus = movable(tmp_path, "qie")
    folder.controls = {path: [folder.paths[2]] for path in folder.paths}
    folder.make(focus=focus)
    first, *others = folder.reasons(focus=focus, weight=0.4)
    assert first[-1] == "bucket for its focus changed (None -> [80, 48])"
    assert others == [[], []]
    folder.make(focus=focus, weight=0.4)
    Path(folder.paths[0]).unlink()  # caches outlive it
    assert folder.reasons(focus=focus, weight=0.4) == [[]] * 3


def test_an_image_and_its_control_images_are_cut_to_the_bucket_of_its_focus(tmp_path: Path) -> None:
    folder, focus = movable(tmp_path)
    session = Session(folder.caches(focus=focus, weight=0.4), text=False)
    fetches = Fetches("a0.png", [ramp(SIZE)], "caption", [ramp((90, 64))])
    (fetch,) = PickedSource(fetches, session)
    _, images, _, controls = fetch()
    for picture in (*images, *controls):
        assert bucket_in(picture, OWN) == OTHER
    assert bucket_in(ramp(SIZE), OWN) == OWN
    found = cut(images[0], OTHER, focus_in(images[0]))
    assert (found[:, 0].max(), found[:, -1].min()) == (0, 255)


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
    with pytest.raises(ConfigError, match=r"focus_weight needs .* BucketSelector gives"):
        door.check_options(AdapterOptions(focus="beside", focus_weight=0.4))
    door.unknown = {"caching": "resize_image_to_bucket takes (image)"}
    door._options = AdapterOptions(focus="beside")
    with pytest.raises(SystemExit, match="focus"):
        list(_retrieve_latents(Place(lambda *_: iter([]), door), SimpleNamespace(architecture="of tomorrow"), 1))
