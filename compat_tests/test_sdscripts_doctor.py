"""`kohya-bucket doctor` on the real checkout, in the environment that trains."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compat_tests.sdscripts_support import write_images

ROOT = Path(__file__).parents[1]


def doctor(cwd, *arguments):
    """(exit code, {code: finding}, {name: text of a fact})."""
    command = [sys.executable, "-m", "kohya_bucket", "doctor", "--json", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout, done.stderr
    sections = json.loads(done.stdout)["sections"]
    facts = {fact["name"]: fact["text"] for section in sections for fact in section["facts"]}
    return done.returncode, {f["code"]: f for section in sections for f in section["findings"]}, facts


@pytest.fixture
def copy(unpatched, tmp_path):
    """A copy of the checkout's code that a test may change."""
    shutil.copytree(unpatched.root / "library", tmp_path / "copy" / "library", ignore=shutil.ignore_patterns("*.pyc"))
    return tmp_path / "copy"


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_known_version(unpatched, copy, tmp_path):
    before = files_of(copy)
    code, found, facts = doctor(tmp_path, "--sd-scripts", copy)
    assert (code, set(found)) == (0, set())
    assert facts["adapter"] == "every part of sd-scripts that it replaces looks as expected"
    assert facts["starts"].startswith("with accelerate launch")
    assert files_of(copy) == before


def test_without_git_the_version_follows_from_the_modules(unpatched, copy, tmp_path):
    """Also in a folder of another repository; doctor and the log of a training say the same."""
    for command in (["init"], ["-c", "user.name=x", "-c", "user.email=x", "commit", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True, capture_output=True)
    subprocess.run(["git", "-C", tmp_path, "tag", "v7.7"], check=True, capture_output=True)
    facts = doctor(tmp_path, "--sd-scripts", copy, "--quick")[2]
    match = re.fullmatch(r"v(0\.\d+)\..*", unpatched.root.name.removeprefix("sd-scripts-"))
    if match:
        assert facts["checkout"].split()[0] == match[1]
    assert facts["checkout"] == f"{facts['checkout'].split()[0]} (by its modules) at {copy}"
    code = "import logging; logging.basicConfig(level='INFO')\n"
    code += "import kohya_bucket.trainers.sdscripts as door; door.install()\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(copy)]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code + "import library.config_util"]
    log = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=True).stderr
    assert f"kohya_bucket in sd-scripts {facts['checkout']} is active" in " ".join(log.split())


def test_a_config_is_read_as_this_version_reads_it(copy, unpatched, tmp_path):
    write_images(tmp_path / "set", [(64, 64), (65, 64), (100, 90)])
    config = {"general": {"skip_image_resolution": 64}, "datasets": [{"resolution": 64, "subsets": [
        {"image_dir": str(tmp_path / "set"), "caption_extension": ".txt"}]}]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, found, facts = doctor(tmp_path, tmp_path / "config.json", "--sd-scripts", copy, "--quick")
    fields = {field.name for field in dataclasses.fields(unpatched.config_util.BaseDatasetParams)}
    if "skip_image_resolution" in fields:
        assert (code, facts["dataset 1"][:8], "misplaced-key" in found) == (0, "2 images", False)
        assert facts["dataset 1"].endswith("1 left out by skip_image_resolution")
    else:
        assert code == 1
        assert f"is new in sd-scripts 0.10.2, and {copy} does not know it" in found["misplaced-key"]["message"]


def test_a_checkout_is_found_from_within(copy):
    code, found, facts = doctor(copy)
    assert (code, set(found)) == (0, set())
    assert "adapter" in facts


def test_a_version_that_nobody_knows(copy, tmp_path):
    method = "def shuffle_buckets(self)"
    texts = {file: file.read_text(encoding="utf-8") for file in (copy / "library").glob("*.py")}
    (owner,) = [file for file, text in texts.items() if method in text]
    owner.write_text(texts[owner].replace(method, "def shuffle_buckets(self, once_more)"), encoding="utf-8")
    code, found, facts = doctor(tmp_path, "--sd-scripts", copy)
    assert (code, "adapter" in facts) == (1, False)
    assert "BaseDataset.shuffle_buckets takes once_more too" in found["adapter-refuses"]["message"]
