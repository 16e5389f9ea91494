"""What error messages tell people to install exists, and is what the extras bring."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import toml

from kohya_bucket import extras

ROOT = Path(__file__).parents[2]
_REGISTRY = re.compile(r"""pip install (?:-U |--upgrade )?["']?kohya[-_]bucket""")


def test_the_packages_are_those_of_the_extras() -> None:
    declared = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra, (names, _) in extras.EXTRAS.items():
        own = [re.split(r"[><=]", line)[0] for line in declared[extra] if not line.startswith("kohya-bucket")]
        opencv = ["opencv-python-headless"] if extra == "torch" else []
        assert own == [*names, *opencv]
    assert set(declared) - set(extras.EXTRAS) == {"test", "dev", "docs", "all", "cache", "vae", "analyze"}


def test_no_message_and_no_page_asks_a_registry_for_the_package() -> None:
    """It is on none. The last section of the release steps is about the time when it is."""
    files = [*(ROOT / "kohya_bucket").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    asked = [
        f"{file.relative_to(ROOT).as_posix()}: {line}"
        for file in files
        if file.name != "CONTRIBUTING.md"
        for line in file.read_text(encoding="utf-8").splitlines()
        if _REGISTRY.search(line)
    ]
    assert asked == []


def test_one_place_words_it() -> None:
    others = {"by_pillow.py", "files.py", "diffusers_vae.py", "doctor.py", "extras.py", "text_encoder.py"}
    asking = {f.name for f in (ROOT / "kohya_bucket").rglob("*.py") if "pip install " in f.read_text(encoding="utf-8")}
    assert asking == others


def test_the_package_names_no_address_of_its_own() -> None:
    assert "urls" not in toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_commands() -> None:
    assert extras.pip_install("parquet") == "pip install pyarrow"
    assert extras.pip_install("ray") == "pip install ray"


@pytest.mark.posix("asks a POSIX shell")
@pytest.mark.parametrize("path", ["/a/b.toml", "/my photos/b.toml", "/a & b", "/it's", "/a|b", "/$HOME `id`", "/{1,2}"])
def test_a_path_in_a_command_is_one_argument(path: str) -> None:
    done = subprocess.run(["sh", "-c", f"printf %s {extras.argument(path)} end"], capture_output=True, text=True)
    assert done.stdout == f"{path}end"


def test_a_checkout_is_named_by_its_folder() -> None:
    assert extras.where_this_came_from() == extras.argument(ROOT)


def _installed(monkeypatch, tmp_path, origin: object) -> str:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return origin if origin is None else json.dumps(origin)

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Installed())
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "kohya_bucket" / "extras.py"))
    return extras.where_this_came_from()


def test_where_an_installed_package_came_from(monkeypatch, tmp_path) -> None:
    wheel = tmp_path / "my wheels" / "kohya_bucket.whl"
    assert _installed(monkeypatch, tmp_path, {"url": wheel.as_uri(), "archive_info": {}}) == extras.argument(wheel)
    git = {"url": "https://example.org/k.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert _installed(monkeypatch, tmp_path, git) == "git+https://example.org/k.git@abc"
    assert _installed(monkeypatch, tmp_path, None) == "kohya-bucket"  # from an index, which says no address
    assert _installed(monkeypatch, tmp_path, []) == "kohya-bucket"
