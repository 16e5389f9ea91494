"""Crops that keep a marked rectangle, in sd-scripts' own datasets and trainings: seen in the pixels that are trained.

Every picture is black with a white rectangle and needs no resize, so a crop's mean tells to the pixel how much of the
rectangle is in it, whether pixels are trained or latents that are means of pixels.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sdscripts_support import MeanVAE, build_groups, cache_latents
from test_sdscripts_masks import batches
from training_runs import train, write_config

COUNT, SIDE = 40, 128
KEYS = {"resolution": SIDE, "enable_bucket": True, "min_bucket_reso": SIDE, "max_bucket_reso": SIDE}


def boxes():
    """(size, left, top, width, height) of each picture and its rectangle."""
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        long, width, height = int(rng.integers(200, 400)), int(rng.integers(20, 100)), int(rng.integers(20, 100))
        size = (SIDE, long) if i % 2 else (long, SIDE)
        yield size, int(rng.integers(0, size[0] - width)), int(rng.integers(0, size[1] - height)), width, height


def write(folder, moved=()):
    """The pictures, and their focus file; a rectangle of `moved` is at the other end of its picture."""
    (folder / "images").mkdir(exist_ok=True)
    lines, areas = [], {}
    for i, (size, left, top, width, height) in enumerate(boxes()):
        path = folder / "images" / f"{i}.png"
        pixels = np.zeros((size[1], size[0], 4), dtype=np.uint8)
        pixels[top : top + height, left : left + width] = 255
        if not path.exists():
            Image.fromarray(pixels).save(path)
            path.with_suffix(".txt").write_text(f"number {i}, thing", encoding="utf-8")
        x = size[0] - left - width if i in moved else left
        y = size[1] - top - height if i in moved else top
        focus = x / size[0], y / size[1], (x + width) / size[0], (y + height) / size[1]
        lines.append(json.dumps({"image": f"images/{path.name}", "focus": focus}))
        areas[f"number {i}"] = width * height
    (folder / "focus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return areas


def shown(means):
    """White pixels in a crop, from its mean."""
    return round((means + 1) / 2 * SIDE * SIDE, 2)


def middle(i):
    """White pixels in the middle crop of a picture."""
    size, left, top, width, height = list(boxes())[i]
    kept = [
        max(0, min(at + extent, (side - SIDE) // 2 + SIDE) - max(at, (side - SIDE) // 2))
        for at, extent, side in zip((left, top), (width, height), size, strict=True)
    ]
    return kept[0] * kept[1]


def test_the_middle_cuts_at_least_a_third_of_the_rectangles() -> None:
    cut = sum(middle(i) < width * height for i, (_, _, _, width, height) in enumerate(boxes()))
    assert cut >= COUNT / 3


def config(folder, subset, focus=True):
    table = {"kohya_bucket": {"focus": str(folder / "focus.jsonl")}} if focus else {}
    keys = {**KEYS, "batch_size": 2}
    return {"datasets": [{**keys, "subsets": [{"image_dir": str(folder / "images"), **subset}]}], **table}


def white(tensor):
    return shown(float(tensor[0].double().mean()))


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_masks_and_crop_conditioning(patched, tmp_path, workers):
    areas = write(tmp_path)
    subset = {"flip_aug": True, "alpha_mask": True, "caption_extension": ".txt"}
    group, _ = build_groups(patched, config(tmp_path, subset))
    seen = set()
    for batch in batches(patched, group, workers):
        for k, key in enumerate(batch["image_keys"]):
            i = int(Path(key).stem)
            assert white(batch["images"][k]) == areas[f"number {i}"]
            assert float(batch["alpha_masks"][k].sum()) == areas[f"number {i}"]
            size, left, top, width, height = list(boxes())[i]
            if middle(i) == areas[f"number {i}"]:
                continue  # not moved: the conditioning is sd-scripts' own
            row, column = batch["crop_top_lefts"][k].tolist()
            if batch["flippeds"][k]:
                column = size[0] - SIDE - column
            assert column <= left < left + width <= column + SIDE
            assert row <= top < top + height <= row + SIDE
            seen.add(i)
    assert len(seen) >= COUNT / 3


def test_control_images_are_cut_like_their_images(patched, tmp_path):
    """Or refused, where sd-scripts cuts them by code of its own."""
    areas = write(tmp_path)
    control = tmp_path / "control"
    control.mkdir()
    for path in (tmp_path / "images").glob("*.png"):
        Image.open(path).convert("RGB").save(control / path.name)
    subset = {"conditioning_data_dir": str(control), "caption_extension": ".txt"}
    cuts = patched.train_util.ControlNetDataset.__getitem__.__code__.co_names
    if "trim_and_resize_if_required" not in cuts:
        with pytest.raises(SystemExit, match="control images in the middle"):
            build_groups(patched, config(tmp_path, subset))
        return
    group, _ = build_groups(patched, config(tmp_path, subset))
    for batch in batches(patched, group):
        for picture, cond in zip(batch["images"], batch["conditioning_images"], strict=True):
            assert torch.equal(picture > 0, cond > 0.5)
        for picture, caption in zip(batch["images"], batch["captions"], strict=True):
            assert white(picture) == areas[caption.partition(",")[0]]


@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_a_moved_rectangle_is_encoded_anew_and_named(patched, tmp_path, kind, caplog):
    def cache(moved=()):
        areas = write(tmp_path, moved)
        user = config(tmp_path, {"flip_aug": True, "caption_extension": ".txt"})
        if kind == "shards":
            user["kohya_bucket"] |= {"latent_cache": kind, "latent_cache_dir": str(tmp_path / "store")}
        group, _ = build_groups(patched, user)
        encoder = MeanVAE()
        cache_latents(group, encoder)
        for batch in batches(patched, group):
            for key, latent in zip(batch["image_keys"], batch["latents"], strict=True):
                i = int(Path(key).stem)
                assert i in moved or white(latent) == pytest.approx(areas[f"number {i}"], abs=0.1)
        return encoder.encoded

    assert cache() == 2 * COUNT  # with the flipped ones
    assert cache() == 0
    far = [i for i, (_, _, _, width, height) in enumerate(boxes()) if middle(i) < width * height][:3]
    caplog.clear()
    assert cache(far) == 2 * len(far)
    told = "\n".join(record.getMessage() for record in caplog.records)
    for i in far:
        assert f"{i}.png: its focus moved" in told


def test_what_would_not_keep_it_is_refused_in_one_line(patched, tmp_path):
    write(tmp_path)
    with pytest.raises(SystemExit, match="random_crop"):
        build_groups(patched, config(tmp_path, {"random_crop": True, "caption_extension": ".txt"}))
    user = config(tmp_path, {"caption_extension": ".txt"})
    user["datasets"][0]["enable_bucket"] = False
    with pytest.raises(SystemExit, match="enable_bucket"):
        build_groups(patched, user)
    (tmp_path / "focus.jsonl").write_text('{"image": "a.png", "focus": [0, 0, 2, 1]}')
    with pytest.raises(SystemExit, match="line 1"):
        build_groups(patched, config(tmp_path, {"caption_extension": ".txt"}))


@pytest.mark.slow
@pytest.mark.training_run("with a rule or option of its own")
@pytest.mark.parametrize("caching", [[], ["--cache_latents"], ["--cache_latents", "--cache_latents_to_disk"]])
def test_trainings_hold_every_rectangle(sd_scripts_dir, unpatched, tmp_path, caching):
    if os.environ.get("SD_MODEL"):
        pytest.skip("what a real VAE encodes does not show the rectangles")
    areas = write(tmp_path)
    table = f"[kohya_bucket]\nfocus = '{tmp_path / 'focus.jsonl'}'"
    file = write_config(tmp_path, tmp_path / "images", table, **KEYS)
    options = ["--max_train_epochs", 1, *caching]
    if "--cache_latents_to_disk" in caching and not hasattr(unpatched.train_util.BaseDataset, "new_cache_latents"):
        run = train(sd_scripts_dir, file, *options, out=tmp_path / "out", models="mean")
        assert run.status
        assert "does not notice when it moves" in run.log
        return
    run = train(sd_scripts_dir, file, *options, out=tmp_path / "out", models="mean")
    run.assert_trained(len(run.batches))
    trained = {
        image: shown(mean) for (row,) in run.batches for image, mean in zip(row["images"], row["means"], strict=True)
    }
    assert trained == pytest.approx(areas, abs=2)  # latents may have been half precision
    if caching:
        return
    plain = train(
        sd_scripts_dir, write_config(tmp_path, tmp_path / "images", **KEYS), *options[:2], out=tmp_path / "plain",
        models="mean",
    )  # fmt: skip
    without = {
        image: shown(mean) for (row,) in plain.batches for image, mean in zip(row["images"], row["means"], strict=True)
    }
    assert sum(without[image] < areas[image] - 2 for image in areas) >= COUNT / 3
