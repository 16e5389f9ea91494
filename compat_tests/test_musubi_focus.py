"""Crops that keep a marked rectangle, in musubi-tuner's own caching programs: seen in what is trained.

Every picture is black with a white rectangle, and a latent is the mean of the pixels that it was made from: it tells
how much of the rectangle is in the crop.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from musubi_caching_cases import DOOR, Case, play, refused
from musubi_support import family

pytestmark = pytest.mark.slow
COUNT, SIDE = 12, 128
CLIP, BAND = (260, 128), 16  # a clip that no bucket holds whole, with a white band that the middle crop loses


def boxes():
    """(size, left, top, right, bottom) of each picture and its rectangle; none needs a resize."""
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        long, width, height = int(rng.integers(220, 400)), int(rng.integers(50, 110)), int(rng.integers(50, 110))
        size = (SIDE, long) if i % 2 else (long, SIDE)
        left, top = int(rng.integers(0, size[0] - width)), int(rng.integers(0, size[1] - height))
        yield size, left, top, left + width, top + height


def turned(i):
    """The rectangle of a picture as it is turned by half."""
    (width, height), left, top, right, bottom = list(boxes())[i]
    return width - right, height - bottom, width - left, height - top


def mean(i, *, middle=False):
    """Of a crop with the whole rectangle of a picture, or of the middle crop."""
    size, *own = list(boxes())[i]
    start = [(side - SIDE) // 2 for side in size]
    sides = list(zip(own[:2], own[2:], start, strict=True))
    kept = [min(b, s + SIDE) - max(a, s) if middle else b - a for a, b, s in sides]
    return round(255 * max(kept[0], 0) * max(kept[1], 0) / SIDE**2)


CUT = [i for i in range(COUNT) if mean(i, middle=True) < mean(i) - 1]


def mark(case, moved=(), table=True, **keys):
    """The config, and the focus file; a rectangle of `moved` is where none is."""
    rows = []
    for i, (size, *box) in enumerate(boxes()):
        left, top, right, bottom = turned(i) if i in moved else box
        share = left / size[0], top / size[1], right / size[0], bottom / size[1]
        rows.append({"image": f"im/a{i:02d}.png", "focus": share})
    case.do("write", case.folder / "focus.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    case.table = f"[kohya_bucket]\nfocus = '{case.folder / 'focus.jsonl'}'" if table else ""
    case.dataset((SIDE, SIDE), enable_bucket=False, **keys)


def pictures(case):
    for i, (size, *box) in enumerate(boxes()):
        case.do("marked", case.folder / "im" / f"a{i:02d}.png", list(size), list(box))
        case.caption(f"a{i:02d}.png", i)


def images(case):
    pictures(case)
    mark(case, table=False)
    case.both()
    case.train()
    mark(case)
    case.train()
    case.latents()
    case.text()
    case.train()
    case.latents()
    mark(case, moved=CUT[:2])
    case.train()
    case.latents("--skip_existing")


def controls(case):
    """Control images with the same rectangles; the first dataset cuts them like their images."""
    pictures(case)
    for i, (size, *box) in enumerate(boxes()):
        case.do("marked", case.folder / "control" / f"a{i:02d}.png", list(size), list(box))
    mark(case, control_directory=str(case.folder / "control"))
    case.both()
    mark(case, moved=CUT[:1], control_directory=str(case.folder / "control"))
    case.train()
    case.cache = str(case.folder / "own sizes")
    more = {"no_resize_control": True} if case.keeps_control else {"qwen_image_edit_no_resize_control": True}
    mark(case, control_directory=str(case.folder / "control"), **more)
    case.latents()


def clips(case):
    rows = []
    for name in ("v0", "v1"):
        for i in range(5):
            case.do("marked", case.folder / name / f"{i:03d}.png", list(CLIP), [CLIP[0] - BAND, 0, *CLIP])
        rows.append({"video_path": str(case.folder / name), "caption": f"caption {name[1:]}"})
    for focus in ([1 - BAND / CLIP[0], 0, 1, 1], [0, 0, 0.1, 1]):
        case.do("write", case.folder / "focus.jsonl", json.dumps({"image": "v0", "focus": focus}))
        case.table = f"[kohya_bucket]\nfocus = '{case.folder / 'focus.jsonl'}'"
        case.lines(rows, "video_jsonl_file", target_frames=[5])
        if focus[0]:
            case.both()
        case.train()


@pytest.fixture(scope="module")
def played(musubi_source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("focus")
    cases = {}
    own = family(musubi_source)
    for scenario, of in ((images, own), (controls, "qie"), (clips, "wan")):
        cases[scenario.__name__] = case = Case(folder / scenario.__name__, of)
        case.keeps_control = "no_resize_control" in _keys(musubi_source)
        scenario(case)
    return folder, play(musubi_source, folder, cases, DOOR)


def _keys(source):
    text = (source / "musubi_tuner" / "dataset" / "config_utils.py").read_text(encoding="utf-8")
    return {line.split(":")[0].strip() for line in text.splitlines()}


def trained(result):
    """The mean of each picture, by its number."""
    return {c: v for row in result["rows"] for c, v in zip(row["captions"], row["items"], strict=True)}


def cached(folder, part):
    """The mean in the latents of each cache file."""
    from safetensors.torch import load_file

    found = {}
    for file in Path(folder).glob("*[0-9]_*.safetensors"):
        if not file.stem.endswith("_te"):
            (name,) = [n for n in load_file(file) if n.startswith(part)]
            found[int(file.name[1:].partition("_")[0])] = round(float(load_file(file)[name].flatten()[0]))
    return found


def test_the_middle_cuts_at_least_a_third_of_the_rectangles() -> None:
    assert len(CUT) >= COUNT / 3


def test_what_is_trained_holds_every_rectangle_and_a_moved_one_is_made_again(played) -> None:
    _, _, middle, before, again, _, after, kept, moved, last = played[1]["images"]
    assert trained(middle) == pytest.approx({i: mean(i, middle=True) for i in range(COUNT)}, abs=1)
    refused(before, f"{len(CUT)} of {COUNT} items", "its focus moved")
    assert f"{COUNT} items: {COUNT - len(CUT)} current, {len(CUT)} made" in again["log"]
    assert trained(after) == pytest.approx({i: mean(i) for i in range(COUNT)}, abs=1)
    assert f"{COUNT} items: {COUNT} current, 0 made" in kept["log"]
    assert "exit" not in kept
    refused(moved, "2 of 12 items", f"a{CUT[0]:02d}.png (latents: its focus moved (the crop ")
    assert f"{COUNT} items: {COUNT - 2} current, 2 made" in last["log"]
    assert f"a{CUT[0]:02d}.png (its focus moved" in last["log"]


def test_control_images_are_cut_like_their_images_or_a_line_says_that_they_are_not(played) -> None:
    folder, results = played
    _, _, before, own = results["controls"]
    whole = {i: mean(i) for i in range(COUNT)}
    assert cached(folder / "controls" / "cache", "latents_control") == pytest.approx(whole, abs=1)
    refused(before, "1 of 12 items", "latents: its focus moved", "text: its focus moved")
    assert "control images have sizes of their own" in own["log"]
    values = cached(folder / "controls" / "own sizes", "latents_control")
    assert values.keys() == whole.keys()
    assert values != whole


def test_a_clip_has_one_rectangle_for_all_its_frames(played) -> None:
    _, _, after, moved = played[1]["clips"]
    found = trained(after)
    assert found[0] > 0
    assert found[1] == 0  # has no focus
    refused(moved, "1 of 2 items", "v0 (latents: its focus moved")
