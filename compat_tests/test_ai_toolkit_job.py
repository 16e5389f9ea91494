"""Whole jobs of ai-toolkit's own `run.py`, with and without the plan: every batch that is trained is written down.

Set AI_TOOLKIT_DIR to a checkout; its job, loader, training loop and checkpoints run unmodified, with a tiny model.
"""

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from activated_env import LORA_SCRIPTS_NEXT, environment
from activated_env import command as activated
from PIL import Image
from rank_processes import run_ranks
from safetensors.numpy import load_file, save_file

from kohya_bucket.trainers.ai_toolkit.config import read_job
from kohya_bucket.trainers.ai_toolkit.plan import overview

CHECKOUT = os.environ["AI_TOOLKIT_DIR"]
SCRIPT = Path(__file__).with_name("ai_toolkit_job.py")
COUNT, BATCH = 37, 4
NAMES = [f"{i:02d}.png" for i in range(COUNT)]


@pytest.fixture(scope="module", autouse=True)
def needs_diffusers():
    pytest.importorskip("diffusers", minversion="0.40", reason="a whole job needs diffusers 0.40")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Most in three sizes, some in sizes of their own."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    usual = [(96, 64), (64, 96), (80, 80)]
    for i, name in enumerate(NAMES):
        size = usual[i % 3] if i < 32 else (64 + 16 * (i - 31), 128)
        Image.fromarray(rng.integers(0, 255, (*size[::-1], 3), dtype=np.uint8)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text("a", encoding="utf-8")
    return folder


def job(folder, pictures, steps, table=None, **data):
    """A job in a file."""
    dataset = {"folder_path": str(pictures), "caption_ext": "txt", "resolution": 96, "num_workers": 0, **data}
    train = {"batch_size": BATCH, "steps": steps, "noise_scheduler": "flowmatch", "optimizer": "adamw", "lr": 1e-3,
             "dtype": "float32", "disable_sampling": True, "train_text_encoder": False}  # fmt: skip
    process = {
        "type": "sd_trainer", "training_folder": str(folder / "trained"), "device": "cpu", "train": train,
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4}, "save": {"dtype": "float32", "save_every": 7},
        "datasets": [dataset],
        "model": {"name_or_path": "x", "arch": "tiny", "te_dtype": "float32", "vae_dtype": "float32"},
    }  # fmt: skip
    config = {"name": "tiny", "process": [process]} | ({"kohya_bucket": table} if table else {})
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / "job.json"
    file.write_text(json.dumps({"job": "extension", "config": config}), encoding="utf-8")
    return file


