"""The permanent door of ai-toolkit: a file of ours in its folder for extensions."""

import subprocess
import sys
from pathlib import Path

import pytest

from kohya_bucket.trainers.ai_toolkit.checkout import PATCH
from kohya_bucket.trainers.door.checkout_patch import CheckoutError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "data_loader.py").write_text("loaded = True\n", encoding="utf-8")
    (tmp_path / "run.py").write_text("", encoding="utf-8")
    (tmp_path / "extensions" / "example").mkdir(parents=True)
    return tmp_path


def tree(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_it_is_made_and_taken_away_with_its_folder(checkout):
    before = tree(checkout)
    assert not PATCH.status(checkout).installed
    assert PATCH.remove(checkout).installed is False
    assert PATCH.install(checkout).current
    assert tree(checkout) - before == {"extensions/kohya_bucket", "extensions/kohya_bucket/__init__.py"}
    assert PATCH.install(checkout).current
    compiled = checkout / "extensions" / "kohya_bucket" / "__pycache__" / "__init__.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"")
    assert not PATCH.remove(checkout).installed
    assert tree(checkout) == before


def test_what_else_lies_there_stays(checkout):
    folder = checkout / "extensions" / "kohya_bucket"
    folder.mkdir()
    (folder / "__init__.py").write_text("mine = 1\n", encoding="utf-8")
    (folder / "notes.txt").write_text("", encoding="utf-8")
    PATCH.install(checkout)
    PATCH.remove(checkout)
    assert (folder / "__init__.py").read_text(encoding="utf-8") == "mine = 1\n"
    (folder / "__init__.py").unlink()
    PATCH.install(checkout)
    PATCH.remove(checkout)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_another_folder_is_no_checkout(tmp_path):
    with pytest.raises(CheckoutError, match=r"has no toolkit/data_loader\.py beside run\.py"):
        PATCH.install(tmp_path)


@pytest.mark.parametrize("first", ["toolkit.data_loader", "extensions.kohya_bucket"])
def test_where_the_package_is_missing_no_job_begins(checkout, first):
    """ai-toolkit imports its loader before its extensions."""
    PATCH.install(checkout)
    second = {"toolkit.data_loader", "extensions.kohya_bucket"} - {first}
    code = f"import sys; sys.modules['kohya_bucket'] = None; import {first}; import {second.pop()}; print('trained')"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "would train WITHOUT it" in done.stderr
