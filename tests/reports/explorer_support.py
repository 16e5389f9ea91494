"""An explorer in a browser: opened, fed with files, and asked."""

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.support.wait import WebDriverWait

from kohya_bucket.reports.explorer_page import render_explorer

AXE = "axe-core@4.14.1"


def open_explorer(browser: Any, folder: Path, page: str | None = None) -> None:
    """A page from a file, empty unless one is given."""
    path = folder / "explorer.html"
    path.write_text(page or render_explorer(), encoding="utf-8", newline="\n")
    browser.get_log("browser")
    browser.get(path.as_uri())


def give(browser: Any, images: Path, count: int) -> None:
    """Choose a folder, and wait until all its images are read and placed."""
    browser.find_element("id", "folder").send_keys(str(images))
    until(browser, f"return +document.documentElement.dataset.read === {count}")


def until(browser: Any, script: str) -> Any:
    return WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda b: b.execute_script(script))


def change(browser: Any, **values: Any) -> None:
    """Set fields of the form, and wait until all images are placed by them."""
    before = browser.execute_script("return document.documentElement.dataset.placed")
    browser.execute_script("explorer.settings.put(arguments[0])", values)
    until(browser, f"return document.documentElement.dataset.placed !== {json.dumps(before)}")


def asked(browser: Any, script: str, *arguments: Any) -> Any:
    """What an asynchronous function's body returns."""
    body = (
        f"const done = arguments[arguments.length - 1], run = async (...args) => {{ {script} }};"
        "run(...arguments).then((x) => done(JSON.stringify(x)), (e) => done(JSON.stringify({failed: String(e)})))"
    )
    found = json.loads(browser.execute_async_script(body, *arguments))
    assert not (isinstance(found, dict) and "failed" in found), found
    return found


@cache
def axe_source() -> str:
    """axe-core's script: the file that AXE_CORE names, or from npm into the user's cache. Skips where there is none."""
    given = os.environ.get("AXE_CORE")
    if given:
        return Path(given).read_text(encoding="utf-8")
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kohya_bucket"
    archive = home / f"{AXE.replace('@', '-')}.tgz"
    npm = shutil.which("npm")
    if not archive.exists():
        if npm is None:
            pytest.skip("axe-core is not here: set AXE_CORE to its axe.min.js, or install npm")
        home.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([npm, "pack", "--silent", AXE], cwd=home, capture_output=True, text=True, timeout=60)
        if done.returncode or not archive.exists():
            pytest.skip(f"axe-core is not here, and npm does not bring it: {done.stderr[-200:]}")
    with tarfile.open(archive) as packed:
        member = packed.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode("utf-8")


def accessibility_faults(browser: Any) -> Sequence[Any]:
    """What axe-core finds on the page as it is shown, by all its rules."""
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": axe_source()})
    return asked(
        browser,
        "const found = await axe.run(document, {resultTypes: ['violations']});"
        "return found.violations.map((v) => [v.id, v.nodes.slice(0, 3).map((n) => n.html + n.failureSummary)])",
    )
