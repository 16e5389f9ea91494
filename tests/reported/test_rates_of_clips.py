"""What people reported of clips."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clip_files import make_clip
from tests.command_line import command_line
from tests.reported.case import reported

pytest.importorskip("av", minversion="16", reason="clips need PyAV")
__all__ = ["command_line"]


def plan_of(command_line: Any, folder: Path, arch: str, rates: list[int], source_fps: float | None = None) -> Any:
    """`plan` of one clip of 40 frames for each rate."""
    for i, fps in enumerate(rates):
        path = folder / "clips" / f"{i}.mp4"
        if not path.exists():
            make_clip(path, 40, (96, 64), fps).with_suffix(".txt").write_text("a clip", encoding="utf-8")
    keys = "" if source_fps is None else f"source_fps = {source_fps}\n"
    (folder / "config.toml").write_text(
        f"[general]\nresolution = [96, 64]\ncaption_extension = '.txt'\n[[datasets]]\nvideo_directory = "
        f"'{(folder / 'clips').as_posix()}'\ntarget_frames = [9, 25]\nframe_extraction = 'head'\n{keys}",
        encoding="utf-8",
    )
    return json.loads(command_line("plan", folder / "config.toml", "--arch", arch, "--json")[1])


def of_rates(plan: Any) -> list[str]:
    return [f"{one['message']}: {one['remedy']}" for one in plan["findings"] if one["code"] == "source-fps"]


@reported(
    "Clips of 12 or 16 frames per second move too fast when they are trained for a model of 24",
    "kohya-ss/musubi-tuner#34",
    trainer="takes every frame; with source_fps = 16.0 it also leaves out items: it stops early",
    here="says that they must be re-encoded at the model's rate, and warns of a source_fps that is below it",
    command="kohya-bucket plan musubi.toml --arch hv",
    origin="the rule of musubi-tuner's loader, compared with its own in compat_tests/test_musubi_plan.py",
)
def test_clips_slower_than_the_model(command_line: Any, tmp_path: Path) -> None:
    plan = plan_of(command_line, tmp_path, "hv", [16])
    (said,) = of_rates(plan)
    assert said.endswith("slower ones at 24 frames per second: a source_fps below that only leaves out items")
    with_it = plan_of(command_line, tmp_path, "hv", [16], 16.0)
    assert with_it["datasets"][0]["items"] < plan["datasets"][0]["items"]
    (said,) = of_rates(with_it)
    assert "source_fps is 16, below the 24 of HunyuanVideo" in said


@reported(
    "Which source_fps for clips of 30 frames per second with Wan?",
    "kohya-ss/musubi-tuner#212",
    trainer="drops frames to reach the model's rate, if source_fps says the clips' own, which is one for a dataset",
    here="names the value where all clips have one rate, else asks for a dataset for each",
    command="kohya-bucket plan musubi.toml --arch wan",
    origin="measured",
)
@pytest.mark.parametrize("rates", [[30], [24, 30], [16, 30], [12, 16, 24, 30]])
def test_advice_on_the_rate_has_no_warning_against_it(command_line: Any, tmp_path: Path, rates: list[int]) -> None:
    (said,) = of_rates(plan_of(command_line, tmp_path, "wan", rates))
    if len(rates) == 1:
        assert said.endswith("to drop frames, set source_fps = 30.0")
        assert of_rates(plan_of(command_line, tmp_path, "wan", rates, 30.0)) == []
    else:
        assert "make a dataset for each rate, with its source_fps" in said
    assert ("re-encode slower ones at 16" in said) == (12 in rates)
