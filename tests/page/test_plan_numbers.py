"""The numbers of plans in the pages are those of plans."""

import re
from pathlib import Path

from kohya_bucket import plan_epoch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
IDS, SIZES = [0] * 1004 + [1] * 196 + [2] * 3, [(512, 512), (576, 448), (640, 384)]


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of each row of a page's tables whose first cell matches `first`."""
    lines = re.findall(rf"^\| ({first}) \|(.*) \|$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return [[head, *(cell.strip().replace("`", "") for cell in rest.split("|"))] for head, rest in lines]


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
    for remainder, steps, trained, _, ledger in table:
        plan = plan_epoch(IDS, 8, bucket_sizes=SIZES, remainder=remainder.strip("`"))
        assert [steps, trained, f"1,203 images, {ledger}"] == [str(plan.steps), f"{plan.samples:,}", str(plan.ledger())]


def test_the_tutorial_for_several_gpus(command_line, tmp_path, monkeypatch) -> None:
    text = (DOCS / "tutorial-gpus.md").read_text(encoding="utf-8")
    batches = re.search(r"num batches per epoch .*: (\d+)", text)[1]
    images, missed, repeated = re.search(r"epoch 1: (\d+) images, (\d+) missed, (\d+) repeated", text).groups()
    config = tmp_path / "c.toml"
    monkeypatch.chdir(ROOT)
    subset = "[[datasets.subsets]]\nimage_dir = 'configs/demo_images'\n"
    config.write_text("[[datasets]]\nresolution = 128\nbatch_size = 2\nenable_bucket = true\nmin_bucket_reso = 64\n"
                      f"max_bucket_reso = 256\n{subset}", encoding="utf-8")  # fmt: skip
    _, out, _ = command_line("plan", config, "--gpus", 2)
    (row,) = [line.split() for line in out.splitlines() if re.match(r" +2 +\d", line)]
    assert row[:5] == ["2", batches, images, missed, repeated]
    steps, repeats = re.search(r"takes (\d+)\nsteps on 4 GPUs, with (\d+) repeats", text).groups()
    demo = Path("configs/demo.toml").read_text(encoding="utf-8")
    config.write_text(f'[kohya_bucket]\nstep_shapes = "one"\n{demo}', encoding="utf-8")
    _, out, _ = command_line("plan", config, "--gpus", 4)
    (row,) = [line.split() for line in out.splitlines() if re.match(r" +4 +\d", line)]
    assert (row[1], row[4]) == (steps, repeats)
