"""The lines of the pages that need a trainer, as they stand there, in a fresh folder with the page's relative paths.

What a page leaves to the reader (`…`) is a tiny model here. musubi-tuner's programs are only asked for their options:
without weights they end; `test_musubi_cached_training.py` runs them with tiny ones.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import train

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def lines(page, word):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [
        shlex.split(line)
        for line in re.findall(rf"^\S.*{word}.*$", text, re.MULTILINE)
        if line.startswith(("acc", "py"))
    ]


@pytest.mark.training_run("as the tutorial says")
def test_the_lora_of_the_tutorial(unpatched, sd_scripts_dir, tmp_path):
    text = (ROOT / "docs" / "sd-scripts.md").read_text(encoding="utf-8")
    ((*start, trainer, dataset, config, rest),) = lines("sd-scripts.md", "train_network.py")
    assert (start, trainer, dataset, rest) == (
        ["accelerate", "launch", "-m", "kohya_bucket.launch"], "path/to/sd-scripts/train_network.py",
        "--dataset_config", "…",
    )  # fmt: skip
    folder = tmp_path / "fresh"
    shutil.copytree(ROOT / "configs", folder / "configs")
    (toml,) = re.findall(r"```toml\n(.*?)```", text.split("## 3.", 1)[0], re.DOTALL)
    (folder / config).write_text(toml, encoding="utf-8")
    door = ("-m", "accelerate.commands.launch", "--cpu", *start[2:])
    run = train(sd_scripts_dir, Path(config), "--max_train_epochs", 1, out=tmp_path / "out", door=door, cwd=folder)
    run.assert_trained(30)  # as `plan` shows
    (shown,) = re.findall(r"`(epoch 1: [^`]+)`", text)
    assert shown in run.log


def test_the_lines_for_musubi_tuner():
    source = os.environ.get("MUSUBI_DIR")
    if not source:
        pytest.skip("MUSUBI_DIR is not set: no checkout of musubi-tuner")
    python = os.environ.get("MUSUBI_PYTHON", sys.executable)
    programs = lines("musubi.md", "src/musubi_tuner/")
    assert len(programs) == 3
    for words in programs:
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        command = [python, *words[words.index("-m") : at + 1], "--help"]
        paths = os.pathsep.join([str(ROOT), str(Path(source, "src"))])  # as if it were installed
        environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert [option for option in words[at:] if option.startswith("--") and option not in done.stdout] == []
