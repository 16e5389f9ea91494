"""The marked block in a checkout of sd-scripts or musubi-tuner."""

import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.trainers.door.checkout_patch import CheckoutError, CheckoutPatch, Trial
from kohya_bucket.trainers.musubi.checkout import PATCH as MUSUBI_TUNER
from kohya_bucket.trainers.sdscripts.checkout import PATCH as SD_SCRIPTS

ROOT = Path(__file__).parents[3]
TELLS = {SD_SCRIPTS: "library/train_util.py", MUSUBI_TUNER: "src/musubi_tuner/dataset/image_video_dataset.py"}


@pytest.fixture(params=TELLS, ids=lambda patch: patch.trainer)
def patch(request):
    return request.param


@pytest.fixture
def checkout(tmp_path, patch):
    for name in (TELLS[patch], patch.file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


@pytest.fixture
def init(checkout, patch):
    return checkout / patch.file


def files_in(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "before", [b"", b"x = 1\n", b"x = 1", b"x = 1\r\ny = 2\r\n", b"x = 1\r\ny = 2", "# ö\n".encode(), b"# \xe4\n"]
)
def test_install_and_remove_restore_the_folder(patch, checkout, init, before):
    init.write_bytes(before)
    everything = files_in(checkout)
    assert not patch.status(checkout).installed
    assert patch.install(checkout).current
    assert init.read_bytes().startswith(before)
    assert patch.block.rstrip().encode() in init.read_bytes()
    once = init.read_bytes()
    assert patch.install(checkout).current
    assert init.read_bytes() == once
    assert not patch.remove(checkout).installed
    assert files_in(checkout) == everything


def test_an_older_block_is_renewed(patch, checkout, init):
    init.write_text(patch.block.replace("install()", "older()"), encoding="utf-8")
    assert (patch.status(checkout).installed, patch.status(checkout).current) == (True, False)
    assert patch.install(checkout).current
    assert init.read_text(encoding="utf-8") == patch.block


def test_a_block_with_windows_line_ends_is_found(patch, checkout, init):
    init.write_bytes(patch.block.replace("\n", "\r\n").encode())
    assert patch.status(checkout).current
    assert not patch.remove(checkout).installed
    assert init.read_bytes() == b""


def test_a_doubled_block_is_taken_out_whole(patch, checkout, init):
    init.write_text("x = 1\n" + patch.block + "y = 2\n" + patch.block, encoding="utf-8")
    assert (patch.status(checkout).installed, patch.status(checkout).current) == (True, False)
    assert not patch.remove(checkout).installed
    assert init.read_text(encoding="utf-8") == "x = 1\ny = 2\n"


@pytest.mark.posix("links need a privilege there")
def test_a_link_stays_one(patch, checkout, init):
    real = checkout / "real.py"
    real.write_bytes(b"x = 1\n")
    init.unlink()
    init.symlink_to(real)
    assert patch.install(checkout).current
    assert init.is_symlink()
    assert real.read_text(encoding="utf-8") == "x = 1\n" + patch.block


def test_half_a_block_is_left_to_the_user(patch, checkout, init):
    init.write_text(patch.block.splitlines()[0], encoding="utf-8")
    with pytest.raises(CheckoutError, match="half a kohya_bucket block"):
        patch.install(checkout)


def test_a_folder_that_holds_the_checkout_is_understood(patch, checkout, tmp_path_factory):
    around = tmp_path_factory.mktemp("around")
    checkout.rename(around / patch.trainer)
    assert patch.install(around).file == around / patch.trainer / patch.file


def test_another_folder_is_refused(patch, tmp_path):
    with pytest.raises(CheckoutError, match=f"is not an? {patch.trainer} checkout"):
        patch.status(tmp_path)


@pytest.mark.parametrize(("cloned", "remedy"), [(True, "submodule update --init"), (False, "clone --recursive")])
def test_a_gui_without_its_submodule_is_told_how_to_get_it(tmp_path, cloned, remedy):
    (tmp_path / "sd-scripts").mkdir()
    (tmp_path / ".gitmodules").write_text("", encoding="utf-8")
    if cloned:
        (tmp_path / ".git").mkdir()
    refused = CliRunner().invoke(app, ["patch", "install", str(tmp_path)]).exception
    assert isinstance(refused, CheckoutError)
    assert remedy in str(refused)


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_patch_file_is_the_same_block_and_only_inserts(tmp_path):
    file = ROOT / "patches" / "library-init.patch"
    added = [
        line
        for line in file.read_text(encoding="utf-8").splitlines()
        if not line.startswith(("diff", "---", "+++", "@@"))
    ]
    assert all(line.startswith("+") for line in added)
    assert "".join(line[1:] + "\n" for line in added) == SD_SCRIPTS.block
    for name in (TELLS[SD_SCRIPTS], SD_SCRIPTS.file):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", str(file)], cwd=tmp_path, check=True)
    assert SD_SCRIPTS.status(tmp_path).current
    subprocess.run(["git", "apply", "-R", str(file)], cwd=tmp_path, check=True)
    assert not SD_SCRIPTS.status(tmp_path).installed


MISSING = "import sys; sys.modules['kohya_bucket'] = None\n"
MAKES_DATASETS = {SD_SCRIPTS: "library/config_util.py", MUSUBI_TUNER: "src/musubi_tuner/dataset/config_utils.py"}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("makes_datasets", [False, True])
def test_without_the_package_what_makes_data_sets_ends_and_other_tools_go_on(
    patch, checkout, init, makes_datasets, by_name
):
    """Whatever it is called; started by its path, and by its name with `-m`."""
    patch.install(checkout)
    init.write_text(MISSING + init.read_text(encoding="utf-8"), encoding="utf-8")
    folder = checkout / patch.import_folder
    module = (checkout / MAKES_DATASETS[patch]).relative_to(folder).with_suffix("").as_posix().replace("/", ".")
    (checkout / MAKES_DATASETS[patch]).write_text("", encoding="utf-8")
    script = init.parent / "my_run.py"
    imported = module if makes_datasets else init.parent.name
    script.write_text(f"import {imported}\nprint('goes on')\n", encoding="utf-8")
    command = ["-m", f"{init.parent.name}.my_run"] if by_name else [str(script)]
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(folder)},
    )  # fmt: skip
    if makes_datasets:
        assert (done.returncode, done.stdout) == (2, "")
        assert "WITHOUT it" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    else:
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "goes on", "")


