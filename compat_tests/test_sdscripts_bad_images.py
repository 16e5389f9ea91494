"""Images that turn out unreadable while sd-scripts' real data path trains or caches."""

import collections

import pytest
from PIL import Image
from sdscripts_support import MeanVAE, build_groups, random_sizes, write_images, write_metadata
from several_sizes import batches_of, cache_group, config_of, sizes_of

from kohya_bucket.errors import UnreadableError
from kohya_bucket.trainers.door import batches

COUNT = 31
STOP = {"on_bad_image": "stop"}


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(batches, "_told", set())


@pytest.fixture
def data(tmp_path):
    """Files of which the first and the last are cut off in the middle: their headers are whole."""
    write_images(tmp_path / "a", random_sizes(COUNT, 1, 60, 300))
    files = sorted((tmp_path / "a").glob("*.png"))
    for file in (files[0], files[-1]):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return [str(file) for file in files]


def trained_of(seen):
    return [collections.Counter(key for batch in epoch for key in batch["image_keys"]) for epoch in seen]


@pytest.mark.parametrize("workers", [0, 2])
def test_another_image_of_the_bucket_trains_in_its_place(patched, tmp_path, data, workers, caplog):
    group, _ = build_groups(patched, config_of(tmp_path, {"remainder": "keep"}))
    bucket = {key: tuple(info.bucket_reso) for key, info in group.datasets[0].image_data.items()}
    seen = batches_of(patched, group, epochs=2, workers=workers)
    for epoch, counts in zip(seen, trained_of(seen), strict=True):
        assert set(counts) == set(data[1:-1])
        assert sum(counts.values()) == COUNT
        assert all(bucket[key] == sizes_of(batch) for batch in epoch for key in batch["image_keys"])
    if not workers:
        assert "is left out: cannot be read as an image (image file is truncated" in caplog.text
        assert caplog.text.count("trains in its place") == 2  # each is named once


def test_latents_are_cached_without_it(patched, tmp_path, data, caplog):
    for to_disk in (False, True):
        group, _ = build_groups(patched, config_of(tmp_path, {"remainder": "keep"}))
        encoder = MeanVAE()
        cache_group(group, encoder, to_disk)
        assert encoder.encoded == COUNT - 2
        assert caplog.text.count("is left out: cannot be read as an image (image file is truncated") == 2
        for counts in trained_of(batches_of(patched, group, epochs=2, workers=2)):
            assert set(counts) == set(data[1:-1])
        caplog.clear()


def test_a_cache_that_becomes_unreadable(patched, tmp_path):
    group, _ = build_groups(patched, config_of(tmp_path, {"remainder": "keep"}))
    cache_group(group, MeanVAE(), True)
    key, info = next(iter(group.datasets[0].image_data.items()))
    with open(info.latents_npz, "r+b") as file:
        file.truncate(100)
    counts = trained_of(batches_of(patched, group, epochs=1))[0]
    assert key not in counts
    assert sum(counts.values()) == COUNT


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cached", [False, True])
def test_a_folder_that_goes_away_ends_the_run(patched, tmp_path, workers, cached, capfd):
    """And leaves no image out."""
    for part in "ab":
        write_images(tmp_path / part, random_sizes(COUNT, 1, 60, 300))
    config = config_of(tmp_path, {"remainder": "keep"})
    (dataset,) = config["datasets"]
    dataset["subsets"] = [{**dataset["subsets"][0], "image_dir": str(tmp_path / part)} for part in "ab"]
    group, _ = build_groups(patched, config)
    if cached:
        cache_group(group, MeanVAE(), True)
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    with pytest.raises((SystemExit, UnreadableError), match=r"b is gone, or empty: .* cannot be read; bring back its"):
        batches_of(patched, group, epochs=1, workers=workers)
    assert "trains in its place" not in capfd.readouterr().err


def test_a_folder_that_goes_away_while_it_is_cached_ends_the_run(patched, tmp_path, capfd):
    write_images(tmp_path / "a", random_sizes(COUNT, 1, 60, 300))
    group, _ = build_groups(patched, config_of(tmp_path, {}))
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match=r"a is gone, or empty: .* cannot be read; bring back its"):
        cache_group(group, MeanVAE(), True)
    assert "is left out" not in capfd.readouterr().err


