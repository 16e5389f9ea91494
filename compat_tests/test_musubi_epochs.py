"""Epochs of the real musubi-tuner (MUSUBI_DIR names a checkout) with its door open."""

import collections

import pytest
from musubi_support import COUNT, ONCE, counted, epochs, epochs_and_log, family, make_data, run, write_config


@pytest.fixture
def config(musubi_source, tmp_path):
    return make_data(musubi_source, tmp_path, family(musubi_source))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "workers", "seed"), [(1, 0, None), (1, 8, 42), (2, 0, None), (2, 2, 42), (4, 0, None)]
)
def test_every_item_once(musubi_source, config, tmp_path, ranks, workers, seed):
    seen = epochs(musubi_source, tmp_path, config, ranks, workers, seed)
    assert seen[0] != seen[1]
    for epoch in seen:
        assert all(row["items"] == row["captions"] for step in epoch for row in step)
        assert all(row["promised"] == len(epoch) * ranks for step in epoch for row in step)
        assert counted(epoch) == ONCE


@pytest.mark.slow
def test_items_of_a_family_that_is_not_known_here(musubi_source, config, tmp_path):
    """As of Qwen-Image 2.1: its epochs are exact, and its caches are left alone."""
    for file in (tmp_path / "cache").iterdir():
        file.rename(file.with_name(file.name.replace(f"_{family(musubi_source)}", "_qi21")))
    (tmp_path / "images" / "im000.txt").write_text(
        "another caption", encoding="utf-8"
    )  # a stale cache, if it were known
    before = {file.name: file.read_bytes() for file in (tmp_path / "cache").iterdir()}
    for epoch in epochs(musubi_source, tmp_path, config, ranks=2, seed=1, of="qi21"):
        counts = counted(epoch)
        assert counts.keys() == ONCE.keys()
        assert sum(counts.values()) <= COUNT + 7  # a bucket's last item on both
    assert {file.name: file.read_bytes() for file in (tmp_path / "cache").iterdir()} == before


@pytest.mark.slow
def test_without_it_two_processes_miss_items(musubi_source, config, tmp_path):
    for epoch in epochs(musubi_source, tmp_path, config, ranks=2, door=()):
        assert len(counted(epoch)) < COUNT
        assert any(len({tuple(row["size"]) for row in step}) > 1 for step in epoch)


@pytest.mark.slow
def test_repeats_and_two_data_sets(musubi_source, config, tmp_path):
    write_config(tmp_path, num_repeats=3)
    for epoch in epochs(musubi_source, tmp_path, config):
        assert counted(epoch) == dict.fromkeys(range(COUNT), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "table", ["order = 'runs'\nremainder = 'pad'", "max_pixels = 65536", "model = 'z-image'\nmax_tokens = 256"]
)
def test_options_of_the_config(musubi_source, config, tmp_path, table):
    write_config(tmp_path, f"[kohya_bucket]\n{table}")
    for epoch in epochs(musubi_source, tmp_path, config, seed=1):
        counts = counted(epoch)
        assert counts.keys() == ONCE.keys()
        assert "pad" in table or counts == ONCE
        sizes = [len(step[0]["items"]) for step in epoch]
        assert ("max_" in table) == (max(sizes) > 2)


@pytest.mark.slow
def test_batches_of_equal_cost_meet_in_a_step(musubi_source, config, tmp_path):
    """In fewer steps than one shape per step takes, and without its repeats."""
    write_config(tmp_path, "[kohya_bucket]\nmodel = 'z-image'")
    met = epochs(musubi_source, tmp_path, config, ranks=4, seed=1)
    write_config(tmp_path, "[kohya_bucket]\nstep_shapes = 'one'")
    for epoch, other in zip(met, epochs(musubi_source, tmp_path, config, ranks=4, seed=1), strict=True):
        assert counted(epoch) == ONCE
        assert counted(other).keys() == ONCE.keys()
        assert all(len({tuple(row["size"]) for row in step}) == 1 for step in other)
        assert len(epoch) < len(other)
        assert any(len({tuple(row["size"]) for row in step}) > 1 for step in epoch)
        assert all(row["items"] == row["captions"] for step in epoch for row in step)