def command(*arguments):
    return CliRunner().invoke(app, ["patch", *map(str, arguments)])


@pytest.mark.long
def test_the_command(patch, checkout):
    for arguments, answer in (
        (["status"], "not installed"),
        (["install", "--force"], ": installed"),
        (["status"], ": installed"),
        (["remove"], "not installed"),
    ):
        result = command(*arguments, checkout)
        assert result.exit_code == 0, result.output
        assert answer in result.output.replace("\n", "")


@pytest.mark.long
def test_nothing_is_written_where_the_adapter_could_not_be_tried(patch, checkout, init):
    (checkout / MAKES_DATASETS[patch]).write_text("import no_such_module", encoding="utf-8")
    result = command("install", checkout)
    assert isinstance(result.exception, CheckoutError), result.output
    assert "could not be tested" in str(result.exception)
    assert init.read_bytes() == b""


@pytest.mark.weekly
def test_code_that_python_would_run_in_place_of_the_block_is_removed(patch, checkout, init):
    unchecked = py_compile.compile(str(init), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    checked = Path(unchecked).with_name(f"{init.stem}.other-1.pyc")
    py_compile.compile(str(init), str(checked), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    init.write_text(patch.block, encoding="utf-8")
    assert "trainings start WITHOUT kohya_bucket" in command("status", checkout).output.replace("\n", "")
    result = command("install", "--force", checkout)
    assert result.exit_code == 0, result.output
    assert [file.name for file in checked.parent.iterdir()] == [checked.name]
    assert "WITHOUT" not in command("status", checkout).output


@pytest.mark.long
@pytest.mark.parametrize("name", ["", "__init__.cpython-399.pyc"])  # of another Python than this one
def test_code_of_another_state_that_comes_back_later_is_said(patch, checkout, init, name):
    """As an image of a container, or a copy of a checkout, brings it along."""
    unchecked = py_compile.compile(str(init), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    kept = Path(unchecked).read_bytes()
    patch.install(checkout)
    current = patch.status(checkout)
    assert current.current
    assert current.stale is None
    back = Path(unchecked).with_name(name or Path(unchecked).name)
    back.write_bytes(kept)
    assert patch.status(checkout).stale == back
    result = command("status", checkout)
    assert result.exit_code == 1
    assert f"Python runs {back}, unchecked and from another state" in result.output.replace("\n", "")
    Path(unchecked).unlink(missing_ok=True)
    py_compile.compile(str(init), str(back), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert patch.status(checkout).stale is None


@pytest.mark.parametrize("name", ["install", "status", "remove"])
def test_the_command_in_a_folder_without_a_trainer(tmp_path, name):
    result = CliRunner().invoke(app, ["patch", name, str(tmp_path)])
    assert isinstance(result.exception, CheckoutError)
    assert "is not a checkout of sd-scripts" in str(result.exception)
    assert "none of musubi-tuner" in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.weekly
def test_the_command_does_not_patch_what_the_adapter_does_not_know(patch, checkout, init):
    pytest.importorskip("accelerate", reason="without torch and accelerate the adapter cannot be tried")
    if patch is SD_SCRIPTS:
        (checkout / "library" / "config_util.py").write_text("", encoding="utf-8")
    else:
        (init.parent / "dataset" / "config_utils.py").write_text(
            "import musubi_tuner.dataset.image_video_dataset", encoding="utf-8"
        )
        (checkout / TELLS[patch]).write_text("class DatasetGroup: pass", encoding="utf-8")
    result = CliRunner().invoke(app, ["patch", "install", str(checkout)])
    assert isinstance(result.exception, CheckoutError), result.output
    assert "The block was not written" in str(result.exception)
    assert init.read_bytes() == b""
    answer = CliRunner().invoke(app, ["patch", "status", str(checkout)]).output.replace("\n", "")
    assert "not installed" in answer
    assert "no training would start" in answer


def test_status_of_a_checkout_without_the_block_does_not_speak_as_if_it_were_there(checkout, patch, monkeypatch):
    monkeypatch.setattr(CheckoutPatch, "attempt", lambda *_: Trial(active=True, runs_block=True))
    said = CliRunner().invoke(app, ["patch", "status", str(checkout)]).output
    assert f"with the block, which `kohya-bucket patch install {checkout}` writes, every training" in said
    patch.install(checkout)
    assert "while the block is installed" in CliRunner().invoke(app, ["patch", "status", str(checkout)]).output
