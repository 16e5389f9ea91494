"""The numbers of plans in the pages are those of plans."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket import plan_epoch
from tests.pictures import png_header

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
IDS, SIZES = [0] * 1004 + [1] * 196 + [2] * 3, [(512, 512), (576, 448), (640, 384)]


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of each row of a page's tables whose first cell matches `first`."""
    lines = re.findall(rf"^\| ({first}) \|(.*) \|$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return [[head, *(cell.strip().replace("`", "") for cell in rest.split("|"))] for head, rest in lines]


def pictures_of_the_rules_page() -> list[list[int]]:
    (block,) = re.findall(r"(>>> rng = .*?)>>> kohya = ", (DOCS / "rules.md").read_text(encoding="utf-8"), re.DOTALL)
    names = {"np": np}
    exec(block.replace(">>> ", ""), names)
    return names["sizes"].tolist()


def test_ranks() -> None:
    table = rows("planning.md", r"\d x \d")
    assert len(table) == 6
    for ranks, shapes, *shown in table:
        world, batch = map(int, ranks.split(" x "))
        plan = plan_epoch(IDS, batch, world_size=world, bucket_sizes=SIZES, step_shapes=shapes)
        assert shown == [str(plan.steps), f"{plan.samples:,}", str(plan.ledger())]


def test_remainders() -> None:
    table = rows("planning.md", "`(?:keep|pad|drop|merge|catch_all)`")
    assert len(table) == 5
    for remainder, steps, trained, not_full, ledger in table:
        plan = plan_epoch(IDS, 8, bucket_sizes=SIZES, remainder=remainder.strip("`"))
        assert [steps, trained, f"1,203 images, {ledger}"] == [str(plan.steps), f"{plan.samples:,}", str(plan.ledger())]
        assert int(not_full) == sum(len(plan.indices(step, 0)) < 8 for step in range(plan.steps))


def test_one_shape_a_step(command_line, tmp_path, monkeypatch) -> None:
    text = " ".join((DOCS / "planning.md").read_text(encoding="utf-8").split())
    steps, repeats = re.search(r"takes (\d+) steps on 4 GPUs, with (\d+) repeats", text).groups()
    monkeypatch.chdir(ROOT)
    config = tmp_path / "c.toml"
    demo = Path("configs/demo.toml").read_text(encoding="utf-8")
    config.write_text(f'[kohya_bucket]\nstep_shapes = "one"\n{demo}', encoding="utf-8")
    _, out, _ = command_line("plan", config, "--gpus", 4)
    (row,) = [line.split() for line in out.splitlines() if re.match(r" +4 +\d", line)]
    assert (row[1], row[4]) == (steps, repeats)


def test_jobs_of_ai_toolkit(command_line, tmp_path) -> None:
    """The 200 pictures of docs/rules.md in the buckets of the model that the table names."""
    pytest.importorskip("yaml")
    page = (DOCS / "ai-toolkit.md").read_text(encoding="utf-8")
    (arch,) = re.findall(r"at 1024, `arch: (\w+)` \|", page)
    folder = tmp_path / "images"
    folder.mkdir()
    for i, (width, height) in enumerate(pictures_of_the_rules_page()):
        (folder / f"{i}.png").write_bytes(png_header(width, height))
        (folder / f"{i}.txt").write_text("a picture", encoding="utf-8")
    table = rows("ai-toolkit.md", r"batch of \d")
    assert len(table) == 3
    for head, alone, kept, merged in table:
        size = int(head.split()[-1])
        steps = []
        for remainder in ("keep", "merge"):
            process = {
                "type": "sd_trainer",
                "datasets": [{"folder_path": str(folder), "caption_ext": "txt", "resolution": [1024]}],
                "train": {"batch_size": size, "steps": 1},
                "model": {"name_or_path": "x", "arch": arch},
            }
            config = {"name": "one", "kohya_bucket": {"remainder": remainder}, "process": [process]}
            job = tmp_path / "job.json"
            job.write_text(json.dumps({"job": "extension", "config": config}), encoding="utf-8")
            code, out, err = command_line("plan", job, "--gpus", 1, "--json")
            assert code == 0, err
            (row,) = json.loads(out)["gpus"]
            steps.append(row["steps"])
        repeats = 1 - 200 / (steps[0] * size)  # it fills each last batch with images of its bucket
        wanted = [f"{steps[0]} steps, {repeats:.0%} of the slots are repeats", f"{steps[0]}, none", str(steps[1])]
        assert [alone.replace(" %", "%"), kept, merged] == wanted


def test_how_many_epochs_the_steps_of_a_preset_are(command_line, tmp_path) -> None:
    page = (DOCS / "gui.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^1 epoch = \d+ steps; max_train_steps (?:\d+) ends in epoch \d+$", page, re.MULTILINE)
    preset = {
        "train_data_dir": str(tmp_path), "max_resolution": "512,512", "enable_bucket": True, "train_batch_size": 2,
        "max_train_steps": int(re.search(r"max_train_steps (\d+)", shown)[1]),
    }  # fmt: skip
    shutil.copytree(ROOT / "configs" / "demo_images", tmp_path / "1_demo")
    file = tmp_path / "my.json"
    file.write_text(json.dumps(preset), encoding="utf-8")
    assert shown in command_line("plan", file)[1].splitlines()
