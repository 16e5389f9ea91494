import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_from_the_tests() -> None:
    spec = importlib.util.spec_from_file_location("make_reported", DOCS / "make_reported.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.page()
    assert (DOCS / "troubleshooting.md").read_text(encoding="utf-8") == made, "run: python docs/make_reported.py"
