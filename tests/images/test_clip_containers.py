"""Sizes, frames and rates of clips: what the container says where it can be believed, else what a decoder gives."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import clips
from kohya_bucket.images.clips import COUNTED, OF_IMAGES, TOLD, _packets, read_clips
from kohya_bucket.images.formats import VIDEO_EXTENSIONS
from kohya_bucket.images.listing import list_images
from tests.clip_files import CODECS, copy_packets, decoded, make_clip, with_cover

av = pytest.importorskip("av", minversion="16")


@pytest.mark.parametrize("ending", sorted(CODECS))
def test_every_container(tmp_path: Path, ending: str) -> None:
    path = make_clip(tmp_path / f"clip{ending}", 37, (96, 64), 30)
    scan = read_clips([path])
    assert (scan.sizes.tolist(), scan.frames.tolist(), scan.failures) == ([[96, 64]], [37], [])
    assert scan.frames[0] == decoded(path)
    assert scan.fps[0] == pytest.approx(30, rel=0.001)
    assert scan.seconds[0] == pytest.approx(37 / 30, rel=0.001)
    assert scan.source.tolist() == [TOLD if ending in (".mp4", ".mov", ".m4v", ".avi") else COUNTED]
    assert read_clips([path], decode=True).frames.tolist() == [37]
    assert set(CODECS) == VIDEO_EXTENSIONS


def test_rates_and_rotation(tmp_path: Path) -> None:
    fps = [23.976, 29.97, 12, 60]
    paths = [make_clip(tmp_path / f"{i}.mp4", 10, fps=rate) for i, rate in enumerate(fps)]
    paths.append(make_clip(tmp_path / "turned.mp4", 10, (64, 48), rotation=90))
    scan = read_clips(paths)
    assert scan.fps.tolist() == pytest.approx([*fps, 24], abs=0.001)
    assert scan.rotation.tolist() == [0, 0, 0, 0, 90]
    assert scan.sizes[4].tolist() == [64, 48]  # as stored: trainers do not turn


@pytest.mark.long
@pytest.mark.parametrize("ending", [".mp4", ".mov", ".mkv", ".avi"])
@pytest.mark.parametrize(("first", "shift"), [(0, 0), (5, 0), (0, -7), (13, -13), (3, 9)])
def test_cuts_without_encoding_are_counted_as_they_are_decoded(tmp_path, ending, first, shift):
    whole = make_clip(tmp_path / ("whole.avi" if ending == ".avi" else "whole.mp4"), 40, key_every=10)
    path = copy_packets(whole, tmp_path / f"cut{ending}", first, shift)
    scan = read_clips([path])
    assert scan.frames.tolist() == [decoded(path)]
    assert scan.failures == []


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    """Where the index is at the front, the container still promises all frames."""
    whole = make_clip(tmp_path / "whole.mp4", 40, options={"movflags": "+faststart"}).read_bytes()
    path = tmp_path / "short.mp4"
    path.write_bytes(whole[: -len(whole) // 8])
    scan = read_clips([path])
    assert scan.frames.tolist() == [0]
    ((_, name, reason),) = scan.failures
    assert name == str(path)
    assert reason.startswith("cannot be decoded as a video after ")
    path = make_clip(tmp_path / "whole.mkv", 40)
    (tmp_path / "short.mkv").write_bytes(path.read_bytes()[: -path.stat().st_size // 4])
    scan = read_clips([tmp_path / "short.mkv"])
    assert 0 < scan.frames[0] == decoded(tmp_path / "short.mkv") < 40
    assert scan.counted.tolist() == [True]


@pytest.mark.parametrize("share", [0.4, 0.1])
@pytest.mark.parametrize("ending", sorted(CODECS))
def test_any_container_that_was_cut_off_is_named(tmp_path: Path, ending: str, share: float) -> None:
    """What comes of it is what a decoder gives; where the index is at the end of the file, nothing comes."""
    whole = make_clip(tmp_path / f"whole{ending}", 40, (96, 64))
    short = tmp_path / f"short{ending}"
    short.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * (1 - share))])
    scan = read_clips([whole, short])
    assert scan.frames[0] == 40
    assert not scan.missing[0]
    if ending in (".mp4", ".mov", ".m4v"):
        assert [i for i, _, _ in scan.failures] == [1]
        return
    assert 0 < scan.frames[1] == decoded(short)
    assert share == 0.1 or scan.frames[1] < 40
    assert 0 < scan.missing[1] <= whole.stat().st_size - short.stat().st_size
    assert scan.flaws == {
        1: f"breaks off after {scan.frames[1]} frames, at least {scan.missing[1]:,} bytes are missing"
    }


def test_an_mp4_whose_index_is_in_front_and_whose_codec_forgives_is_named(tmp_path: Path) -> None:
    whole = make_clip(tmp_path / "whole.m4v", 40, options={"movflags": "+faststart"})
    short = tmp_path / "short.m4v"
    short.write_bytes(whole.read_bytes()[:-400])
    scan = read_clips([whole, short])
    assert scan.missing.tolist() == [0, 400]
    assert 0 < scan.frames[1] < 40


@pytest.mark.parametrize("ending", [".mkv", ".avi", ".wmv"])
def test_a_cover_picture_is_not_what_plays(tmp_path: Path, ending: str) -> None:
    clip = make_clip(tmp_path / ("a.avi" if ending == ".avi" else "a.mp4"), 40, (96, 64))
    path = with_cover(tmp_path / f"covered{ending}", clip)
    plays, first = read_clips([path, clip]), read_clips([path, clip], first=True)
    assert (plays.sizes.tolist(), plays.frames.tolist()) == ([[96, 64], [96, 64]], [40, 40])
    assert (first.sizes.tolist(), first.frames.tolist()) == ([[32, 32], [96, 64]], [1, 40])
    assert plays.behind.tolist() == first.behind.tolist() == [True, False]
    assert list(first.flaws) == [0]


def test_a_clip_is_decoded_by_one_thread(tmp_path: Path) -> None:
    """FFmpeg 7.1.0 hangs when it decodes HEVC on several."""
    with av.open(str(make_clip(tmp_path / "clip.mp4", 3))) as container:
        assert clips._video(container, first=True).codec_context.thread_count == 1


def test_what_is_no_clip(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no clip")
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "folder").mkdir()
    good = make_clip(tmp_path / "good.mp4", 9)
    names = [tmp_path / "text.mp4", tmp_path / "empty.mp4", tmp_path / "folder", good, tmp_path / "missing.mp4"]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.mp4")
        names.append(tmp_path / "pipe.mp4")
    scan = read_clips(names)
    assert scan.frames.tolist() == [0, 0, 0, 9, 0, 0][: len(names)]
    reasons = [reason for _, _, reason in scan.failures]
    assert (
        reasons
        == [
            "cannot be decoded as a video (Invalid data found when processing input)",
            "an empty file (0 bytes)",
            "a folder without images",
            "no such file",
            "not a regular file",
        ][: len(names) - 1]
    )


def test_any_damage_is_named_and_never_raised(tmp_path: Path) -> None:
    draws = np.random.default_rng(7)
    whole = np.frombuffer(make_clip(tmp_path / "whole.mp4", 12).read_bytes(), dtype=np.uint8)
    paths = []
    for i in range(60):
        broken = whole.copy()
        broken[draws.integers(0, len(whole), 30)] = draws.integers(0, 256, 30)
        paths.append(tmp_path / f"{i}.mp4")
        paths[-1].write_bytes(broken[: draws.integers(1, len(whole) + 1)].tobytes())
    scan = read_clips(paths, workers=1)
    failed = {i for i, _, _ in scan.failures}
    assert all((scan.frames[i] == 0) == (i in failed) for i in range(60))
    assert all("\n" not in reason for _, _, reason in scan.failures)


def test_a_folder_of_images_is_a_clip(tmp_path: Path) -> None:
    for i in range(7):
        Image.new("RGB", (40 + i, 30)).save(tmp_path / f"{i:03d}.{'PNG' if i % 2 else 'jpg'}")
    (tmp_path / "notes.txt").write_text("no frame")
    scan = read_clips([tmp_path])
    assert (scan.sizes.tolist(), scan.frames.tolist(), scan.source.tolist()) == ([[40, 30]], [7], [OF_IMAGES])
    assert np.isnan(scan.seconds[0])


def test_engines_agree(tmp_path: Path) -> None:
    paths = [make_clip(tmp_path / f"{n}.mkv", n) for n in range(1, 9)]
    expected = list(range(1, 9))
    for engine in ("alone", "threads", "processes"):
        assert read_clips(paths, engine=engine, workers=2).frames.tolist() == expected


def test_clips_are_listed_by_their_endings(tmp_path: Path) -> None:
    for name in ("b.MP4", "a.webm", "c.png", "d.txt"):
        (tmp_path / name).touch()
    assert [Path(path).name for path in list_images(tmp_path, extensions=VIDEO_EXTENSIONS)] == ["a.webm", "b.MP4"]


def test_without_pyav_one_line_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(clips.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(KohyaBucketError, match="clips are read by PyAV, which is not installed: pip install av"):
        read_clips([tmp_path / "a.mp4"])


@pytest.mark.posix("no file has such a name here")
def test_a_name_with_a_colon_is_no_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_clip(tmp_path / "clip.mp4", 5).rename(tmp_path / "12:30 take.mp4")
    monkeypatch.chdir(tmp_path)
    scan = read_clips(["12:30 take.mp4"])
    assert (scan.frames.tolist(), scan.failures) == ([5], [])


def test_packets_are_counted_where_no_index_can_be_asked(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", 30, key_every=10)
    cut = copy_packets(path, tmp_path / "cut.mp4", 5)
    found = []
    for one in (path, cut):
        with av.open(str(one)) as container:
            found.append(_packets(container, container.streams.video[0]))
    assert found == [30, 0]  # the second begins with no key frame
