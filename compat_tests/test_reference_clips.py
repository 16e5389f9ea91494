"""Every row of the table that musubi-tuner's own code computed: buckets of pictures, and runs of frames of clips."""

import gzip
import json

import numpy as np
import pytest

from kohya_bucket.buckets.clips import ClipBuckets
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.trainers import MusubiTunerBuckets
from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES


@pytest.fixture(scope="module")
def table(reference_dir):
    with gzip.open(reference_dir / "musubi_clips.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


def test_the_architectures_are_theirs(table):
    """Those that the table has, which is of 0.3.4."""
    known = [ARCHITECTURES[name] for name in table["names"]]
    assert {a.name: a.full_name for a in known} == table["names"]
    assert {case["architecture"]: case["steps"] for case in table["pictures"]} == {a.name: a.steps for a in known}
    assert {case["architecture"]: case["target_fps"] for case in table["runs"]} == {
        a.name: a.target_fps for a in known if a.target_fps
    }


def test_every_picture(table, capsys):
    rows = 0
    for case in table["pictures"]:
        rule = MusubiTunerBuckets(tuple(case["resolution"]), case["steps"], case["no_upscale"])
        buckets = MusubiTunerBuckets(tuple(case["resolution"]), case["steps"]).bucket_set
        assert [list(b.as_tuple()) for b in buckets] == case["buckets"]
        assert rule.bucket_set == (None if case["no_upscale"] else buckets)
        expected = np.array(case["rows"])
        placement = rule.place(expected[:, :2])
        trained = expected[:, 2:].min(axis=1) > 0  # musubi-tuner gives a side of 0 where no-upscale floors to nothing
        assert placement.bucket_sizes[trained].tolist() == expected[trained, 2:].tolist()
        assert {placement.reason(i) for i in np.flatnonzero(~trained)} <= {Reason.TOO_SMALL}
        assert (placement.placed == trained).all()
        rows += len(expected)
    with capsys.disabled():
        print(f"\n{rows} pictures of {len(table['pictures'])} settings equal")


def test_every_run_of_frames(table, capsys):
    clips = runs = 0
    for case in table["runs"]:
        architecture = ARCHITECTURES[case["architecture"]]
        rule = ClipBuckets(
            MusubiTunerBuckets((32, 32), architecture.steps),
            case["target_frames"],
            grid=architecture.grid,
            extraction=case["frame_extraction"],
            stride=case["frame_stride"],
            sample=case["frame_sample"],
            max_frames=case["max_frames"],
            target_fps=case["target_fps"],
        )
        frames = [n for n, _ in case["rows"]]
        placed = rule.place([(32, 32)] * len(frames), frames, case["source_fps"])
        found = [[] for _ in frames]
        for clip, start, length in zip(placed.spans.clip, placed.spans.start, placed.spans.length, strict=True):
            found[clip].append([int(start), int(length)])
        where = {key: value for key, value in case.items() if key != "rows"}
        assert found == [expected for _, expected in case["rows"]], where
        assert placed.placed.tolist() == [bool(expected) for _, expected in case["rows"]]
        assert [placed.reason(i) for i in np.flatnonzero(~placed.placed)] == [Reason.TOO_SHORT] * int(
            (~placed.placed).sum()
        )
        assert placed.buckets[placed.bucket_index, 2].tolist() == placed.spans.length.tolist()
        clips, runs = clips + len(frames), runs + len(placed.spans)
    with capsys.disabled():
        print(f"\n{runs} runs of {clips} clips in {len(table['runs'])} settings equal")
