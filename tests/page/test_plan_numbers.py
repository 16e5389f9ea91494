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
