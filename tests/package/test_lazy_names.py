"""What a type checker is told about a package's names is what they are, and they cost nothing until they are used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kohya_bucket
from kohya_bucket.extras import importer

ROOMS = ["kohya_bucket", *(f"kohya_bucket.{room}" for room in ("buckets", "images", "latents", "planning"))]


@pytest.mark.parametrize("package", ROOMS)
def test_names_are_what_the_type_checker_is_told(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__
    told = {
        alias.asname: statement.module
        for statement in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8")))
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname == alias.name != "__version__"
    }
    assert sorted(told) == module.__all__
    for name, home in told.items():
        assert getattr(module, name) is getattr(importlib.import_module(str(home)), name)
    assert dir(module) == module.__all__
    with pytest.raises(AttributeError, match="no attribute 'Bukket'"):
        module.Bukket  # noqa: B018


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    get = importer("p", {"kohya_bucket.datasets.no_such_module": ["A"]})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):  # our own mistake, not a missing extra
        get("A")
    code = "import sys; sys.modules['torch'] = None; from kohya_bucket import BucketedDataset"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd())
    assert "BucketedDataset needs torch, which is not installed: pip install torch" in done.stderr


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import kohya_bucket", ("numpy", "PIL", "torch", "pyarrow")),
        (
            "import kohya_bucket.images.scan_worker",
            ("numpy", "PIL", "torch", "pyarrow", "kohya_bucket.images.metadata_cache"),
        ),
        ("from kohya_bucket import read_sizes", ("torch", "pyarrow")),
    ],
)
def test_what_is_not_imported(code: str, absent: tuple[str, ...]) -> None:
    assert not loaded_by(code) & set(absent)


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after some code."""
    folder = Path(str(kohya_bucket.__file__)).parents[1]
    code += "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("name", "most", "others"),
    [("KohyaBuckets", 20, {"numpy"}), ("plan_epoch", 25, {"numpy"}), ("BucketBatchSampler", 31, {"numpy", "torch"})],
)
def test_the_core_stands_alone(name: str, most: int, others: set[str]) -> None:
    """Of this package it loads few files, and of all others numpy (and torch) alone."""
    loaded = loaded_by(f"from kohya_bucket import {name}")
    assert sum(module.partition(".")[0] == "kohya_bucket" for module in loaded) <= most
    assert loaded & {"numpy", "torch", "PIL", "toml", "typer", "rich", "pyarrow", "yaml"} == others


# Of a trainer that runs, files, caches and seams: what reads its configs, and what is said of them, is for commands.
_FOR_COMMANDS = {"config", "doctor", "cache_doctor", "plan", "subject", "subjects", "file_findings", "wanted_latents"}


@pytest.mark.parametrize(
    ("trainer", "most", "needed"),
    [("sdscripts", 92, ""), ("anima_lora", 86, ""), ("ai_toolkit", 89, "ai_toolkit.config"), ("musubi", 97, "")],
)
def test_a_running_door_reads_no_configs(trainer: str, most: int, needed: str) -> None:
    loaded = loaded_by(f"import kohya_bucket.trainers.{trainer}.seams")
    ours = {module.removeprefix("kohya_bucket.") for module in loaded if module.partition(".")[0] == "kohya_bucket"}
    assert len(ours) <= most
    assert {module.partition(".")[0] for module in ours}.isdisjoint({"cli", "reports", "originals"})
    rooms = {module: set(module.split(".")[2:]) for module in ours if module.startswith("trainers.")}
    assert not [module for module, names in rooms.items() if names & _FOR_COMMANDS and f"trainers.{needed}" != module]


# Packages that are not there: what an embedding program leaves out of its environment.
_ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Absent())
import kohya_bucket
"""
_PLAN = """
placement = kohya_bucket.KohyaBuckets.for_arch("sdxl").place([(3000, 2000), (1080, 1920)] * 5)
plan = kohya_bucket.plan_epoch(placement.bucket_index, 4, world_size=2)
assert plan.ledger().missed == 0
"""
_PREVIEW = """
found = kohya_bucket.preview({"datasets": [{"resolution": 512, "subsets": [{"image_dir": "configs/demo_images"}]}]})
assert found.steps and found.buckets and not found.errors, found
"""


@pytest.mark.parametrize(
    ("program", "absent"),
    [(_PLAN, ("typer", "click", "rich", "toml", "PIL", "torch")), (_PREVIEW, ("typer", "click", "rich", "torch"))],
    ids=["plan_epoch", "preview"],
)
def test_an_embedding_program_needs_no_command_line(program: str, absent: tuple[str, ...]) -> None:
    code = _ABSENT.format(absent=absent) + program
    folder = Path(str(kohya_bucket.__file__)).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
