"""Whatever is asked for and not given is said before a training or refused: in sd-scripts' real caching and loaders.

Every picture is black with a white rectangle, and latents are means of pixels: from them shows which state of a picture
is trained, and which crop of it.
"""

import random

import numpy as np
import pytest
from PIL import Image
from sdscripts_support import MeanVAE, build_groups, cache_latents
from test_sdscripts_caching import latents_of
from test_sdscripts_focus import COUNT, KEYS, SIDE, boxes, middle, shown, write

from kohya_bucket.trainers.door import ranks

ENDINGS = ["_sd.npz", "_mine.npz"]  # of SD 1.5's caches, and of a family that is known nowhere


def drawn(draw):
    """What one user asks for, and what becomes of the pictures and files between two runs."""
    return {
        "ending": draw.choice(ENDINGS), "to_disk": draw.random() < 0.8, "skip": draw.random() < 0.3,
        "shards": draw.random() < 0.3, "focus": draw.random() < 0.4,
        "edited": draw.random() < 0.5, "cut": draw.random() < 0.5, "alone_before": draw.random() < 0.3,
    }  # fmt: skip


def run(sd, folder, asked, strategy_only=False):
    """White pixels of each picture as it is trained; an error where the run is refused."""
    subset = {"image_dir": str(folder / "images"), "caption_extension": ".txt"}
    table = {"latent_cache": "shards", "latent_cache_dir": str(folder / "store")} if asked["shards"] else {}
    table |= {"focus": str(folder / "focus.jsonl")} if asked["focus"] else {}
    config = {"datasets": [{**KEYS, "batch_size": 2, "subsets": [subset]}]}
    group, _ = build_groups(sd, config if strategy_only else config | {"kohya_bucket": table})
    from library import strategy_sd

    strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, asked["to_disk"], COUNT, asked["skip"])
    strategy.suffix = asked["ending"]
    cache_latents(group, MeanVAE(), strategy)
    if strategy_only:
        return {}
    found = latents_of(sd, group)
    return {name: shown(float(latents[0].astype(np.float64).mean())) for name, (latents, _) in found.items()}


@pytest.fixture
def pictures(tmp_path):
    def make(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder)
        return folder

    return make


def damage(folder, asked):
    """Pictures and files change; returns {name: white pixels} of the pictures that do."""
    expected = {}
    if asked["edited"]:
        for i in (0, 1):
            size = list(boxes())[i][0]
            Image.new("RGBA", size, (255, 255, 255, 255)).save(folder / "images" / f"{i}.png")
            expected[f"{i}.png"] = SIDE * SIDE
    if asked["cut"]:
        for file in sorted((folder / "images").glob("*.npz"))[-2:]:
            file.write_bytes(file.read_bytes()[:300])
    return expected


@pytest.mark.parametrize("seed", range(3))
def test_what_is_asked_for_is_given_or_said_or_refused(patched, pictures, caplog, seed):
    from kohya_bucket.trainers import sdscripts

    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    draw, given = random.Random(seed), 0
    areas = [width * height for _, _, _, width, height in boxes()]
    for number in range(4):
        asked, folder = drawn(draw), pictures(number)
        if asked["alone_before"]:  # sd-scripts without this package was here first
            sdscripts.uninstall()
            run(patched, folder, asked | {"skip": False}, strategy_only=True)
            sdscripts.install()
        expected = {}
        for again in (False, True):
            ranks._told.clear()
            caplog.clear()
            try:
                white = run(patched, folder, asked)
            except SystemExit as refused:
                why = str(refused)
                named = ["focus" in why and asked["focus"], "latent_cache" in why and asked["shards"]]
                assert any(named), (asked, why)
                break
            said = caplog.text
            unchecked = asked["skip"] and asked["to_disk"]
            assert unchecked == ("--skip_cache_check" in said), asked
            unknown = asked["to_disk"] and asked["ending"] != "_sd.npz"
            assert unknown == ("kohya_bucket does not know" in said), asked
            there = (folder / "store" / "store.json").is_file()
            assert there == (asked["shards"] and asked["to_disk"]), asked
            assert (asked["shards"] and not there) == ("latent_cache = 'shards' is set, but" in said), asked
            if not unchecked:
                whole = {f"{i}.png": areas[i] if asked["focus"] else middle(i) for i in range(COUNT)} | expected
                assert white == whole, asked
                given += 1
            expected = {} if again else damage(folder, asked)
    assert given
