"""The program that runs the suite per checkout, on a made-up checkout and made-up tests; and the page it wrote."""

import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import checkouts
import matrix
import matrix_page
import pytest

README = matrix.ROOT / "README.md"
TESTS = {
    "test_sdscripts_good.py": """
        import os, pathlib, pytest
        @pytest.mark.parametrize("number", [1, 2])
        def test_passes(number, request):
            request.node.user_properties.append(("training run", "cached on disk"))
        def test_is_skipped():
            pytest.skip("this version has no such thing")
    """,
    "test_sdscripts_bad.py": """
        import os, pathlib
        def test_fails():
            assert 1 == 2, "one is not two"
        def test_writes():
            (pathlib.Path(os.environ["SD_SCRIPTS_DIR"]) / "left.txt").touch()
    """,
    "test_sdscripts_slow.py": "import time\ndef test_waits():\n    time.sleep(600)\n",
}


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkouts" / "v1.2.3"
    (root / "library").mkdir(parents=True)
    for name in ("train_network.py", "library/train_util.py"):
        (root / name).touch()
    (root / ".laid").write_text("0123456789abcdef 2026-01-02\n", encoding="utf-8")
    return root


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Made-up tests in place of the real ones, and results and page of their own."""
    folder = tmp_path / "suite"
    folder.mkdir()
    for name, text in TESTS.items():
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.setattr(matrix, "HERE", folder)
    monkeypatch.setattr(matrix_page, "PAGE", tmp_path / "compatibility.md")
    for module in (matrix, matrix_page):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return SimpleNamespace(page=tmp_path / "compatibility.md", result=tmp_path / "results" / "v1.2.3.json")


def run(*arguments):
    return matrix.main(list(map(str, arguments)))


@pytest.mark.weekly
def test_results_are_counted_and_written_down(checkout, suite, capsys):
    only = ["--only", "test_sdscripts_good.py", "test_sdscripts_bad.py"]
    assert run(checkout, "--python", sys.executable, *only) == 1
    files = json.loads(suite.result.read_text(encoding="utf-8"))["files"]
    good, bad = (files[f"test_sdscripts_{name}.py"] for name in ("good", "bad"))
    assert (good["passed"], good["failed"], good["runs"]) == (2, [], {"cached on disk": 2})
    assert list(good["skipped"].values()) == [1]
    assert bad["passed"] == 1
    assert "test_sdscripts_bad::test_fails: AssertionError: one is not two" in bad["failed"][0]
    assert bad["failed"][1:] == ["wrote into the checkout: left.txt"]
    assert "| sd-scripts | v1.2.3 | 2026-01-02 |" in suite.page.read_text(encoding="utf-8")
    assert "Newest version of sd-scripts verified" not in suite.page.read_text(encoding="utf-8")
    page = suite.result.with_name("README.md").read_text(encoding="utf-8")
    assert "| v1.2.3 | 01234567 | 2026-01-02 |" in page
    assert "- cached on disk: v1.2.3 (2)" in page
    assert "this version has no such thing: v1.2.3 (1)" in page
    assert "one is not two" in page
    assert "2 passed, 1 skipped, 0 failed" in capsys.readouterr().out


@pytest.mark.weekly
def test_a_test_file_that_takes_too_long_is_stopped(checkout, suite):
    only = ["--only", "test_sdscripts_slow.py"]
    assert run(checkout, "--python", sys.executable, *only, "--minutes", 0.05) == 1
    files = json.loads(suite.result.read_text(encoding="utf-8"))["files"]
    assert files["test_sdscripts_slow.py"]["failed"] == ["longer than 0.05 minutes: stopped"]


@pytest.mark.weekly
def test_a_run_goes_on_where_the_last_one_was(checkout, suite, capsys):
    only = ["--only", "test_sdscripts_good.py"]
    assert run(checkout, "--python", sys.executable, *only) == 0
    assert "passed" in capsys.readouterr().out
    assert run(checkout, "--python", sys.executable, *only) == 0
    assert "test_sdscripts_good.py: known from" in capsys.readouterr().out
    test = matrix.HERE / "test_sdscripts_good.py"
    test.write_text(test.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert run(checkout, "--python", sys.executable, *only) == 0
    assert "known from" not in capsys.readouterr().out


def test_the_environment_is_in_a_checkout_or_beside_it(checkout):
    beside = checkout.parent
    places = [beside / "venv", beside / ".venv", beside / "v1.2.3-venv", checkout / "venv", checkout / ".venv"]
    assert checkouts.environment_of(checkout) is None
    assert checkouts.newest(beside) is None
    for place in places:
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "python").touch()
        assert checkouts.environment_of(checkout) == place / "bin" / "python"
    assert checkouts.newest(beside).name == "v1.2.3"


def test_the_newest_is_no_fork(checkout):
    beside = checkout.parent
    (beside / "venv" / "bin").mkdir(parents=True)
    (beside / "venv" / "bin" / "python").touch()
    for name, date in (("older", "2025-01-01"), ("fork-of-somebody", "2026-12-31")):
        (beside / name / "library").mkdir(parents=True)
        for file in ("train_network.py", "library/train_util.py"):
            (beside / name / file).touch()
        (beside / name / ".laid").write_text(f"0 {date}", encoding="utf-8")
    assert checkouts.newest(beside).name == "v1.2.3"


def test_a_checkout_of_git_is_named_by_its_tag(checkout):
    (checkout / ".laid").unlink()
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x", "--date", "2026-03-04"], ["tag", "v9.9.9"]):
        subprocess.run([*git, *command], check=True)
    found = checkouts.identify(checkout)
    assert (found.name, len(found.commit), len(found.date)) == ("v9.9.9", 40, 10)


def test_a_checkout_of_musubi_tuner_has_tests_and_a_name_of_its_own(tmp_path, suite):
    for folder, fork in (("musubi-v0.1.2", False), ("fork-of-somebody", True)):
        (tmp_path / folder / "src" / "musubi_tuner").mkdir(parents=True)
        found = checkouts.identify(tmp_path / folder)
        assert (found.trainer, found.is_fork) == ("musubi-tuner", fork)
        assert found.name == f"musubi-{found.version}"
    (matrix.HERE / "test_musubi_good.py").touch()
    assert [file.name for file in matrix.test_files("musubi-tuner", None)] == ["test_musubi_good.py"]
    assert {file.name for file in matrix.test_files("sd-scripts", None)} == set(TESTS)


@pytest.mark.parametrize("arguments", [["nowhere"], ["CHECKOUT"], ["CHECKOUT", "--python", "nothing"]])
def test_mistakes_are_one_line(checkout, suite, capsys, arguments):
    assert run(*[checkout if word == "CHECKOUT" else word for word in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("matrix: ")
    assert said.count("\n") == 1


def test_a_test_file_that_is_not_there(checkout, suite, capsys):
    assert run(checkout, "--python", sys.executable, "--only", "test_other.py") == 2
    assert "--only test_other.py: not one of test_sdscripts_bad.py," in capsys.readouterr().err


def test_the_page_is_what_the_results_say():
    assert matrix_page.PAGE.read_text(encoding="utf-8") == matrix_page.page_of(matrix_page.read_results())


def test_the_readme_names_the_newest_version_verified():
    newest = matrix_page.newest_verified(matrix_page.read_results())
    assert newest
    assert f"Newest version verified: {newest}" in README.read_text(encoding="utf-8")