def test_stop_ends_the_run_with_one_line(patched, tmp_path, data):
    group, _ = build_groups(patched, config_of(tmp_path, STOP))
    with pytest.raises(SystemExit, match=r"is truncated.*\): repair or remove it, or leave on_bad_image out"):
        batches_of(patched, group, epochs=1)


def test_stop_where_workers_read(patched, tmp_path, data, capfd):
    group, _ = build_groups(patched, config_of(tmp_path, STOP))
    with pytest.raises(SystemExit) as ended:
        batches_of(patched, group, epochs=1, workers=2)
    assert ended.value.code == 2
    assert "cannot be read: repair or remove it" in capfd.readouterr().err


def test_what_is_no_images_fault_is_raised(patched, tmp_path, monkeypatch):
    group, _ = build_groups(patched, config_of(tmp_path, {"remainder": "keep"}))
    monkeypatch.setattr(type(group.datasets[0]), "process_caption", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batches_of(patched, group, epochs=1)


def test_a_run_without_any_image_ends(patched, tmp_path):
    """sd-scripts says that there is no data, and ends with exit code 0."""
    config = config_of(tmp_path, {"remainder": "keep"})
    config["datasets"][0]["subsets"][0]["image_dir"] = str(tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="no image is left to train"):
        build_groups(patched, config)
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "a.png").write_bytes(b"")
    with pytest.raises(SystemExit, match="no image is left to train"):
        build_groups(patched, config)


def edit(path, turn):
    """Another picture in a file's place: of another shape, or of the same, scaled by one factor."""
    with Image.open(path) as image:
        size = image.size
    Image.new("RGB", (size[1] // 2, size[0]) if turn else (size[0] * 2, size[1] * 2), "red").save(path)


@pytest.fixture
def edited(tmp_path):
    """Makes a group, then turns its first picture into another shape and enlarges its last."""
    write_images(tmp_path / "a", random_sizes(COUNT, 1, 60, 300))

    def make(patched, **subset):
        group, _ = build_groups(patched, config_of(tmp_path, {"remainder": "keep"}, **subset))
        files = sorted((tmp_path / "a").glob("*.png"))
        edit(files[0], turn=True)
        edit(files[-1], turn=False)
        return group, str(files[0]), set(map(str, files[1:]))

    return make


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_of_another_shape_than_its_bucket_was_chosen_for(patched, edited, workers, caplog):
    group, changed, whole = edited(patched)
    for counts in trained_of(batches_of(patched, group, epochs=2, workers=workers)):
        assert set(counts) == whole
    if not workers:
        assert f"{changed} is left out: " in caplog.text
        assert "another shape than when its bucket was chosen" in caplog.text


@pytest.mark.parametrize("to_disk", [False, True])
def test_it_is_not_cached_either(patched, edited, to_disk, caplog):
    group, changed, whole = edited(patched)
    cache_group(group, MeanVAE(), to_disk)
    assert f"{changed} is left out: " in caplog.text
    for counts in trained_of(batches_of(patched, group, epochs=1)):
        assert set(counts) == whole


def test_a_size_that_metadata_states_is_what_images_are_scaled_by(patched, tmp_path):
    write_images(tmp_path / "a", random_sizes(COUNT, 1, 60, 300))
    files = sorted((tmp_path / "a").glob("*.png"))
    listed = write_metadata(tmp_path / "meta.json", files, sizes=True)
    subset = {"metadata_file": str(listed), "image_dir": str(tmp_path / "a")}
    keys = {"resolution": 128, "enable_bucket": True, "batch_size": 2, "min_bucket_reso": 64}
    config = {"datasets": [{**keys, "subsets": [subset]}], "kohya_bucket": {"remainder": "keep"}}
    group, _ = build_groups(patched, config)
    edit(files[0], turn=True)
    (counts,) = trained_of(batches_of(patched, group, epochs=1))
    assert sum(counts.values()) == COUNT == len(counts)


@pytest.mark.parametrize(("caption", "words"), [(b"caf\xe9", "`kohya-bucket fix"), (b"", "it is empty")])
def test_a_caption_at_which_sd_scripts_stops_is_one_line(patched, tmp_path, data, caption, words, capsys):
    (tmp_path / "a" / "img_003.txt").write_bytes(caption)
    with pytest.raises(SystemExit) as end:
        build_groups(patched, config_of(tmp_path, {}))
    assert end.value.code == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("kohya_bucket: ")]
    assert str(tmp_path / "a" / "img_003.txt") in line
    assert words in line
