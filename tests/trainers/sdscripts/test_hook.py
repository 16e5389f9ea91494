"""Refusal and restraint of the import hook. What it does to the real sd-scripts is tested in `compat_tests/`."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

from kohya_bucket.errors import StorageError
from kohya_bucket.launch import _message, _noted_uses
from kohya_bucket.trainers.door.ranks import USED, note_use


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


def start(folder, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False, env=environment()
    )


def run(code, folder):
    prelude = "import sys; sys.path.insert(0, '.'); import kohya_bucket.trainers.sdscripts as kb; kb.install()\n"
    script = prelude + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False, env=environment()
    )


@pytest.fixture
def unknown_version(tmp_path):
    """A package with sd-scripts' module names whose classes have other methods."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "__init__.py").write_text("", encoding="utf-8")
    (library / "config_util.py").write_text("from . import train_util\nclass ConfigSanitizer: pass\n", encoding="utf-8")
    (library / "train_util.py").write_text(
        "from torch.utils.data import ConcatDataset\n"
        "class DatasetGroup(ConcatDataset): pass\n"
        "class BucketManager:\n    def __init__(self, everything): pass\n"
        "class BaseDataset:\n    def make_buckets(self): pass\n    def get_image_size(self, path): pass\n"
        "class DreamBoothDataset(BaseDataset): pass\n",
        encoding="utf-8",
    )
    return tmp_path


@pytest.mark.weekly
def test_an_unknown_version_is_refused_whole(unknown_version):
    code = """
        import library.train_util
        print(kb.why_inactive())
        print(kb.is_active(), library.train_util.BaseDataset.make_buckets.__module__)
    """
    done = run(code, unknown_version)
    assert "is not a version this adapter knows (it needs 0.10.1 or newer), so nothing was replaced" in done.stdout
    assert "BucketManager has no buckets, reso_to_id, resos" in done.stdout
    assert "ConfigSanitizer.sanitize_user_config does not exist" in done.stdout
    assert done.stdout.splitlines()[-1] == "False library.train_util"


