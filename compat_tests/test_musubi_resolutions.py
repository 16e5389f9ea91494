"""One image at several resolutions in the real musubi-tuner (MUSUBI_DIR names a checkout): a data set for each."""

import collections

import pytest
from musubi_support import COUNT, SIZES, epochs, family, make_caches, make_data

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_image_at_each_resolution_in_every_epoch(musubi_source, tmp_path, ranks):
    """One of them twice as often as the other, on any number of processes; with one shape per step."""
    config = make_data(musubi_source, tmp_path, family(musubi_source))
    make_caches(musubi_source, tmp_path / "smaller", family(musubi_source), side=64)
    more = ["[[datasets]]", f"image_directory = '{tmp_path / 'images'}'", f"cache_directory = '{tmp_path / 'smaller'}'"]
    more += ["resolution = [64, 64]", "num_repeats = 2", ""]
    more += ["[kohya_bucket]", "step_shapes = 'one'", ""]
    config.write_text(config.read_text(encoding="utf-8") + "\n".join(more), encoding="utf-8")
    for epoch in epochs(musubi_source, tmp_path, config, ranks, count=2):
        assert all(len({tuple(row["size"]) for row in step}) == 1 for step in epoch)
        counts = collections.Counter()
        for row in (row for step in epoch for row in step):
            side = 128 if row["size"][0] * row["size"][1] > 150 else 64
            counts.update((item, side) for item in row["items"])
        asked = {(item, side): repeats for item in range(COUNT) for side, repeats in ((128, 1), (64, 2))}
        assert counts.keys() == asked.keys()
        assert all(counts[key] >= times for key, times in asked.items())
        assert sum(counts.values()) - sum(asked.values()) <= (ranks - 1) * 2 * len(SIZES)
