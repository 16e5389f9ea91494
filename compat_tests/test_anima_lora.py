"""Trainings of anima_lora's own `train.py`, with and without the plan: every batch is written down.

Set ANIMA_LORA_DIR to a checkout; its datasets, caches, loaders and training loop run unmodified, with a tiny model.
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
from renaming import unseen

from kohya_bucket.originals.loaders import run_loader

CHECKOUT = os.environ["ANIMA_LORA_DIR"]
SCRIPT = Path(__file__).with_name("anima_lora_training.py")
COUNT, BATCH = 37, 4
NAMES = [f"{i:02d}.png" for i in range(COUNT)]
ARGUMENTS = [
    "--seed", "7", "--output_name", "t", "--network_module", "networks.lora_anima", "--network_dim", "4",
    "--network_train_unet_only", "--use_text_cache", "--cache_llm_adapter_outputs", "--attn_mode", "torch",
    "--mixed_precision", "no", "--learning_rate", "1e-3", "--optimizer_type", "AdamW",
]  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Most in three sizes, some in sizes of their own."""
    usual = [(64, 96), (96, 64), (64, 64)]
    sizes = [usual[i % 3] if i < 32 else (48 + 16 * (i - 32), 80) for i in range(COUNT)]
    return make_pictures(tmp_path_factory.mktemp("pictures"), sizes)


