"""Takes the pictures in docs/images of buckets and of both pages: python docs/figures/screenshots.py [FOLDER]

They show the demo images of this repository. Chromium, chromedriver and selenium must be there.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "reports")]

from browser import chromium  # noqa: E402

from kohya_bucket import KohyaBuckets  # noqa: E402
from kohya_bucket.cli import main as command_line  # noqa: E402
from kohya_bucket.images import list_images, read_sizes  # noqa: E402
from kohya_bucket.originals.loaders import LOADERS  # noqa: E402

DEMO = ROOT / "configs" / "demo_images"
_MOST_BYTES = 1_000_000
_THEMES = ("light", "dark")
_BUCKETS_STYLE = """
:root { --ground: #ffffff; --panel: #f4f4f1; --text: #1e2126; --soft: #59606a; --cut: rgba(205, 48, 24, 0.65); }
:root.dark { --ground: #0d1117; --panel: #1b1e21; --text: #e4e5e3; --soft: #9aa1aa; }
body { margin: 0; padding: 10px; width: 820px; background: var(--ground); color: var(--text);
  font: 13px/1.3 system-ui, "DejaVu Sans", sans-serif; }
.buckets { display: flex; flex-wrap: wrap; gap: 8px; align-items: stretch; }
.bucket { background: var(--panel); border-radius: 8px; padding: 6px 8px 8px; flex: 1 1 auto; }
.bucket div { display: flex; gap: 6px; align-items: flex-start; margin-top: 6px; }
.image { position: relative; overflow: hidden; flex: none; }
.image img { display: block; width: 100%; height: 100%; image-orientation: none; }
.image i { position: absolute; box-shadow: 0 0 0 900px var(--cut); outline: 1.5px solid #fff; }
.missed { outline: 2px dashed var(--soft); outline-offset: 1px; } .missed > * { opacity: 0.22; }
.key { display: flex; gap: 22px; margin-top: 10px; color: var(--soft); }
.key b { display: inline-block; width: 14px; height: 14px; margin-right: 7px; vertical-align: -2px; }
"""


def kohya_bucket(*arguments: object) -> None:
    sys.argv = ["kohya-bucket", *map(str, arguments)]
    try:
        command_line()
    except SystemExit as ended:
        if ended.code:
            raise


def shoot(browser: Any, page: Path, width: int, height: int, scale: int = 1) -> Image.Image:
    """The page in a window of that width, from its top, at most so high; `scale` pixels for each of the window's."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
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


def buckets_page(theme: str) -> str:
    """Demo images in their buckets, what is cut off of them, and which an epoch of sd-scripts' loader leaves out.

    Of each bucket those that lose most; without turned ones, which a browser turns, and buckets of one image.
    """
    scan = read_sizes(list_images(DEMO))
    files, placed = [Path(path) for path in scan.paths], KohyaBuckets(512).place(scan.sizes)
    _, bucket = np.unique(placed.bucket_sizes, axis=0, return_inverse=True)
    bucket = bucket.reshape(-1)
    *_, epoch = LOADERS["sd-scripts"].epochs(bucket, 4, 1, 2, np.random.default_rng(0))
    trained = set(np.concatenate([rows for step in epoch for rows in step]).tolist())
    fit = (np.bincount(bucket)[bucket] > 1) & (placed.crop_loss < 0.5)
    fit[scan.rotated()] = False
    boxes: dict[str, list[str]] = {}
    for i in sorted(np.flatnonzero(fit).tolist(), key=lambda i: -placed.crop_loss[i]):
        scale = 0.103
        (width, height), (wide, tall) = placed.resized_sizes[i] * scale, placed.bucket_sizes[i] * scale
        (left, top), *_ = placed.select(np.array([i])).cuts[:, :2] * scale
        missed = "" if i in trained else " missed"
        kept = f"left: {left:.1f}px; top: {top:.1f}px; width: {wide:.1f}px; height: {tall:.1f}px"
        boxes.setdefault(str(placed.bucket(i)), []).append(
            f'<span class="image{missed}" style="width: {width:.1f}px; height: {height:.1f}px">'
            f'<img src="{files[i].as_uri()}" alt=""><i style="{kept}"></i></span>'
        )
    drawn = "".join(
        f'<section class="bucket">{name}<div>{"".join(images[:3])}</div></section>'
        for name, images in boxes.items()
        if len(images) > 1
    )
    key = (
        '<b style="background: var(--cut)"></b>cut off, so that it fits its bucket',
        '<b class="missed"></b>missed in an epoch of sd-scripts alone (imitated: batches of 4, 8 loader workers)',
    )
    told = "".join(f"<span>{one}</span>" for one in key)
    return (
        f'<!doctype html><html class="{theme}"><meta charset="utf-8"><style>{_BUCKETS_STYLE}</style>'
        f'<div class="buckets">{drawn}</div><div class="key">{told}</div></html>'
    )


def moving(browser: Any, page: Path) -> list[tuple[Image.Image, int]]:
    """The explorer while settings and order change: frames with the milliseconds that each is shown."""
    frames = [(shoot(browser, page, 900, 620), 1600)]

    def add(script: str, milliseconds: int) -> None:
        browser.execute_async_script(f"const done = arguments[0]; {script}; setTimeout(done, 500)")
        picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        frames.append((picture, milliseconds))

    def scroll(to: str) -> None:
        distance = browser.execute_script(f"return document.getElementById('{to}').getBoundingClientRect().top - 8")
        for _ in range(4):
            add(f"scrollBy({{top: {distance / 4}, behavior: 'instant'}})", 120)

    def settings(**values: object) -> Callable[[], None]:
        return lambda: add(f"explorer.settings.put({values})", 1500)

    for step in (settings(max=640), settings(max=1024, steps=32), lambda: scroll("images")):
        step()
    frames[-1] = frames[-1][0], 1500
    order = "document.querySelectorAll('#images [aria-label=Order] button')[{}].click()"
    add(order.format(1), 1600)
    add(order.format(2), 1600)
    add("document.querySelector('[role=gridcell]').click()", 2200)
    return frames


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
                "report": page.crop((0, 0, 1240, top + 620)),
                "contact-sheets": page.crop((0, top, 1240, top + 520)),
                "explorer": shoot(browser, explorer, 1240, 1900),
            }
            parts["explorer-top"] = parts["explorer"].crop((0, 0, 1240, below(browser, "aspects")[1] + 8))
            for theme in _THEMES:
                (Path(scratch) / "buckets.html").write_text(buckets_page(theme), encoding="utf-8")
                whole = shoot(browser, Path(scratch) / "buckets.html", 840, 600, scale=2)
                bottom = browser.execute_script("return document.querySelector('.key').getBoundingClientRect().bottom")
                parts[f"buckets-{theme}"] = whole.crop((0, 0, 1680, 2 * int(bottom) + 20))
            frames = moving(browser, explorer)
        for name, picture in parts.items():
            picture.save(folder / f"{name}.webp", quality=80, method=6)
        (first, _), *others = frames
        file = folder / "explorer-moving.webp"
        first.save(file, save_all=True, append_images=[picture for picture, _ in others], loop=0, quality=70, method=6,
                   duration=[milliseconds for _, milliseconds in frames])  # fmt: skip
        if file.stat().st_size > _MOST_BYTES:
            raise SystemExit(f"{file.name} has {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