def run(file, ranks=1, plan=True, code=0, dies_at=0, python=sys.executable, **told):
    """(what each rank trained, what was said)."""
    out = file.parent / "rows"
    out.mkdir(exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    command = [python, *(["-m", "kohya_bucket.launch"] if plan else []), str(SCRIPT), str(out), str(file)]
    codes, texts = run_ranks(command, ranks, out, CHECKOUT, {"SEED": "7", "DIES_AT": str(dies_at), **told})
    said = "\n".join(texts)
    assert codes == [code] * ranks, said[-3000:]
    return [[row["keys"] for row in rows(file, rank)] for rank in range(ranks)], said


def rows(file, rank=0):
    """Of each batch that the last run of a job trained there: the images, and the mean of each one's latents."""
    log = file.parent / "rows" / f"rank{rank}.jsonl"
    return [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []


def trained(batches):
    return Counter(key for batch in batches for key in batch)


def test_alone_it_repeats_images(pictures, tmp_path):
    file = job(tmp_path, pictures, 1)
    steps = overview(read_job(file), [1]).gpus[0].steps
    (rows,), _ = run(job(tmp_path, pictures, steps), plan=False)
    assert max(trained(rows).values()) > 1


@pytest.mark.parametrize("cached", [False, True])
def test_every_image_once(pictures, tmp_path, cached):
    copy = tmp_path / "pictures"  # its caches lie beside the images
    shutil.copytree(pictures, copy)
    file = job(tmp_path, copy, 1, cache_latents_to_disk=cached)
    steps = overview(read_job(file), [1]).gpus[0].steps
    (rows,), said = run(job(tmp_path, copy, 2 * steps, cache_latents_to_disk=cached))
    for epoch in (rows[:steps], rows[steps:]):
        assert trained(epoch) == Counter(NAMES)
    assert rows[:steps] != rows[steps:]
    assert "epoch 1: 37 images, 0 missed, 0 repeated" in said
    latents = sorted(copy.glob("_latent_cache/*"))
    assert len(latents) == (COUNT if cached else 0)
    for file in latents[:2]:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    _, said = run(job(tmp_path / "again", copy, 1, cache_latents_to_disk=cached))
    assert ("what was cached of 2 items was made of other files" in said) == cached
    assert len(list(copy.glob("_latent_cache/*"))) == (COUNT + 2 if cached else 0)


def test_one_resolution_after_another(pictures, tmp_path):
    table = {"resolution_mode": "schedule", "resolution_epochs": [1]}
    rows = overview(read_job(job(tmp_path, pictures, 1, table, resolution=[64, 96])), [1]).gpus
    steps = rows[0].steps
    assert [(row.epochs, row.steps, row.samples) for row in rows] == [("1", steps, COUNT), ("from 2", steps, COUNT)]
    (batches,), _ = run(job(tmp_path, pictures, 2 * steps, table, resolution=[64, 96]))
    assert [trained(batches[:steps]), trained(batches[steps:])] == [Counter(NAMES)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_goes_on_with_the_next_image(pictures, tmp_path, ranks):
    whole, _ = run(job(tmp_path / "whole", pictures, 24), ranks)
    file = job(tmp_path / "cut", pictures, 24)
    before, _ = run(file, ranks, dies_at=16, code=9)
    after, said = run(file, ranks)
    # It saves behind the batch of step 14, the fifteenth, and counts that step again.
    assert [first[:15] + rest[:-1] for first, rest in zip(before, after, strict=True)] == whole
    assert "going on with batch" in said


def plain_pictures(folder, greys):
    """Pictures of one grey each, by name."""
    folder.mkdir()
    for name, grey in greys.items():
        Image.new("RGB", (64, 64), (grey,) * 3).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("a", encoding="utf-8")
    return folder


def trained_greys(file):
    """By image, the grey that its latents are of."""
    return {
        key.removesuffix(".png"): round((mean + 1) * 127.5)
        for row in rows(file) for key, mean in zip(row["keys"], row["means"], strict=True)
    }  # fmt: skip


@pytest.mark.parametrize("plan", [False, True], ids=["by its own caching", "behind the door"])
def test_no_image_is_trained_as_another(tmp_path, plan):
    """One is deleted and the rest are renumbered, two exchange names, an older one is put in the place of the last."""
    folder = plain_pictures(tmp_path / "pictures", {"1": 20, "2": 60, "3": 100, "4": 140, "5": 180, "6": 200, "7": 220})
    file = job(tmp_path, folder, 3, cache_latents_to_disk=True)
    run(file, plan=plan)
    (folder / "1.png").unlink()
    for i in range(2, 6):
        (folder / f"{i}.png").rename(folder / f"{i - 1}.png")
    for source, target in (("6", "kept"), ("7", "6"), ("kept", "7")):
        (folder / f"{source}.png").rename(folder / f"{target}.png")
    Image.new("RGB", (64, 64), (240, 240, 240)).save(folder / "5.png")
    os.utime(folder / "5.png", (1e9, 1e9))
    shutil.rmtree(tmp_path / "trained")
    expected = {"1": 60, "2": 100, "3": 140, "4": 180, "5": 240, "6": 220, "7": 200}
    _, said = run(file)
    assert trained_greys(file) == expected
    assert "what was cached of 7 items was made of other files" in said
    shutil.rmtree(tmp_path / "trained")
    _, said = run(file)
    assert trained_greys(file) == expected
    assert "what was cached of" not in said


@pytest.mark.parametrize("cache", ["cache_latents_to_disk", "cache_latents"])
def test_latents_that_are_not_finite_are_left_out(tmp_path, cache):
    greys = {"1": 20, "2": 255, "3": 100, "4": 140}
    folder = plain_pictures(tmp_path / "pictures", greys)
    file = job(tmp_path, folder, 2, **{cache: True})
    _, said = run(file, WHITE_IS_NAN="1")
    assert trained_greys(file) == {name: grey for name, grey in greys.items() if grey != 255}
    assert "1 item left out: 2.png: its latent is not finite (NaN or infinity)" in said
    assert not list(folder.glob("_latent_cache/2_*"))
    all_white = plain_pictures(tmp_path / "all", {"1": 255})
    _, said = run(job(tmp_path / "white", all_white, 2, **{cache: True}), code=2, WHITE_IS_NAN="1")
    assert "nothing can be trained: 1.png: its latent is not finite" in said


def test_embeddings_that_are_not_finite_are_made_again(tmp_path):
    folder = plain_pictures(tmp_path / "pictures", {"1": 20, "2": 100})
    file = job(tmp_path, folder, 2, cache_text_embeddings=True)
    run(file, plan=False)
    names = sorted(folder.glob("_t_e_cache/*"))
    assert len(names) == 2
    tensors = load_file(names[0])
    next(iter(tensors.values()))[-1, -1] = np.nan
    save_file(tensors, names[0], {"class_name": "AdvancedPromptEmbeds"})
    shutil.rmtree(tmp_path / "trained")
    _, said = run(file)
    assert "what was cached of 1 item was made of other files" in said
    assert len(list(folder.glob("_t_e_cache/*"))) == 3
    shutil.rmtree(tmp_path / "trained")
    assert "what was cached of" not in run(file)[1]


def test_processes_share_the_images(pictures, tmp_path):
    file = job(tmp_path, pictures, 1)
    steps = overview(read_job(file), [2]).gpus[0].steps
    rows, _ = run(job(tmp_path, pictures, steps), ranks=2)
    assert [len(one) for one in rows] == [steps, steps]
    seen = trained(rows[0] + rows[1])
    assert set(seen) == set(NAMES)
    assert sum(seen.values()) - COUNT == overview(read_job(file), [2]).gpus[0].repeated


@pytest.mark.parametrize("told", [{}, LORA_SCRIPTS_NEXT | {"PYTHONPATH": CHECKOUT}], ids=["its own", "next"])
def test_a_page_would_start_it_like_this(pictures, tmp_path, told):
    """Without the launcher, by a Python that is activated."""
    python = environment(tmp_path / "env")
    assert activated(python, "activate")[0] == 0
    table = {"remainder": "merge", "merge_max_crop": 0.6}
    file = job(tmp_path, pictures, 1, table)
    steps = overview(read_job(file), [1]).gpus[0].steps
    assert steps < overview(read_job(job(tmp_path / "other", pictures, 1)), [1]).gpus[0].steps
    (rows,), said = run(job(tmp_path, pictures, steps, table), plan=False, python=python, **told)
    assert trained(rows) == Counter(NAMES), said[-2000:]
