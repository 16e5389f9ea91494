"""An activated environment: two files, and what a start of Python does with them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kohya_bucket import launch
from kohya_bucket.cli import app
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.trainers.activation import activate, activation, deactivate, write
from kohya_bucket.trainers.at_start import NAME
from kohya_bucket.trainers.sdscripts import doctor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "site").mkdir()
    write(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def trainer(tmp_path):
    """What tells a trainer from others, and no more: no version that any door knows."""
    (tmp_path / "trainer" / "library").mkdir(parents=True)
    for name in (
        "train_network.py",
        "library/__init__.py",
        "library/train_util.py",
        "library/config_util.py",
        "library/strategy_base.py",
    ):
        (tmp_path / "trainer" / name).write_text("print(__name__)\n", encoding="utf-8")
    return tmp_path / "trainer"


def start(folder, program, *, found=True, **environment):
    """A new Python that has the folder among its packages, and this package or not."""
    paths = [str(ROOT), *(p for p in sys.path if "-packages" in p)] if found else []
    code = f"import sys, site; sys.path += {paths!r}; site.addsitedir({str(folder)!r}); {program}"
    environment = {"PATH": "", "SYSTEMROOT": "C:\\Windows", **environment}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, cwd=folder, check=False)


def test_it_is_two_files_and_taken_away_with_what_came_of_them(folder):
    assert activation(folder).current
    written = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert written == {"kohya_bucket.pth", "_kohya_bucket_at_start.py"}
    assert start(folder, "print(1)").stdout == "1\n"
    (folder / "_kohya_bucket_at_start.py").write_text('"""Written by `kohya-bucket activate`, once."""\n')
    assert (activation(folder).active, activation(folder).current) == (True, False)
    deactivate(folder)
    assert {path.name for path in folder.rglob("*")} <= {"__pycache__"}
    deactivate(folder)


def test_it_is_there_beside_a_sitecustomize_of_others(folder, trainer, tmp_path):
    """As a GUI ships one: it prints in its own way, and waits for modules before anybody else."""
    hook = tmp_path / "hook"
    hook.mkdir()
    lines = ["import builtins, sys", "said = print"]
    lines += ["def say(data, *args, **kwargs):", "    said(data, *args, **kwargs)", "    said('translated')"]
    lines += ["class Others:", "    def find_spec(self, name, path=None, target=None):", "        return None"]
    lines += ["builtins.print = say", "sys.meta_path.insert(0, Others())"]
    (hook / "sitecustomize.py").write_text("\n".join(lines), encoding="utf-8")
    program = f"sys.path.insert(0, {str(hook)!r}); site.execsitecustomize(); print('ready'); "
    program += f"sys.path.insert(0, {str(trainer)!r}); import library.train_util; print(*sys.modules)"
    done = start(folder, program, PYTHONNOUSERSITE="1")
    assert done.stdout.splitlines()[:2] == ["ready", "translated"]
    assert "kohya_bucket.trainers.sdscripts.door" in done.stdout.split()


@pytest.mark.parametrize("words", [["activate", "--off"], ["deactivate"]])
def test_the_command_undoes_it_by_its_old_name_too(folder, monkeypatch, words):
    monkeypatch.setattr("kohya_bucket.trainers.activation.site_packages", lambda: folder)
    assert CliRunner().invoke(app, ["activate", "--status"]).exit_code == 0
    for state in ("no longer active", "not active"):
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, done.output.partition(" in ")[0]) == (0, state)
    assert CliRunner().invoke(app, ["activate", "--status"]).exit_code == 1


@pytest.mark.parametrize(
    ("name", "text"), [("kohya_bucket.pth", "mine\n"), ("kohya_bucket.pth", ""), (f"{NAME}.py", "")]
)
def test_a_file_of_somebody_else_stays(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    for change in (activate, deactivate):
        with pytest.raises(KohyaBucketError, match=r"was not written by kohya_bucket"):
            change(folder)
    assert (folder / name).read_text(encoding="utf-8") == text


def test_a_python_that_does_not_find_the_package_is_not_activated(tmp_path):
    with pytest.raises(KohyaBucketError, match=r"install the package into the environment that trains"):
        activate(tmp_path)  # no folder of packages, so nothing in it is imported
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_fails_leaves_active_what_was(folder, monkeypatch):
    def late(command, **_):
        raise subprocess.TimeoutExpired(command, 120)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(KohyaBucketError, match="-m pip install"):
        activate(folder)
    assert activation(folder).current


def test_a_script_behind_the_launcher_may_start_a_trainer_where_python_is_active(trainer, monkeypatch):
    assert launch._trains_without(trainer / "train_network.py")
    monkeypatch.setitem(sys.modules, NAME, SimpleNamespace(ACTIVE=True))
    assert not launch._trains_without(trainer / "train_network.py")


@pytest.mark.long
def test_a_trainer_is_changed_and_others_are_let_be(folder, trainer):
    path = f"sys.path.insert(0, {str(trainer)!r}); "
    opened = "import library.train_util; print('kohya_bucket.trainers.sdscripts.door' in sys.modules)"
    assert start(folder, path + opened).stdout.splitlines()[-1] == "True"
    off = start(folder, path + "import library.train_util", KOHYA_BUCKET="0")
    assert (off.stdout, off.stderr) == ("library\nlibrary.train_util\n", "")
    first = "from kohya_bucket.trainers import sdscripts; sdscripts.install(quiet=True); "
    assert start(folder, first + path + "import library.train_util").stderr == ""
    (trainer / "train_network.py").unlink()
    assert start(folder, path + "import library.train_util").stderr == ""


def other_trainer(folder, *files):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("", encoding="utf-8")
    return folder


def test_a_package_of_the_same_name_has_the_door_of_its_own_trainer(folder, tmp_path):
    files = ("train.py", "library/__init__.py", "library/anima/text_strategies.py", "library/datasets/base.py")
    trainer = other_trainer(tmp_path / "anima_lora", *files)
    program = f"sys.path.insert(0, {str(trainer)!r}); import library.datasets.base; print(*sys.modules)"
    modules = start(folder, program).stdout.split()
    assert "kohya_bucket.trainers.anima_lora.door" in modules
    assert "kohya_bucket.trainers.sdscripts.door" not in modules


def test_a_program_that_has_read_a_config_before_is_changed_too(folder, tmp_path):
    trainer = other_trainer(
        tmp_path / "trainer", "musubi_tuner/__init__.py", "musubi_tuner/dataset/image_video_dataset.py"
    )
    program = f"sys.path.insert(0, {str(trainer)!r}); import kohya_bucket.trainers.musubi.config; "
    program += "import musubi_tuner.dataset.image_video_dataset; print(*sys.modules)"
    assert "kohya_bucket.trainers.musubi.door" in start(folder, program).stdout.split()


@pytest.mark.parametrize(("program", "files"), [
    ("run.py", ["toolkit/data_loader.py"]),
    ("train.py", ["library/__init__.py", "library/anima/text_strategies.py", "library/datasets/base.py"]),
])  # fmt: skip
def test_programs_with_everyday_names_are_known_by_their_checkout(tmp_path, program, files):
    trainer = other_trainer(tmp_path / "trainer", program, *files)
    assert launch._trains_without(trainer / program)
    (trainer / files[-1]).unlink()
    assert not launch._trains_without(trainer / program)


def test_doctor_says_whether_this_python_is_active(folder, trainer, monkeypatch, tmp_path):
    for packages, said in ((folder, "this Python is activated"), (tmp_path, "after: kohya-bucket activate")):
        monkeypatch.setattr(doctor, "site_packages", lambda packages=packages: packages)
        assert said in dict(doctor.checkout_section(trainer, imported=False).facts)["starts"]


def test_without_the_package_trainings_go_on_and_one_line_says_so(folder, trainer):
    program = f"sys.path.insert(0, {str(trainer)!r}); import library.train_util, library.config_util; print('went on')"
    done = start(folder, program, found=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "went on")
    assert done.stderr.startswith("kohya_bucket: it is activated here and no longer installed: this runs WITHOUT it")
    assert len(done.stderr.splitlines()) == 1
    (folder / "kohya_bucket.pth").unlink()  # as it says
    assert start(folder, program, found=False).stderr == ""


def test_a_failure_is_one_line_and_an_exit_code(folder, trainer, tmp_path):
    (tmp_path / "kohya_bucket" / "trainers").mkdir(parents=True)
    (tmp_path / "kohya_bucket" / "trainers" / "sdscripts.py").write_text("import toml_of_no_one", encoding="utf-8")
    program = f"sys.path[:0] = [{str(tmp_path)!r}, {str(trainer)!r}]; import library.train_util"
    done = start(folder, program, found=False)
    assert done.returncode == 2
    assert done.stderr == (
        "kohya_bucket: ModuleNotFoundError: No module named 'toml_of_no_one'. KOHYA_BUCKET=0 starts a training without "
        "it\n"
    )
