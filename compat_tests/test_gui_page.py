"""Every file, folder and label of the kohya_ss GUI that `docs/gui.md` names is in a checkout of it (KOHYA_SS_DIR).

This reads the GUI's own sources: it is how the lines for Windows are checked, which no test here can run.
"""

import os
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "gui.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def gui():
    root = os.environ.get("KOHYA_SS_DIR")
    if not root:
        pytest.skip("KOHYA_SS_DIR is not set: no checkout of the kohya_ss GUI to compare the page with")
    return Path(root)


def text_of(file):
    return file.read_text(encoding="utf-8", errors="replace").replace("\\", "/").lower()


def code_of(gui):
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted((gui / "kohya_gui").glob("*.py")))


def test_every_script_that_starts_or_installs_is_there(gui):
    named = set(re.findall(r"`((?:gui|setup)[\w-]*\.(?:bat|ps1|sh))`", PAGE))
    assert {"gui.bat", "gui.ps1", "gui.sh", "gui-uv.bat", "gui-uv.sh", "setup.bat", "setup.sh"} <= named
    assert [name for name in sorted(named) if not (gui / name).is_file()] == []


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("gui.bat", "/venv/scripts/activate"),
        ("gui.ps1", "/venv/scripts/activate"),
        ("gui.sh", "/venv/bin/activate"),
        ("gui.sh", "conda_default_env"),
        ("setup.bat", "-m venv venv"),
        ("setup.sh", '-m venv "$dir/venv"'),
        ("gui-uv.bat", "virtual_env=.venv"),
        ("gui-uv.sh", "virtual_env=.venv"),
    ],
)
def test_each_script_uses_the_environment_that_the_page_says(gui, script, line):
    assert line in text_of(gui / script)


def test_a_conda_environment_comes_before_venv(gui):
    text = text_of(gui / "gui.sh")
    assert text.index("existing conda environment") < text.index("/venv/bin/activate")


def test_the_environment_of_uv_has_the_pip_that_the_page_runs(gui):
    assert re.search(r'^\s*"pip"', (gui / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)


def test_what_updates_sd_scripts(gui):
    assert "path = sd-scripts" in (gui / ".gitmodules").read_text(encoding="utf-8")
    assert '"submodule", "update"' in (gui / "setup" / "setup_common.py").read_text(encoding="utf-8")
    for script in ("gui-uv.bat", "gui-uv.sh"):
        assert "git submodule update" in text_of(gui / script)
        assert "uv run" in text_of(gui / script)


@pytest.mark.parametrize(
    "label",
    ["Start training", "Max train steps", "Max train epoch", "Dataset config file", "Image folder", "Configuration"],
)
def test_labels_are_written_as_in_the_gui(gui, label):
    assert f"*{label}*" in " ".join(PAGE.split())
    assert f'"{label}' in code_of(gui)


def test_the_command_and_the_names_of_what_it_writes(gui):
    code = (gui / "kohya_gui" / "lora_gui.py").read_text(encoding="utf-8")
    assert "config_lora-{formatted_datetime}.toml" in code
    assert "{output_name}_{formatted_datetime}.json" in code
    assert '"%Y%m%d-%H%M%S"' in code
    for name, pattern in (("config_lora", r"config_lora-\d{8}-\d{6}\.toml"), ("saved", r"\w+_\d{8}-\d{6}\.json")):
        assert re.search(pattern, PAGE), name
    assert '"--config_file"' in code
    assert "train_network.py" in code
