"""Fixtures: the folder of reference tables, and the real sd-scripts where there is a checkout."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
# of the tests of a trainer: how their files begin, and what names its checkout
CHECKOUTS = {
    "test_sdscripts": "SD_SCRIPTS_DIR",
    "test_musubi": "MUSUBI_DIR",
    "test_ai_toolkit": "AI_TOOLKIT_DIR",
    "test_anima_lora": "ANIMA_LORA_DIR",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference", metavar="DIR", type=Path, default=HERE / "reference", help="folder with reference tables"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "training_run(kind): a run of a real trainer, which the compatibility page names"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("training_run"):
            item.user_properties.append(("training run", mark.args[0]))


class Absent(pytest.Module):
    """The tests of a trainer that is not there. They are skipped as one, and their file is not read."""

    variable = ""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"{self.variable} is not set: no checkout to compare with")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Absent | None:
    variable = next((value for name, value in CHECKOUTS.items() if module_path.name.startswith(name)), None)
    if variable is None or os.environ.get(variable):
        return None
    absent = Absent.from_parent(parent, path=module_path)
    absent.variable = variable
    return absent


@pytest.fixture(scope="session")
def reference_dir(request: pytest.FixtureRequest) -> Path:
    return request.config.getoption("--reference")


@pytest.fixture(scope="session")
def sd_scripts_dir() -> Path:
    name = os.environ.get("SD_SCRIPTS_DIR")
    if not name:
        pytest.skip("SD_SCRIPTS_DIR is not set: no sd-scripts checkout to compare with")
    path = Path(name).resolve()
    if not (path / "library").is_dir() or not (path / "train_network.py").is_file():
        pytest.fail(f"SD_SCRIPTS_DIR={name} is not an sd-scripts checkout")
    return path


@pytest.fixture(scope="session")
def musubi_source() -> Path:
    name = os.environ.get("MUSUBI_DIR")
    if not name:
        pytest.skip("MUSUBI_DIR is not set: no checkout of musubi-tuner")
    source = Path(name).resolve() / "src"
    if not (source / "musubi_tuner").is_dir():
        pytest.fail(f"MUSUBI_DIR={name} is not a musubi-tuner checkout")
    for package in ("torch", "accelerate", "safetensors", "einops", "toml", "av"):
        pytest.importorskip(package, reason=f"{package} is not installed here")
    return source


@pytest.fixture(scope="session")
def unpatched(sd_scripts_dir: Path) -> SimpleNamespace:
    """sd-scripts as it is, imported once. `train_util` has what was defined there until 0.10, wherever that is now."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(sd_scripts_dir))
    try:
        from library import config_util, model_util
        from sdscripts_support import LibraryNames

        names = LibraryNames()
    except ImportError as error:
        pytest.skip(f"sd-scripts' own dependencies are not installed here: {error}")
    return SimpleNamespace(root=sd_scripts_dir, train_util=names, config_util=config_util, model_util=model_util)


@pytest.fixture
def patched(unpatched: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """The same modules with the adapter in them; taken out again afterwards."""
    from kohya_bucket.trainers import sdscripts

    sdscripts.install()
    assert sdscripts.is_active()
    yield unpatched
    sdscripts.uninstall()
    assert not sdscripts.is_active()
