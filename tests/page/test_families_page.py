"""The configs in docs/configs.md and docs/musubi.md are planned as they stand, and their values are the code's."""

import json
import re
from pathlib import Path

import pytest

from kohya_bucket.buckets.families import FAMILIES, family_named
from kohya_bucket.latents.token_grids import TOKEN_GRIDS
from kohya_bucket.trainers.sdscripts.families import trainer_named
from tests.clip_files import make_clip
from tests.pictures import make_pictures

DOCS = Path(__file__).parents[2] / "docs"
PAGE, MUSUBI = ((DOCS / page).read_text(encoding="utf-8") for page in ("configs.md", "musubi.md"))
CONFIGS = dict(re.findall(r"<!-- config: (\S+) -->\n```toml\n(.*?)```", PAGE + MUSUBI, re.DOTALL))
ROWS = [[cell.strip("` ") for cell in row.strip("| ").split(" | ")] for row in re.findall(r"^\| `[a-z].+$", PAGE, re.M)]
ROWS = {row[0]: row for row in ROWS if len(row) == 7}
KEYS = ("resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")


def config_for(arch: str) -> str:
    """The config to paste, with the values of a row of the table."""
    if arch in CONFIGS:
        return CONFIGS[arch]
    _, resolution, sides, step, _, model, _ = ROWS[arch]
    text = CONFIGS["sdxl"]
    for key, value in zip(KEYS, (resolution, *sides.split(" to "), step), strict=True):
        text, count = re.subn(rf"^{key} = \d+$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert count == 1
    return text if model == "none" else f'{text}\n[kohya_bucket]\nmodel = "{model}"\n'


@pytest.mark.parametrize("arch", [*ROWS, *sorted(set(CONFIGS) - set(ROWS))])
def test_every_config(arch, command_line, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_pictures(tmp_path / "path/to/images", [(96, 64), (80, 80), (64, 128)], caption="a picture")
    text = config_for(arch)
    if "video_directory" in text:
        pytest.importorskip("av")
        make_clip(tmp_path / "path/to/videos/a.mp4", 60, (96, 64), 24).with_suffix(".txt").write_text("a clip", "utf-8")
    Path("my.toml").write_text(text, encoding="utf-8")
    code, out, err = command_line("plan", "my.toml", "--arch", arch, "--gpus", "1,2", "--json")
    assert code == 0, out + err
    found = json.loads(out)
    # three images of three shapes fill no batch
    assert {one["code"] for one in found["findings"] if one["severity"] != "note"} <= {"short-batches"}
    planned = found["datasets"]
    assert planned[-1].get("images", planned[-1].get("items")) == 3


def test_the_table() -> None:
    assert len(ROWS) == len(FAMILIES)
    for arch, resolution, sides, step, accepted, model, tokens in ROWS.values():
        family = family_named(arch)
        limits = f"{family.min_size} to {family.max_size}"
        assert [resolution, sides, step] == [str(family.resolution), limits, str(family.reso_steps)]
        assert {int(n) for n in re.findall(r"\d+", accepted)} == set(trainer_named(arch).steps.values())
        assert tokens == ("none" if model == "none" else str(TOKEN_GRIDS[model].tokens([(1024, 1024)])[0]))
