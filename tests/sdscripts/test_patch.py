"""The marked block in a checkout's `library/__init__.py`."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kohya_bucket.adapter.marked_block import CheckoutError
from kohya_bucket.sdscripts.patch import BLOCK, patch_install, patch_remove, patch_status

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "train_util.py").write_text("", encoding="utf-8")
    (tmp_path / "library" / "__init__.py").write_bytes(b"")
    return tmp_path


def init_of(checkout):
    return checkout / "library" / "__init__.py"


@pytest.mark.parametrize(
    "before", [b"", b"x = 1\n", b"x = 1", b"x = 1\r\ny = 2\r\n", b"x = 1\r\ny = 2", "# ö\n".encode(), b"# \xe4\n"]
)
def test_install_and_remove_restore_the_file(checkout, before):
    init_of(checkout).write_bytes(before)
    assert not patch_status(checkout).installed
    assert patch_install(checkout).current
    assert init_of(checkout).read_bytes().startswith(before)
    assert BLOCK.rstrip().encode() in init_of(checkout).read_bytes()
    once = init_of(checkout).read_bytes()
    assert patch_install(checkout).current
    assert init_of(checkout).read_bytes() == once
    assert not patch_remove(checkout).installed
    assert init_of(checkout).read_bytes() == before
    assert list((checkout / "library").glob(".kohya*")) == []


def test_an_older_block_is_renewed(checkout):
    init_of(checkout).write_text(BLOCK.replace("install()", "older()"), encoding="utf-8")
    assert (patch_status(checkout).installed, patch_status(checkout).current) == (True, False)
    assert patch_install(checkout).current
    assert init_of(checkout).read_text(encoding="utf-8") == BLOCK


def test_a_block_with_windows_line_ends_is_found(checkout):
    init_of(checkout).write_bytes(BLOCK.replace("\n", "\r\n").encode())
    assert patch_status(checkout).current
    assert not patch_remove(checkout).installed
    assert init_of(checkout).read_bytes() == b""


def test_a_doubled_block_is_taken_out_whole(checkout):
    init_of(checkout).write_text("x = 1\n" + BLOCK + "y = 2\n" + BLOCK, encoding="utf-8")
    assert (patch_status(checkout).installed, patch_status(checkout).current) == (True, False)
    assert not patch_remove(checkout).installed
    assert init_of(checkout).read_text(encoding="utf-8") == "x = 1\ny = 2\n"


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_a_link_stays_one(checkout):
    real = checkout / "real.py"
    real.write_bytes(b"x = 1\n")
    init_of(checkout).unlink()
    init_of(checkout).symlink_to(real)
    assert patch_install(checkout).current
    assert init_of(checkout).is_symlink()
    assert real.read_text(encoding="utf-8") == "x = 1\n" + BLOCK


def test_half_a_block_is_left_to_the_user(checkout):
    init_of(checkout).write_text(BLOCK.splitlines()[0], encoding="utf-8")
    with pytest.raises(CheckoutError, match="half a kohya_bucket block"):
        patch_install(checkout)


def test_the_gui_folder_is_understood(checkout, tmp_path_factory):
    gui = tmp_path_factory.mktemp("kohya_ss")
    checkout.rename(gui / "sd-scripts")
    assert patch_install(gui).file == gui / "sd-scripts" / "library" / "__init__.py"


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(CheckoutError, match="is not an sd-scripts checkout"):
        patch_status(tmp_path)


def test_the_patch_file_is_the_same_block_and_only_inserts(checkout):
    patch = ROOT / "patches" / "library-init.patch"
    added = [
        line
        for line in patch.read_text(encoding="utf-8").splitlines()
        if not line.startswith(("diff", "---", "+++", "@@"))
    ]
    assert all(line.startswith("+") for line in added)
    assert "".join(line[1:] + "\n" for line in added) == BLOCK
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=checkout, check=True)
    assert patch_status(checkout).current
    subprocess.run(["git", "apply", "-R", str(patch)], cwd=checkout, check=True)
    assert not patch_status(checkout).installed


@pytest.mark.parametrize(("script", "ends"), [("sdxl_train_network.py", 2), ("fine_tune.py", 2), ("convert.py", 0)])
def test_without_the_package_no_trainer_starts_and_other_tools_do(checkout, script, ends):
    patch_install(checkout)
    (checkout / script).write_text(
        "import sys; sys.modules['kohya_bucket'] = None\nimport library\nprint('goes on')\n", encoding="utf-8"
    )
    done = subprocess.run([sys.executable, script], cwd=checkout, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (ends, "" if ends else "goes on")
    assert "WITHOUT it" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_command(checkout):
    from kohya_bucket.cli import app

    for name, answer in (
        ("status", "not installed"),
        ("install", ": installed"),
        ("status", ": installed"),
        ("remove", "not installed"),
    ):
        result = CliRunner().invoke(app, ["patch", name, str(checkout)])
        assert result.exit_code == 0, result.output
        assert answer in result.output.replace("\n", "")


def test_the_command_does_not_patch_what_the_adapter_does_not_know(checkout):
    pytest.importorskip("torch", reason="without torch the adapter cannot be tried")
    from kohya_bucket.cli import app

    (checkout / "library" / "config_util.py").write_text("", encoding="utf-8")
    result = CliRunner().invoke(app, ["patch", "install", str(checkout)])
    assert isinstance(result.exception, CheckoutError)
    assert "The block was not written" in str(result.exception)
    assert init_of(checkout).read_bytes() == b""
    answer = CliRunner().invoke(app, ["patch", "status", str(checkout)]).output.replace("\n", "")
    assert "not installed" in answer
    assert "no training would start" in answer
