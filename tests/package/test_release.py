"""What a release is made of: one version everywhere, a part of the changelog, an action that says what `plan` says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kohya_bucket import __version__

ROOT = Path(__file__).parents[2]
bash = pytest.mark.skipif(
    shutil.which("bash") is None or os.name == "nt" or not (ROOT / ".ci").is_dir(), reason="for a checkout, with bash"
)


def test_every_file_names_the_same_version_and_needs() -> None:
    if not (ROOT / "conda").is_dir():
        pytest.skip("not in the source distribution")
    recipe = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    assert f'version: "{__version__}"' in recipe
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    listed = re.search(
        r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert listed is not None
    wanted = [part.strip(' "') for part in listed[1].split(",")]
    run = recipe[recipe.index("  run:") : recipe.index("\ntests:")]
    assert [line.strip(" -").replace(" ", "") for line in run.splitlines()[2:] if line] == wanted


@bash
def test_the_notes_of_a_release_are_its_part_of_the_changelog(tmp_path: Path) -> None:
    for name in (".ci/release_notes", "kohya_bucket/_version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        f"## [Unreleased]\n\nnew\n\n## [{__version__}] - 2030-01-01\n\n### Added\n\n- this\n\n## [0.0.1]\n\nold\n",
        encoding="utf-8",
    )

    def notes(tag: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([tmp_path / ".ci/release_notes", tag], capture_output=True, text=True, check=False)

    assert notes(f"v{__version__}").stdout.strip() == "### Added\n\n- this"
    assert "but kohya_bucket/_version.py says" in notes("v9.9.9").stderr
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\nnew\n", encoding="utf-8")
    assert "has nothing under" in notes(f"v{__version__}").stderr


@pytest.mark.long
@bash
@pytest.mark.parametrize(("config", "code"), [("configs/demo.toml", 0), ("no such.toml", 2)])
def test_the_action_says_what_plan_says(tmp_path: Path, config: str, code: int) -> None:
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    step = action["runs"]["steps"][-1]
    command = [sys.executable, "-m", "kohya_bucket"]
    (tmp_path / "kohya-bucket").write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n', encoding="utf-8")
    (tmp_path / "kohya-bucket").chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "RUNNER_TEMP": str(tmp_path), "CONFIG": config,
        "OPTIONS": "--gpus 1,2", "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }  # fmt: skip
    done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=ROOT, env=env, check=False)
    assert done.returncode == code
    text = (tmp_path / "kohya-bucket-plan.md").read_text(encoding="utf-8")
    assert (tmp_path / "summary").read_text(encoding="utf-8") == text
    assert (tmp_path / "output").read_text(encoding="utf-8") == f"text={tmp_path}/kohya-bucket-plan.md\n"
    plan = subprocess.run(
        [*command, "plan", config, "--gpus", "1,2"], cwd=ROOT, env=env, capture_output=True, check=False
    )
    said = (plan.stdout + plan.stderr).decode("utf-8").rstrip("\n")
    assert text == f"`kohya-bucket plan {config}`\n\n```\n{said}\n```\n"
