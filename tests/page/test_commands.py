"""Every command of a ```bash block runs as it stands, in a fresh folder, page by page; what a page shows was printed.

The folder holds this repository's `configs/` and `examples/`, the config of the first tutorial as `my.toml`, and the
demo images under the names that pages use for yours. `load_vae` stands in for each VAE that a page names: none is here,
and `compat_tests` encodes with real ones. Blocks without a language are not run here: they need a trainer or a network;
`compat_tests/test_tutorials.py` has those of the trainers.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kohya_bucket.cli.commands import COMMANDS
from kohya_bucket.cli.group import load_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
OF_ITS_OWN = {"scale.md": "test_cluster_page.py"}  # on Ray, on S3, and on two nodes

pytestmark = pytest.mark.long


def blocks(page: Path) -> list[tuple[str, str, bool]]:
    """(language, text, whether it follows another block at once) of each block of a page."""
    text = page.read_text(encoding="utf-8")
    found, end = [], -1
    for match in _BLOCK.finditer(text):
        found.append((match[2], match[3], not text[end : match.start()].strip() and end > 0))
        end = match.end()
    return found


def lines_of(text: str) -> list[str]:
    """Without what pads a table, or cuts it off."""
    lines = (" ".join(line.replace(os.sep, "/").split()) for line in text.splitlines())
    return [line for line in lines if line not in ("", "…")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("data", "train/10_demo", "reg/1_demo", "path/to/images"):
        shutil.copytree(ROOT / "configs" / "demo_images", tmp_path / name)
    (config,) = (text for _, text, _ in blocks(DOCS / "sd-scripts.md") if "image_dir" in text)
    (tmp_path / "my.toml").write_text(config, encoding="utf-8")
    preset = {"train_data_dir": "train", "max_resolution": "512,512", "enable_bucket": True, "train_batch_size": 2}
    (tmp_path / "my_gui_preset.json").write_text(json.dumps(preset), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.fixture
def load_vae(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of 8x8 pixels in the place of a VAE."""
    from kohya_bucket.latents.vae import diffusers_vae
    from tests.latents.stub_encoders import MeanEncoder

    monkeypatch.setattr(diffusers_vae, "load_encoder", lambda *_, **__: MeanEncoder())


def run(line: str, command_line: Any) -> str:
    """What a line prints; it may find something (1), but is never refused (2)."""
    program, *arguments = shlex.split(line, comments=True)
    if program == "kohya-bucket":
        code, out, said = command_line(*arguments)
    else:
        assert program == "python"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        code, out, said = done.returncode, done.stdout, done.stderr
    assert code in (0, 1), (line, out, said)
    assert "Traceback" not in said
    return out + said


def has_commands(page: Path) -> bool:
    return page.name not in OF_ITS_OWN and any(
        language == "bash" or text.startswith("$ ") for language, text, _ in blocks(page)
    )


@pytest.mark.parametrize("page", list(filter(has_commands, PAGES)), ids=lambda page: page.name)
def test_every_command_runs_and_prints_what_is_shown(page, folder, command_line, load_vae, capfd) -> None:
    printed: list[str] | None = None  # by the block before
    found = blocks(page)
    for (language, text, follows), after in zip(found, [*found[1:], ("", "", False)], strict=True):
        if text.startswith("$ "):
            for part in text.removeprefix("$ ").split("\n$ "):
                line, _, shown = part.partition("\n")
                assert not set(lines_of(shown)) - set(lines_of(run(line, command_line))), line
        elif language == "" and follows and printed is not None:
            assert [line for line in lines_of(text) if line not in printed] == []
        printed = None
        if language == "bash":
            printed = lines_of("".join(run(line, command_line) for line in text.splitlines()))
        elif language == "python" and after[0] == "" and after[2] and not text.startswith(">>>"):
            capfd.readouterr()
            exec(compile(text, str(page), "exec"), {})
            printed = lines_of(capfd.readouterr().out)


def test_every_option_that_a_page_names_exists() -> None:
    """In blocks and in sentences, run or not."""
    unknown = []
    for page in [*PAGES, *sorted(ROOT.glob("*.md"))]:
        text = re.sub(r" \\\n +", " ", page.read_text(encoding="utf-8"))
        for line in re.findall(r"kohya-bucket ((?:[a-z-]+ ?)+[^`\n]*)", text) if page.name != "CHANGELOG.md" else ():
            words = line.partition("#")[0].split()
            if words[0] not in COMMANDS:
                continue
            command: Any = load_command(words[0])
            command = getattr(command, "commands", {}).get(words[1] if len(words) > 1 else "", command)
            known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help", "--help-all"}
            options = {word.replace("_", "-") for word in words if re.fullmatch(r"--[a-z][\w-]+", word)}
            unknown += [f"{page.name}: {words[0]} {option}" for option in sorted(options - known)]
    assert unknown == []
