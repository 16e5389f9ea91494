"""A real Chromium for tests of the page; skipped with the reason where there is none."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,900",
)  # fmt: skip
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[object]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    browser, driver = next(filter(None, map(shutil.which, _NAMES)), None), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium with chromedriver on this machine")
    options = webdriver.ChromeOptions()
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield session
    finally:
        session.quit()
