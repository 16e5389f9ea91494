"""Two real ranks cache latents through sd-scripts' own loop, for longer than their process group would wait."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sdscripts_support import MeanVAE, build_groups, random_sizes, write_images

SCRIPT = Path(__file__).with_name("caching_script.py")
IMAGES = 23


@pytest.fixture
def reference(unpatched, tmp_path):
    """The config, and what sd-scripts alone caches for it: a hash for each image."""
    strategy_sd = pytest.importorskip("library.strategy_sd", reason="this version has no caching strategies")
    if not hasattr(unpatched.train_util.BaseDataset, "new_cache_latents"):
        pytest.skip("this version has no caching strategies")
    from library import strategy_base

    sizes = random_sizes(IMAGES, 1, 100, 300)
    keys = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}

    def config(folder):
        subset = {"image_dir": str(folder), "caption_extension": ".txt", "flip_aug": True}
        return {"datasets": [{**keys, "subsets": [subset]}]}

    write_images(tmp_path / "alone", sizes)
    write_images(tmp_path / "a", sizes)
    group, _ = build_groups(unpatched, config(tmp_path / "alone"))
    strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 2, False)
    strategy_base.LatentsCachingStrategy._strategy = strategy
    accelerator = SimpleNamespace(
        num_processes=1, process_index=0, device=torch.device("cpu"), wait_for_everyone=lambda: None
    )
    group.new_cache_latents(MeanVAE(), accelerator)
    want = {}
    for info in group.image_data.values():
        with np.load(info.latents_npz) as file:
            bits = file["latents"].tobytes() + file["latents_flipped"].tobytes()
        want[Path(info.absolute_path).name] = hashlib.sha256(bits).hexdigest()
    assert len(set(want.values())) == IMAGES
    return config(tmp_path / "a"), want


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_each_image_is_encoded_once_and_all_ranks_see_all(reference, sd_scripts_dir, tmp_path, kind):
    if kind == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    config, want = reference
    config["kohya_bucket"] = {"latent_cache": kind}
    if kind == "shards":
        config["kohya_bucket"]["latent_cache_dir"] = str(tmp_path / "store")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    environment = {
        **os.environ,
        "SD_SCRIPTS_DIR": str(sd_scripts_dir),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT),
               "config.json", "found", "--seconds", "2"]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"found.{rank}").read_text(encoding="utf-8")) for rank in range(2)]
    assert min(part["seconds"] for part in found) > 20
    assert found[0]["gave_up"]
    assert sorted(found[0]["encoded"] + found[1]["encoded"]) == sorted(want)
    assert min(len(part["encoded"]) for part in found) >= IMAGES // 2
    for part in found:
        assert part["seen"] == want
        assert part["again"] == []
    assert bool(list((tmp_path / "a").glob("*.npz"))) == (kind == "npz")
