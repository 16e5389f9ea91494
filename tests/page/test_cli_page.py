"""docs/cli.md is what the help texts say, docs/api.md names what is public, and mkdocs.yml lists every page."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import kohya_bucket
from kohya_bucket.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#([^)]+))?\)")


def _made(script: str) -> str:
    spec = importlib.util.spec_from_file_location(script, DOCS / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


def test_the_page_is_made_from_the_help_texts() -> None:
    made = _made("make_cli")
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == made, "run: python docs/make_cli.py"
    assert all(f"\n## kohya-bucket {name}\n" in made for name in COMMANDS)


def test_the_api_page_is_made_from_the_docstrings() -> None:
    made = _made("make_api")
    assert (DOCS / "api.md").read_text(encoding="utf-8") == made, "run: python docs/make_api.py"
    named = re.findall(r"^- \*\*`kohya_bucket\.(\w+)`", made, re.MULTILINE)
    assert sorted(named) == sorted(set(kohya_bucket.__all__) - {"__version__"})


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(p.name for p in DOCS.glob("*.md"))


@pytest.mark.parametrize("name", sorted(set(kohya_bucket.__all__) - {"__version__"}))
def test_the_api_page_knows_each_parameter_that_is_described(name: str) -> None:
    try:
        public = getattr(kohya_bucket, name)
    except ImportError as error:
        pytest.skip(str(error))
    methods = vars(public).values() if inspect.isclass(public) else ()
    for one in (public, *filter(inspect.isfunction, methods)):
        section = re.search(r"^Args:\n((?:    .*\n|\n)+)", f"{inspect.getdoc(one) or ''}\n", re.MULTILINE)
        described = re.findall(r"^    (\S.*?): ", section[1], re.MULTILINE) if section else []
        assert not described or set(described) <= inspect.signature(one).parameters.keys(), one


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page) -> None:
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        file = (page.parent / target).resolve()
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), f"{target}#{anchor}"
