"""Takes the pictures in docs/images of the report and the explorer: python docs/figures/screenshots.py [FOLDER]

They show the demo images of this repository. Chromium, chromedriver and selenium must be there.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "reports")]

from browser import chromium  # noqa: E402

from kohya_bucket.cli import main as command_line  # noqa: E402

DEMO = ROOT / "configs" / "demo_images"


def kohya_bucket(*arguments: object) -> None:
    sys.argv = ["kohya-bucket", *map(str, arguments)]
    try:
        command_line()
    except SystemExit as ended:
        if ended.code:
            raise


def shoot(browser: Any, page: Path, width: int, height: int) -> Image.Image:
    """The page in a window of that width, from its top, at most so high."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    browser.get(page.as_uri())
    browser.execute_script(
        "const field = document.getElementById('size');"
        "if (field) { field.value = '1920×1080'; field.dispatchEvent(new Event('input')); }"
    )
    browser.execute_async_script(
        "const done = arguments[0];"
        "setTimeout(() => Promise.all([...document.images].map((image) => image.decode().catch(() => 0)))"
        ".then(done), 1500)"
    )
    return Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")


def below(browser: Any, section: str) -> tuple[int, int]:
    """Top and bottom of a section of the page, in pixels."""
    script = "const box = document.getElementById(arguments[0]).getBoundingClientRect(); return [box.top, box.bottom]"
    top, bottom = browser.execute_script(script, section)
    return int(top), int(bottom)


def main(folder: Path = IMAGES) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        report, explorer = Path(scratch) / "report.html", Path(scratch) / "explorer.html"
        config = Path(scratch) / "demo.toml"
        dataset = "[[datasets]]\nresolution = 512\nbatch_size = 2\nenable_bucket = true\n"
        config.write_text(f"{dataset}[[datasets.subsets]]\nimage_dir = '{DEMO}'\n", encoding="utf-8")
        kohya_bucket("analyze", DEMO, "--batch-size", 2, "--arch", "sd", "--html", report)
        kohya_bucket("explore", config, "--out", explorer, "--no-open")
        with chromium(Path(scratch) / "profile") as browser:
            page = shoot(browser, report, 1240, 2400)
            top = below(browser, "sheets")[0]
            parts = {
                "report": page.crop((0, 0, 1240, top + 300)),
                "report-top": page.crop((0, 0, 1240, below(browser, "advice")[1] + 8)),
                "contact-sheets": page.crop((0, top, 900, top + 480)),
                "explorer": shoot(browser, explorer, 1240, 1900),
            }
            parts["explorer-top"] = parts["explorer"].crop((0, 0, 1240, below(browser, "aspects")[1] + 8))
        for name, picture in parts.items():
            picture.save(folder / f"{name}.webp", quality=80, method=6)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
