"""Two real ranks cache latents through sd-scripts' own loop, for longer than their process group would wait."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sdscripts_support import MeanVAE, build_groups, random_sizes, write_images
from several_sizes import COUNT, TABLES, config_of

from kohya_bucket.trainers.sdscripts.checkout import npz_version

HERE = Path(__file__).parent
IMAGES = 23


def run_ranks(script, config, sd_scripts_dir, tmp_path, *options):
    """What each of two ranks that run a script for a config says it found."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    environment = {
        **os.environ,
        "SD_SCRIPTS_DIR": str(sd_scripts_dir),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(HERE / script),
               "config.json", "found", *options]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((tmp_path / f"found.{rank}").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.fixture
def reference(unpatched, tmp_path):
    """Configs of some resolutions, and what sd-scripts alone caches for one: a hash for each image."""
    from library import strategy_base, strategy_sd

    sizes = random_sizes(IMAGES, 1, 100, 300)
    keys = {"batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}

    def config(folder, resolutions):
        subset = {"image_dir": str(folder), "caption_extension": ".txt", "flip_aug": True}
        return {"datasets": [{**keys, "resolution": side, "subsets": [subset]} for side in resolutions]}

    def want(side):
        write_images(tmp_path / f"alone {side}", sizes)
        group, _ = build_groups(unpatched, config(tmp_path / f"alone {side}", [side]))
        strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 2, False)
        strategy_base.LatentsCachingStrategy._strategy = strategy
        accelerator = SimpleNamespace(
            num_processes=1, process_index=0, device=torch.device("cpu"), wait_for_everyone=lambda: None
        )
        group.new_cache_latents(MeanVAE(), accelerator)
        found = {}
        for info in group.image_data.values():
            latents, _, _, flipped, _ = strategy.load_latents_from_disk(info.latents_npz, info.bucket_reso)
            bits = latents.tobytes() + flipped.tobytes()
            found[f"{Path(info.absolute_path).name} at {side}"] = hashlib.sha256(bits).hexdigest()
        assert len(set(found.values())) == IMAGES
        return found

    write_images(tmp_path / "a", sizes)
    return lambda resolutions: config(tmp_path / "a", resolutions), want


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_each_image_is_encoded_once_and_all_ranks_see_all(reference, sd_scripts_dir, tmp_path, kind):
    if kind == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    config_of_sides, want_at = reference
    config, want = config_of_sides([128]), want_at(128)
    config["kohya_bucket"] = {"latent_cache": kind}
    if kind == "shards":
        config["kohya_bucket"]["latent_cache_dir"] = str(tmp_path / "store")
    found = run_ranks("caching_script.py", config, sd_scripts_dir, tmp_path, "--seconds", "2")
    assert min(part["seconds"] for part in found) > 20
    assert found[0]["gave_up"]
    assert sorted(found[0]["encoded"] + found[1]["encoded"]) == sorted(name.split()[0] for name in want)
    assert min(len(part["encoded"]) for part in found) >= IMAGES // 2
    for part in found:
        assert part["seen"] == want
        assert part["again"] == []
    assert bool(list((tmp_path / "a").glob("*.npz"))) == (kind == "npz")


@pytest.mark.slow
def test_ranks_agree_on_the_files_of_two_datasets(reference, sd_scripts_dir, tmp_path):
    config_of_sides, want_at = reference
    want = want_at(128) | want_at(192)
    found = run_ranks("caching_script.py", config_of_sides([128, 192]), sd_scripts_dir, tmp_path, "--seconds", "0")
    assert sorted(found[0]["encoded"] + found[1]["encoded"]) == sorted(name.split()[0] for name in want)
    for part in found:
        assert part["encoded"]
        assert part["seen"] == want
        assert part["again"] == []
    apart = npz_version(sd_scripts_dir) != ""  # since 0.10.2 one file holds both sizes
    assert len(list((tmp_path / "a").glob("*_sd_at_*x*.npz"))) == (IMAGES if apart else 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npz", "shards"])
@pytest.mark.parametrize("name", ["merge", "catch_all", "rotate and merge"])
def test_ranks_cache_and_train_moved_images(unpatched, sd_scripts_dir, tmp_path, kind, name):
    table = TABLES[name] | {"step_shapes": "one"}
    if kind == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
        table = {**table, "latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}
    config = config_of(tmp_path, table, batch_size=2)
    config["datasets"][0]["subsets"][0]["flip_aug"] = True
    found = run_ranks("several_sizes_script.py", config, sd_scripts_dir, tmp_path)
    assert all(part["encoded"][0] > 0 for part in found)
    assert all(part["encoded"][1] == 0 for part in found)
    steps = list(zip(*(part["rows"] for part in found), strict=True))
    assert all(first["size"] == second["size"] for first, second in steps)
    for epoch in (1, 2, 3):
        rows = [row for step in steps for row in step if row["epoch"] == epoch]
        # A step of fewer images than ranks gives one of them to two ranks, with weight 0 or not at all.
        assert sum(row["moved"] for row in rows) > 0
        assert len({key for row in rows for key in row["keys"]}) == COUNT
