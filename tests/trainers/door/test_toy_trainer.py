"""Any trainer becomes exact, same-shaped and resumable with a short door, which knows nothing of another trainer's."""

import ast
import collections
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
SIZES = [(300 + 37 * i % 400, 280 + 53 * i % 390) for i in range(41)]
ROWS = [
    [[f"{i}.png", SIZES[i], 1 + (i % 5 == 0)] for i in range(25)],
    [[f"{i}.png", SIZES[i], 1] for i in range(25, 41)],
]
ASKED = collections.Counter({name: times for rows in ROWS for name, _, times in rows})


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """The trainer as a package of its own, with its door open."""
    package = tmp_path / "toys"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    source = (HERE / "toy_trainer.py").read_text(encoding="utf-8")
    (package / "trainer.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(HERE))
    importlib.invalidate_caches()
    door = importlib.import_module("toy_door")
    door.install(quiet=True)
    yield importlib.import_module("toys.trainer")
    door.DOOR.close()
    for name in ("toys", "toys.trainer", "toy_door"):
        sys.modules.pop(name, None)


def train(toys, *, batch_size=2, workers=0, epochs=3, resume="", stop=0, state=""):
    sets = [toys.PictureSet([toys.Picture(n, tuple(s), t) for n, s, t in rows], batch_size) for rows in ROWS]
    return toys.train(SimpleNamespace(sets=sets, epochs=epochs, workers=workers, resume=resume, stop=stop, state=state))


def trained(steps, epoch):
    return collections.Counter(name for number, names, _ in steps if number == epoch for name in names)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_is_exact(toys, workers):
    steps = train(toys, workers=workers)
    assert [trained(steps, epoch) for epoch in range(3)] == [ASKED] * 3
    orders = [[names for number, names, _ in steps if number == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert len({shape for _, _, shape in steps}) > 2  # this package's buckets, not the trainer's two


def test_without_its_door_it_is_not(toys):
    sys.modules["toy_door"].DOOR.close()
    steps = train(toys, workers=2)
    assert [trained(steps, epoch) for epoch in range(3)] != [ASKED] * 3


def test_a_resumed_run_goes_on_with_the_next_image(toys, tmp_path):
    whole = train(toys)
    state = str(tmp_path / "state")
    first = train(toys, stop=7, state=state)
    rest = train(toys, resume=state, epochs=2)
    assert first == whole[:7]
    assert [(names, shape) for _, names, shape in first + rest] == [
        (names, shape) for number, names, shape in whole if number < 2
    ]


@pytest.mark.slow
def test_ranks_train_every_picture_as_often_as_asked(toys, tmp_path):
    out = tmp_path / "seen"
    args = {"sets": ROWS, "batch_size": 2, "epochs": 2, "workers": 0, "resume": "", "stop": 0, "state": ""}
    (tmp_path / "start.py").write_text(
        "import json, os, pathlib, sys\nimport toy_door\ntoy_door.install(quiet=True)\nimport toys.trainer as t\n"
        "from types import SimpleNamespace\n"
        "a = SimpleNamespace(**json.loads(sys.argv[1]))\n"
        "a.sets = [t.PictureSet([t.Picture(n, tuple(s), k) for n, s, k in rows], a.batch_size) for rows in a.sets]\n"
        f"seen = t.train(a)\npathlib.Path(r'{out}.' + os.environ['RANK']).write_text(json.dumps(seen))\n"
        "sys.stdout.flush()\nos._exit(0)\n",
        encoding="utf-8",
    )
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE), str(HERE.parents[2])]),
        "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "start.py"), json.dumps(args)], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    for epoch in range(2):
        assert trained(ranks[0], epoch) + trained(ranks[1], epoch) == ASKED


@pytest.mark.posix("links of POSIX")
def test_a_program_of_a_checkout_that_is_reached_by_a_link(toys, tmp_path, tmp_path_factory, monkeypatch):
    """It was imported before the door is opened, and has names of the trainer's bound."""
    door = sys.modules["toy_door"].DOOR
    door.close()
    (tmp_path / "train_toys.py").write_text("from toys.trainer import make_accelerator\n", encoding="utf-8")
    link = tmp_path_factory.mktemp("elsewhere") / "link"
    link.symlink_to(tmp_path)
    monkeypatch.syspath_prepend(str(link))
    for name in ("toys", "toys.trainer"):
        del sys.modules[name]
    program = importlib.import_module("train_toys")
    try:
        alone = program.make_accelerator
        door.open(quiet=True)
        assert program.make_accelerator is sys.modules["toys.trainer"].make_accelerator is not alone
        door.close()
        assert program.make_accelerator is alone
    finally:
        del sys.modules["train_toys"]


def test_another_version_is_refused(toys, capsys):
    door = sys.modules["toy_door"].DOOR
    door.close()
    batch_of = toys.PictureSet.batch_of
    del toys.PictureSet.batch_of
    try:
        door.open(quiet=True, at_once=False)
        assert "PictureSet.batch_of does not exist" in door.refusal
        with pytest.raises(SystemExit) as error:
            toys.PictureGroup([[1]])
        assert error.value.code == 2
        assert door.refusal in capsys.readouterr().err
    finally:
        toys.PictureSet.batch_of = batch_of


def test_a_loader_that_pytorch_refuses_ends_the_run_in_one_line(toys, capsys):
    with pytest.raises(SystemExit) as error:
        train(toys, workers=-1)
    assert error.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(
        "max_data_loader_n_workers is -1, but must be a whole number of 0 or more: 0 loads without workers"
    )


def test_the_trainer_and_its_door_are_short_and_know_no_other_trainer():
    for name, most in (("toy_trainer.py", 100), ("toy_door.py", 150)):
        assert len((HERE / name).read_text(encoding="utf-8").splitlines()) <= most
    tree = ast.parse((HERE / "toy_door.py").read_text(encoding="utf-8"))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in imported if "sdscripts" in module]