@pytest.mark.weekly
def test_where_an_unknown_version_is_imported_already_install_says_so(unknown_version):
    code = """
        kb.uninstall()
        import library.train_util
        from kohya_bucket.errors import KohyaBucketError
        try:
            kb.install()
        except KohyaBucketError as error:
            print(error)
    """
    assert "BucketManager has no buckets, reso_to_id, resos" in run(code, unknown_version).stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "train",
    [
        "library.train_util.DatasetGroup([[1, 2]])",  # when the group is made
        pytest.param(  # or loaded
            "g = object.__new__(library.train_util.DatasetGroup); g.datasets = []; DataLoader(g)",
            marks=pytest.mark.weekly,
        ),
        pytest.param(
            "d = type('D', (Dataset,), {'image_data': {}, 'buckets_indices': []})(); DataLoader(d, shuffle=False)",
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_no_training_goes_on_without_the_plan(unknown_version, train):
    code = f"""
        from torch.utils.data import ConcatDataset, DataLoader, Dataset
        import library.train_util
        own = type("Own", (list,), {{"image_data": 1}})  # one name alone may be anybody's
        print(len(DataLoader(ConcatDataset([own([1, 2])]))), "other loaders work")
        {train}
        print("trained")
    """
    done = run(code, unknown_version)
    assert done.returncode == 2
    assert done.stdout.splitlines() == ["2 other loaders work"]
    assert done.stderr.splitlines()[-1].startswith("kohya_bucket: sd-scripts ")
    assert "Traceback" not in done.stderr


def test_another_projects_library_is_left_alone(tmp_path):
    (tmp_path / "library").mkdir()
    for name in ("__init__", "train_util", "config_util"):
        (tmp_path / "library" / f"{name}.py").write_text("x = 1\n", encoding="utf-8")
    done = run("import library.train_util\nprint(library.train_util.x, kb.is_active())", tmp_path)
    assert done.stdout.strip() == "1 False", done.stderr


def test_uninstall_takes_the_hook_out():
    from kohya_bucket.trainers import sdscripts

    before = list(sys.meta_path)
    sdscripts.install()
    sdscripts.install()
    assert len(sys.meta_path) == len(before) + 1
    sdscripts.uninstall()
    assert sys.meta_path == before


def launch(folder, *arguments):
    return start(folder, "-m", "kohya_bucket.launch", *arguments)


def test_the_launcher_takes_modules_from_the_scripts_own_folder(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"x = {name!r}\n", encoding="utf-8")
        (tmp_path / name / "trainer.py").write_text("import helper\nprint(helper.x)\n", encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path / "other"), str(tmp_path / "one"), environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "kohya_bucket.launch", str(tmp_path / "one" / "trainer.py")],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.strip() == "one", done.stderr


@pytest.mark.long
def test_the_launcher_runs_a_script_as_main(tmp_path):
    (tmp_path / "trainer.py").write_text(
        "import sys, helper\nprint(__name__, sys.argv, sys.path[0] != '', helper.x)\n", encoding="utf-8"
    )
    (tmp_path / "helper.py").write_text("x = 5\n", encoding="utf-8")
    done = launch(tmp_path, "trainer.py", "--a", "b")
    assert done.stdout.strip() == "__main__ ['trainer.py', '--a', 'b'] True 5", done.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = launch(elsewhere, str(tmp_path / "trainer.py"))
    assert done.returncode == 0
    names = "ai-toolkit, anima_lora, musubi-tuner or sd-scripts"
    told = f"kohya_bucket: trainer.py uses no datasets of {names}, so there was nothing to do"
    assert done.stderr.strip() == told


_TRAINER = "import pathlib\npathlib.Path('trained').touch()\n"
_SPAWN = (
    "import multiprocessing, runpy\nif __name__ == '__main__':\n"
    "    process = multiprocessing.get_context('spawn').Process(target=runpy.run_path, args=('train_network.py',))\n"
    "    process.start()\n    process.join()\n    raise SystemExit(process.exitcode)\n"
)


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [
        "subprocess.call([sys.executable, 'train_network.py'])",
        "subprocess.call([sys.executable, 'flux_train.py'], cwd='elsewhere')",
        "subprocess.call(['accelerate', 'launch', '--cpu', 'train_network.py'])",
        "os.system(sys.executable + ' train_network.py --dataset_config kohya_bucket/kohya_bucket.toml')",
        "os.execv(sys.executable, [sys.executable, 'train_network.py'])",
    ],
)
def test_a_trainer_that_a_script_starts_without_the_adapter_never_begins(tmp_path, call):
    (tmp_path / "elsewhere").mkdir()
    for trainer in ("train_network.py", "elsewhere/flux_train.py"):
        (tmp_path / trainer).write_text(_TRAINER, encoding="utf-8")
    (tmp_path / "script.py").write_text(f"import os, subprocess, sys\nsys.exit({call})\n", encoding="utf-8")
    done = launch(tmp_path, "script.py")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("kohya_bucket: script.py starts ")
    assert "in a process of its own, where it would train without kohya_bucket" in line
    assert not list(tmp_path.rglob("trained"))


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [
        "import subprocess, sys\ncode = 'import runpy; runpy.run_path(\"train_network.py\")'\n"
        "sys.exit(subprocess.call([sys.executable, '-c', code]))",
        "import subprocess, sys\nsubprocess.call([sys.executable, 'my_runner.py'])",
        _SPAWN,
    ],
)
def test_a_process_that_may_have_trained_without_the_adapter_is_said_at_the_end(tmp_path, script):
    for name in ("train_network.py", "my_runner.py"):
        (tmp_path / name).write_text(_TRAINER, encoding="utf-8")
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = launch(tmp_path, "script.py")
    assert (done.returncode, (tmp_path / "trained").exists()) == (2, True), done.stderr
    assert "none of the processes that it started" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_launcher_below_another_leaves_its_notes_to_it(monkeypatch):
    monkeypatch.delenv(USED, raising=False)
    with _noted_uses() as outer:
        outer.mkdir()
        with _noted_uses() as inner:
            assert inner == outer
        note_use()
        assert [file.name for file in outer.iterdir()] == [str(os.getpid())]
    assert not outer.exists()
    assert USED not in os.environ


def test_processes_that_are_no_trainers_change_nothing(tmp_path):
    calls = "subprocess.call([sys.executable, '-c', '1'])\nsubprocess.call([sys.executable, '-m', 'this'], stdout=-3)\n"
    (tmp_path / "script.py").write_text(f"import subprocess, sys\n{calls}sys.exit(0)\n", encoding="utf-8")
    done = launch(tmp_path, "script.py")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage"),
        (("missing.py",), "there is no trainer 'missing.py'"),
        (("-m", "missing.part"), "there is no module 'missing.part'"),
        (("-m", ""), "there is no module ''"),
    ],
)
def test_the_launcher_says_what_it_needs(tmp_path, arguments, message):
    done = launch(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_loaders_worker_had_to_say_is_said_alone():
    said = "s3://bucket/a: cannot be read: gone (6 tries in 9 s)"
    assert _message(StorageError(said)) == said
    try:
        raise StorageError(said) from OSError("gone")
    except StorageError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(StorageError, match="Traceback") as caught:
        wrapped.reraise()
    assert _message(caught.value) == said


@pytest.mark.weekly
def test_the_launcher_refuses_an_unknown_version_without_a_traceback(unknown_version):
    (unknown_version / "train.py").write_text("import library.config_util\n", encoding="utf-8")
    done = launch(unknown_version, "train.py")
    assert done.returncode == 2
    assert "ConfigSanitizer.sanitize_user_config" in done.stderr
    assert "Traceback" not in done.stderr
