"""The README's first screen: short, and what it says of models, trainers and measurements is what the package has."""

import re
from pathlib import Path

from kohya_bucket.latents.families import MODEL_FAMILIES
from kohya_bucket.trainers.musubi.families import architecture_named
from kohya_bucket.trainers.sdscripts.families import trainer_named

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def paragraph(start: str) -> str:
    (found,) = [" ".join(part.split()) for part in README.split("\n\n") if part.startswith(start)]
    return found


def test_it_is_short() -> None:
    assert len(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split()) <= 450


def test_the_models_are_those_that_arch_takes() -> None:
    own, musubi = paragraph("**Models**: ").removeprefix("**Models**: ").split("; with musubi-tuner ")
    titles = {trainer_named(name).title.removesuffix(" trainers") for name in own.split(", ")}
    assert titles == {family.title for family in MODEL_FAMILIES.values()}
    named = musubi.partition(" and [others]")[0].split(", ")
    assert len({architecture_named(name).name for name in named}) == len(named) >= 6


def test_the_trainers_are_those_that_were_run() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    line = paragraph("**Trainers** that were run")
    for trainer in ("sd-scripts", "musubi-tuner"):
        first, last = re.search(rf"{trainer} (\S+) to ([\w.]+)", line).groups()
        run = re.findall(rf"^\| {trainer} \| (\S+) \|", page, re.MULTILINE)
        run = [version for version in run if "fork" not in version and "by-hand" not in version]
        assert (first, last) == (run[0], run[-1])
    for commit in re.findall(r"(?:ai-toolkit|anima_lora) (\w+)", line):
        assert commit in page


def test_what_is_missed_is_what_was_measured() -> None:
    text = (ROOT / "benchmarks" / "results" / "epochs.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| 41 ")]
    (workers,) = [row[5] for row in rows if row[1:5] == ["1", "8", "yes", "sd-scripts"]]
    runs = re.search(r"over (\d+) runs", text)[1]
    assert f"miss {workers} per epoch, in {runs} runs |" in README
    several = [row for row in rows if row[1] == "2" and row[4] == "sd-scripts"]

    def span(cells: list[str]) -> str:
        numbers = [int(n) for cell in cells for n in re.findall(r"\d+", cell)]
        return f"{min(numbers)} to {max(numbers)}"

    assert f"2 ranks without `--seed` miss {span([row[5] for row in several if row[3] == 'no'])} of 41 " in README
    assert f"2 ranks train different shapes in {span([row[7] for row in several])} steps per epoch" in README


def test_its_pictures_are_there() -> None:
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"|!\[[^]]*\]\(([^)]+)\)', README)
    assert len(pictures) == 5
    for pair in pictures:
        assert (ROOT / "".join(pair)).stat().st_size < 1_000_000