def refusal(source, config, workers=0, cut=()):
    """What a run says that ends before its first step, and without a traceback."""
    folder = config.parent
    spec = {"config": str(config), "seed": 1, "workers": workers, "epochs": 1, "out": str(folder), "cut": cut}
    spec |= {"timestep_buckets": None, "architecture": family(source)}
    said = run(source, folder, spec, code=2)
    assert "Traceback" not in said
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("rule = 'exact'", "rule is set, but musubi-tuner trains from caches"),
        ("resolutions = [64, 128]", "give each resolution [[datasets]] and a cache_directory of its own"),
        ("remainder = 'merge'", "remainder is 'merge', which trains images at other sizes"),
        ("ordr = 'runs'", "has no option 'ordr'; the nearest is 'order'"),
    ],
)
def test_options_that_caches_cannot_have(musubi_source, config, tmp_path, table, words):
    write_config(tmp_path, f"[kohya_bucket]\n{table}")
    assert words in refusal(musubi_source, config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.unlink(), "does not exist: "),
        (lambda file: file.write_text("[general\n", encoding="utf-8"), "dataset.toml, line 1: "),
        (lambda file: file.write_bytes(b'a = "\xe4"\n'), "UTF-8"),
        (
            lambda file: file.write_text("[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'x'\n", encoding="utf-8"),
            "musubi-tuner refuses the dataset config",
        ),
        (
            lambda file: [(file.parent / "cache" / f"my_{one}.safetensors").write_bytes(b"") for one in ("qi", "zi")],
            "which musubi-tuner takes for a cache of",
        ),
    ],
    ids=["missing", "syntax", "bytes", "keys", "foreign"],
)
def test_a_mistake_is_one_line(musubi_source, config, change, words):
    change(config)
    assert words in refusal(musubi_source, config)


@pytest.mark.slow
def test_timesteps_are_spread_over_all_processes(musubi_source, config, tmp_path):
    """Each of ten parts of [0, 1) has its share of an epoch, and no two trainings of an epoch the same."""
    first, second = epochs(musubi_source, tmp_path, config, ranks=2, seed=1, timestep_buckets=10)
    drawn = [t for step in first for row in step for t in row["timesteps"]]
    assert len(drawn) == len(set(drawn)) == sum(counted(first).values())
    parts = collections.Counter(int(t * 10) for t in drawn)
    assert set(parts) == set(range(10))
    assert max(parts.values()) - min(parts.values()) <= 4
    assert drawn != [t for step in second for row in step for t in row["timesteps"]]


def caches(folder, *patterns):
    """The file that each pattern names."""
    return [str(file) for pattern in patterns for (file,) in [list((folder / "cache").glob(pattern))]]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_whose_cache_cannot_be_read(musubi_source, config, tmp_path, workers):
    """Of one the latents break, of another what the text encoder gave; others of their buckets train."""
    broken = caches(tmp_path, "im005_*x*", "im011_*_te.*")
    (epoch,), said = epochs_and_log(musubi_source, tmp_path, config, workers=workers, count=1, cut=broken)
    counts = counted(epoch)
    assert counts.keys() == ONCE.keys() - {5, 11}
    assert sum(counts.values()) == COUNT
    for name in ("im005_", "im011_"):
        assert any(
            name in line and "is left out" in line and "trains in its place" in line for line in said.splitlines()
        )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_cannot_be_read_may_end_the_run(musubi_source, config, tmp_path, workers):
    write_config(tmp_path, "[kohya_bucket]\non_bad_image = 'stop'")
    said = refusal(musubi_source, config, workers, caches(tmp_path, "im005_*_te.*"))
    (line,) = [line for line in said.splitlines() if line.startswith("kohya_bucket: im005_")]
    assert "repair or remove it, or leave on_bad_image out" in line
