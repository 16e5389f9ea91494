"""docs/families.md: its configs train as they stand, and its table is what the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kohya_bucket.buckets.families import family_named
from kohya_bucket.latents.token_grids import TOKEN_GRIDS
from kohya_bucket.trainers.sdscripts.families import trainer_named
from tests.clip_files import make_clip
from tests.pictures import make_pictures

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
CONFIGS = dict(re.findall(r"<!-- config: (\S+) -->\n```toml\n(.*?)```", PAGE, re.DOTALL))
ROWS = [[cell.strip("` ") for cell in row.strip("| ").split(" | ")] for row in re.findall(r"^\| `[a-z].+$", PAGE, re.M)]


@pytest.mark.parametrize("arch", CONFIGS)
def test_every_config(arch, command_line, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_pictures(tmp_path / "path/to/images", [(96, 64), (80, 80), (64, 128)], caption="a picture")
    if "video_directory" in CONFIGS[arch]:
        pytest.importorskip("av")
        make_clip(tmp_path / "path/to/videos/a.mp4", 60, (96, 64), 24).with_suffix(".txt").write_text("a clip", "utf-8")
    Path("my.toml").write_text(CONFIGS[arch], encoding="utf-8")
    code, out, err = command_line("plan", "my.toml", "--arch", arch, "--gpus", "1,2", "--strict", "--json")
    assert code == 0, out + err
    planned = json.loads(out)["datasets"]
    assert planned[-1].get("images", planned[-1].get("items")) == 3
    if arch in (row[0] for row in ROWS):
        family = family_named(arch)
        keys = re.findall(
            r"^(resolution|min_bucket_reso|max_bucket_reso|bucket_reso_steps) = (\d+)$", CONFIGS[arch], re.M
        )
        assert [int(value) for _, value in keys] == [
            family.resolution, family.min_size, family.max_size, family.reso_steps
        ]  # fmt: skip


def test_the_table() -> None:
    assert {row[0] for row in ROWS} < set(CONFIGS)
    for arch, resolution, sides, step, accepted, model, tokens in ROWS:
        family = family_named(arch)
        limits = f"{family.min_size} to {family.max_size}"
        assert [resolution, sides, step] == [str(family.resolution), limits, str(family.reso_steps)]
        assert {int(n) for n in re.findall(r"\d+", accepted)} == set(trainer_named(arch).steps.values())
        assert model == "none" or f'\nmodel = "{model}"' in CONFIGS[arch]
        assert tokens == ("none" if model == "none" else str(TOKEN_GRIDS[model].tokens([(1024, 1024)])[0]))
