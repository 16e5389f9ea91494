"""What pages show of Python exists: each name that they import, and the arguments of each call of one."""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
PAGES = {page.name: page for page in (*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md")}


@pytest.mark.parametrize("page", PAGES)
def test_calls_have_arguments_that_are_taken(page):
    names = {}
    blocks = [textwrap.dedent(block) for block in BLOCK.findall(PAGES[page].read_text(encoding="utf-8"))]
    for block in blocks:
        if block.startswith(">>>"):  # run as doctests
            continue
        nodes = list(ast.walk(ast.parse(block)))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kohya_bucket"):
                module = importlib.import_module(str(node.module))
                names |= {one.asname or one.name: getattr(module, one.name) for one in node.names}
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            known = isinstance(call.func, ast.Name) and call.func.id in names
            if known and not any(isinstance(one, ast.Starred) for one in call.args):
                given = {one.arg: None for one in call.keywords if one.arg}
                inspect.signature(names[call.func.id]).bind(*call.args, **given)