def make_pictures(folder, sizes):
    """00.png and so on, with caches of made-up latents and texts."""
    import torch
    from safetensors.torch import save_file

    cache = folder / "cache"
    cache.mkdir()
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(sizes):
        file = folder / f"{i:02d}.png"
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file)
        file.with_suffix(".txt").write_text("a, b", encoding="utf-8")
        at = f"_{height // 8}x{width // 8}"
        latents = np.full((16, height // 8, width // 8), i, np.float32)
        arrays = {"latents": latents, "original_size": [width, height], "crop_ltrb": [0, 0, width, height]}
        np.savez(cache / f"{file.stem}_{width:04d}x{height:04d}_anima.npz", **{k + at: v for k, v in arrays.items()})
        texts = {"crossattn_emb": torch.zeros(8, 16), "t5_attn_mask": torch.ones(8, dtype=torch.long)}
        save_file(
            {**texts, "caption_dropout_rate": torch.tensor(0.0)}, str(cache / f"{file.stem}_anima_te.safetensors")
        )
    return folder


def config(folder, pictures, *subsets, table=None, **keys):
    """A dataset config; each subset may have keys of its own."""
    lines = ["[general]", 'caption_extension = ".txt"', "[[datasets]]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in {"batch_size": BATCH, **keys}.items()]
    for subset in subsets or ({},):
        own = {"image_dir": str(pictures), "cache_dir": str(pictures / "cache"), **subset}
        lines += ["[[datasets.subsets]]", *(f"{key} = {json.dumps(value)}" for key, value in own.items())]
    lines += ["[kohya_bucket]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())] if table else []
    file = folder / "data.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def run(
    out, *more, ranks=1, code=0, plan=True, epochs=2, dies=False, cached=True, python=sys.executable, **environment
):
    """(what each rank trained, what was said)."""
    (out / "saved").mkdir(exist_ok=True, parents=True)
    for log in out.glob("rank*.jsonl"):
        log.unlink()
    (out / "dies").unlink(missing_ok=True)
    if dies:
        (out / "dies").touch()
    command = [python, *(["-m", "kohya_bucket.launch"] if plan else []), str(SCRIPT), str(out), *ARGUMENTS]
    command += ["--output_dir", str(out / "saved"), "--max_train_epochs", str(epochs), *more]
    command += ["--use_vae_cache" if cached else "--no-use_vae_cache"]
    own = {"TORCH_COMPILE_DISABLE": "1", "COLUMNS": "2000", **environment}
    codes, said = run_ranks(command, ranks, out, out, own)
    assert codes[: 1 if dies else ranks] == [code] * (1 if dies else ranks), said[0][-3000:]
    logs = [out / f"rank{rank}.jsonl" for rank in range(ranks)]
    rows = [[json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.is_file() else [] for log in logs]
    return rows, " ".join(" ".join(said).split())


def trained(rows):
    return Counter(key for row in rows for key in row["keys"])


def epochs_of(rows, epochs=2):
    length = len(rows) // epochs
    assert len(rows) == epochs * length
    return [rows[k * length : (k + 1) * length] for k in range(epochs)]


def test_alone_it_leaves_images_out(pictures, tmp_path):
    (rows,), _ = run(tmp_path, "--dataset_config", str(config(tmp_path, pictures)), plan=False)
    seen = trained(rows)
    ids = [i % 3 if i < 32 else i for i in range(COUNT)]
    shown = run_loader("anima_lora", ids, np.ones(COUNT), BATCH, epochs=2)
    assert len(rows) == 2 * shown.steps
    assert sum(seen.values()) == 2 * shown.steps * BATCH
    assert not set(NAMES[32:]) & set(seen)  # of a size of their own: never
    assert shown.never >= COUNT - 32


@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_once(pictures, tmp_path, workers):
    more = ["--dataset_config", str(config(tmp_path, pictures)), "--max_data_loader_n_workers", str(workers)]
    (rows,), said = run(tmp_path, *more)
    epochs = epochs_of(rows)
    for epoch in epochs:
        assert trained(epoch) == Counter(NAMES)
        costs = [row["shape"][0] * row["shape"][-1] * row["shape"][-2] for row in epoch]
        shapes = list(dict.fromkeys(tuple(row["shape"][-2:]) for row in epoch))
        assert len({tuple(row["shape"][-2:]) for row in epoch[: len(shapes)]}) == len(shapes)  # one of each, first
        assert costs[0] == max(costs)
    assert epochs[0] != epochs[1]
    assert "epoch 1: 37 images, 0 missed, 0 repeated" in said
    assert "37 images in 8 buckets" in said


def test_workers_change_nothing(pictures, tmp_path):
    file = str(config(tmp_path, pictures, {"flip_aug": True}))
    more = ["--dataset_config", file]
    found = [
        run(tmp_path / str(n), *more, "--max_data_loader_n_workers", str(n), cached=False)[0][0] for n in (0, 2)
    ]  # fmt: skip
    assert found[0] == found[1]
    assert {flip for row in found[0] for flip in row["flips"]} == {True, False}


def test_ranks_share_the_images_and_the_shapes(pictures, tmp_path):
    file = config(tmp_path, pictures, table={"step_shapes": "one"})
    rows, said = run(tmp_path, "--dataset_config", str(file), ranks=2)
    assert len(rows[0]) == len(rows[1])
    assert all(a["shape"][-2:] == b["shape"][-2:] for a, b in zip(*rows, strict=True))
    for epoch in zip(*map(epochs_of, rows), strict=True):
        seen = sum((trained(part) for part in epoch), Counter())
        assert set(seen) == set(NAMES)
        assert sum(seen.values()) == COUNT + 5  # each of the five that fill no step is trained by both
    assert "5 repeated" in said


def test_repeats_and_a_batch_larger_than_any_bucket(pictures, tmp_path):
    file = config(tmp_path, pictures, {"num_repeats": 3}, batch_size=50)
    (rows,), _ = run(tmp_path, "--dataset_config", str(file), epochs=1)
    assert trained(rows) == Counter(NAMES * 3)
    for row in rows:  # an image that is trained three times is in three batches or comes back as late as can be
        assert len(row["keys"]) <= 50


def test_compiled_trainings_have_full_batches(pictures, tmp_path):
    (rows,), said = run(tmp_path, "--dataset_config", str(config(tmp_path, pictures)), "--torch_compile")
    assert {len(row["keys"]) for row in rows} == {BATCH}
    for epoch in epochs_of(rows):
        assert set(trained(epoch)) == set(NAMES)
    assert "remainder = 'pad'" in said
    file = config(tmp_path, pictures, table={"remainder": "keep"})
    (rows,), _ = run(tmp_path, "--dataset_config", str(file), "--torch_compile")
    assert trained(rows) == Counter(NAMES * 2)


def test_merged_images_need_their_pixels(pictures, tmp_path):
    table = {"remainder": "merge", "merge_max_crop": 0.5}
    more = ["--dataset_config", str(config(tmp_path, pictures, table=table))]
    _, said = run(tmp_path, *more, code=2)
    assert "cache keeps one size of each: use 'keep', 'pad' or 'drop', or train without use_vae_cache" in said
    (rows,), _ = run(tmp_path, *more, cached=False)
    for epoch in epochs_of(rows):
        assert trained(epoch) == Counter(NAMES)
        assert len(epoch) < len(NAMES[32:]) + 32 // BATCH + 2  # fewer than with a batch for each odd one


def test_table_in_another_config_file(pictures, tmp_path):
    file, base = config(tmp_path, pictures), tmp_path / "run.toml"
    base.write_text("[kohya_bucket]\nremainder = 'drop'\nsmall_buckets = 'drop'\n", encoding="utf-8")
    (rows,), _ = run(tmp_path, "--dataset_config", str(file), "--config_file", str(base), epochs=1)
    assert {len(row["keys"]) for row in rows} == {BATCH}
    _, said = run(tmp_path, "--dataset_config", str(config(tmp_path, pictures, table={"resolutions": [64]})), code=2)
    assert "images are placed, cut and cached by anima_lora itself" in said


@pytest.mark.parametrize(("accumulate", "ranks"), [(1, 1), (2, 1), (1, 2)])
def test_resumed_run_goes_on_with_the_next_image(pictures, tmp_path, accumulate, ranks):
    more = ["--dataset_config", str(config(tmp_path, pictures)), "--gradient_accumulation_steps", str(accumulate)]
    whole, _ = run(tmp_path / "whole", *more, ranks=ranks)
    saving = [*more, "--save_state", "--save_every_n_steps", "5"]
    before, _ = run(tmp_path / "cut", *saving, ranks=ranks, code=9, dies=True)
    (state,) = (tmp_path / "cut" / "saved").glob("**/*-state")
    after, said = run(tmp_path / "cut", *more, "--resume", str(state), ranks=ranks)
    assert len(before[0]) == 5 * accumulate
    assert "going on after update 5" in said
    assert [a[: 5 * accumulate] + b for a, b in zip(before, after, strict=True)] == whole
    updates = -(-len(whole[0]) // 2 // accumulate) * 2
    assert f"{updates - 5}/{updates - 5}" in said  # its own progress bar counts what is left


def test_unreadable_cache_is_left_out(pictures, tmp_path):
    copy = tmp_path / "pictures"
    shutil.copytree(pictures, copy)
    (broken,) = (copy / "cache").glob("05_*.npz")
    broken.write_bytes(broken.read_bytes()[:200])
    file = config(tmp_path, copy)
    (rows,), said = run(tmp_path / "out", "--dataset_config", str(file), "--skip_cache_check", epochs=1)
    seen = trained(rows)
    assert set(seen) == {*NAMES} - {NAMES[5]}
    assert sum(seen.values()) == COUNT
    assert "05.png is left out" in said


def test_activated_environment_needs_neither(pictures, tmp_path):
    python = environment(tmp_path / "env")
    assert activated(python, "activate")[0] == 0
    file = config(tmp_path, pictures)
    (rows,), said = run(tmp_path / "out", "--dataset_config", str(file), plan=False, python=python)
    assert trained(rows) == Counter(NAMES * 2)
    assert "is active" in said


def test_a_set_of_many_small_buckets_as_lora_scripts_next_trains_it(tmp_path):
    """Its issue 338: of 84 images in 42 buckets, 24 were trained, of the four buckets that fill a batch."""
    counts = [7, 13, 5, 4, *[2] * 17, *[1] * 21]
    sizes = [(48 + 16 * (k % 7), 48 + 16 * (k // 7)) for k, count in enumerate(counts) for _ in range(count)]
    (tmp_path / "pictures").mkdir()
    pictures = make_pictures(tmp_path / "pictures", sizes)
    file = ["--dataset_config", str(config(tmp_path, pictures))]
    assert len(sizes) == 84
    python = environment(tmp_path / "env")
    given = {"plan": False, "epochs": 1, "python": python, **LORA_SCRIPTS_NEXT}
    (rows,), _ = run(tmp_path / "alone", *file, **given)
    assert (len(rows), sum(trained(rows).values())) == (6, 24)
    assert len(trained(rows)) <= 24  # some of them twice, from workers with orders of their own
    assert activated(python, "activate")[0] == 0
    (rows,), said = run(tmp_path / "planned", *file, **given)
    assert trained(rows) == Counter(f"{i:02d}.png" for i in range(84))
    assert "epoch 1: 84 images, 0 missed" in said
    assert len(rows) == sum(-(-count // BATCH) for count in counts) == 47


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each change is tried in a fork")
def test_nothing_can_change_unseen(tmp_path):
    """Each name that the adapter relies on, renamed in a copy of the checkout, and each parameter more, is noticed."""
    tried, missed = unseen("anima_lora", Path(CHECKOUT), tmp_path)
    assert tried > 30
    assert missed == []
