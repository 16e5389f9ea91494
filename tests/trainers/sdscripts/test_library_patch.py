"""`patches/library-init.patch`: a block in sd-scripts' empty `library/__init__.py` that opens the door."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kohya_bucket import launch
from kohya_bucket.trainers.sdscripts import doctor
from kohya_bucket.trainers.sdscripts.checkout import has_patch

PATCH = Path(__file__).parents[3] / "patches" / "library-init.patch"

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def git(folder, *arguments):
    subprocess.run(["git", *arguments], cwd=folder, check=True)


@pytest.fixture
def checkout(tmp_path):
    """A patched one."""
    (tmp_path / "library").mkdir()
    for name in ("__init__.py", "train_util.py", "config_util.py", "strategy_base.py"):
        (tmp_path / "library" / name).touch()
    (tmp_path / "train_network.py").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "apply", PATCH)
    return tmp_path


def test_it_is_noticed_and_can_be_taken_out(checkout):
    assert has_patch(checkout)
    assert not launch._trains_without(checkout / "train_network.py")
    assert "is patched" in dict(doctor.checkout_section(checkout, imported=False).facts)["starts"]
    git(checkout, "apply", "-R", PATCH)
    assert not has_patch(checkout)
    assert (checkout / "library" / "__init__.py").read_bytes() == b""
    assert launch._trains_without(checkout / "train_network.py")


def run(checkout, code):
    return subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=False)


def test_the_block_opens_the_door(checkout):
    done = run(checkout, "import library, sys; print('kohya_bucket.trainers.sdscripts' in sys.modules)")
    assert (done.stdout.strip(), done.stderr) == ("True", "")


def test_without_the_package_what_makes_datasets_ends_and_other_tools_go_on(checkout):
    missing = "import sys; sys.modules['kohya_bucket'] = None; "
    done = run(checkout, missing + "import library.train_util; print('goes on')")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "goes on", "")
    done = run(checkout, missing + "import library.config_util; print('goes on')")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "WITHOUT it" in done.stderr
