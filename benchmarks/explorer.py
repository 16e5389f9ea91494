"""The explorer with a folder of many files, in a real Chromium: how long it reads, and how long the page is ever busy.

    python benchmarks/explorer.py [--files 10000]

Files are JPEG (half of them with a camera's EXIF block and its preview), PNG and WebP of 0.2 to 6 megapixels, in ten
folders. "Longest task" is what the browser itself reports of tasks over 50 ms, each of which is a moment in which the
page answers to nothing. Chromium and chromedriver must be there.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests" / "reports")]

from browser import chromium  # noqa: E402

from kohya_bucket.reports.explorer_page import render_explorer  # noqa: E402

WATCH = """
window.tasks = [];
window.heard = 0;
new PerformanceObserver((list) => tasks.push(...list.getEntries())).observe({type: "longtask"});
document.getElementById("folder").addEventListener("change", () => { heard = performance.now(); }, {capture: true});
"""
# Tasks that began before the page heard of a list of files are the browser's own.
LONGEST = """
const own = arguments[0], all = tasks.filter((e) => (e.startTime < heard) === own).map((e) => e.duration);
if (!own) tasks = [];
return all.length ? Math.max(...all) : 0
"""
# A real folder's handle, as the picker would return it: a dropped one, kept from the page.
KEEP = """
addEventListener("drop", (event) => {
  event.preventDefault();
  event.stopImmediatePropagation();
  event.dataTransfer.items[0].getAsFileSystemHandle().then((handle) => {
    window.showDirectoryPicker = async () => handle;
    window.kept = true;
  });
}, {capture: true, once: true});
"""
WAYS = {
    "dropped": "dropped on the page",
    "button": "*Choose a folder*, in browsers with `showDirectoryPicker` (Chromium)",
    "list": "*Choose a folder*, in others: the browser hands over one list of all files",
}


def make_files(folder: Path, count: int) -> None:
    """`count` files of 250 different contents."""
    rng = np.random.default_rng(0)
    contents = []
    kinds = ("jpg", "jpg", "jpg", "png", "webp")
    for i in range(min(250, count)):
        aspect, pixels = np.exp(rng.normal(0, 0.35)), 10 ** rng.uniform(5.3, 6.8)
        size = max(8, int((pixels * aspect) ** 0.5)), max(8, int((pixels / aspect) ** 0.5))
        small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        image, path = Image.fromarray(small).resize(size, Image.Resampling.BILINEAR), folder / f"one.{kinds[i % 5]}"
        exif = Image.Exif()
        exif[274], exif[37500] = 1 + i % 8, bytes(12_000)
        image.save(path, **({"exif": exif} if i % 2 and path.suffix == ".jpg" else {}))
        contents.append((path.suffix, path.read_bytes()))
        path.unlink()
    for i in range(count):
        ending, content = contents[i % len(contents)]
        to = folder / f"set_{i % 10}"
        to.mkdir(exist_ok=True)
        (to / f"{i:06d}{ending}").write_bytes(content)


def cpu_of(root: int) -> float:
    """Seconds of CPU of a process and all that it started (Linux)."""
    parents, spent = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        pid = int(status.parent.name)
        parents[pid], spent[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    mine = {root}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(spent.get(pid, 0) for pid in mine) / os.sysconf("SC_CLK_TCK")


def until(browser: object, script: str, seconds: float = 200) -> float:
    began = time.perf_counter()
    while not browser.execute_script(script):
        if time.perf_counter() - began > seconds:
            raise SystemExit(f"not within {seconds} s: {script}")
        time.sleep(0.02)
    return time.perf_counter() - began


def drag(browser: object, folder: Path) -> None:
    for kind in ("dragEnter", "dragOver", "drop"):
        data = {"items": [], "files": [str(folder)], "dragOperationsMask": 1}
        browser.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, "x": 600, "y": 180, "data": data})


def one_round(browser: object, page: str, folder: Path, count: int, way: str) -> dict[str, float]:
    out = {}
    browser.get(page)
    browser.execute_script(WATCH)
    if way == "button":
        browser.execute_script(KEEP)
        drag(browser, folder)
        until(browser, "return window.kept")
    began, spent = time.perf_counter(), cpu_of(browser.service.process.pid)
    if way == "dropped":
        drag(browser, folder)
    elif way == "button":
        browser.find_element("css selector", "#drop button.main").click()
    else:
        browser.find_element("id", "folder").send_keys(str(folder))
        until(browser, "return heard")
    out["list"] = time.perf_counter() - began if way == "list" else 0.0
    until(browser, f"return +document.documentElement.dataset.read === {count}")
    out["read"] = time.perf_counter() - began
    out["own_task"], out["read_task"] = (browser.execute_script(LONGEST, own) for own in (True, False))
    out["cpu"] = cpu_of(browser.service.process.pid) - spent
    times = []
    for name, value in (("max", 1536), ("steps", 32), ("resolution", "768")):
        before = browser.execute_script("return document.documentElement.dataset.placed")
        field = browser.find_element("css selector", f"input[name={name}]")
        browser.execute_script(
            "arguments[0].value = arguments[1]; window.asked = performance.now();"
            "arguments[0].dispatchEvent(new Event('input'))", field, value
        )  # fmt: skip
        until(
            browser,
            f"return document.documentElement.dataset.placed !== {before!r}"
            "&& (window.took = performance.now() - asked)",
        )
        times.append(browser.execute_script("return window.took"))
    out["change"], out["change_task"] = statistics.median(times), browser.execute_script(LONGEST, False)
    for part in range(60):
        browser.execute_script(
            "const all = document.getElementById('images');"
            "scrollTo(0, all.offsetTop + arguments[0] / 60 * all.offsetHeight)", part
        )  # fmt: skip
        time.sleep(0.05)
    time.sleep(1)
    out["scroll_task"] = browser.execute_script(LONGEST, False)
    out["nodes"] = browser.execute_script("return document.querySelectorAll('[role=gridcell]').length")
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    args, load = parser.parse_args(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder, page = Path(scratch) / "data", Path(scratch) / "explorer.html"
        folder.mkdir()
        make_files(folder, args.files)
        page.write_text(render_explorer(), encoding="utf-8", newline="\n")
        rows = []
        for way, told in WAYS.items():
            with chromium(Path(scratch) / f"profile_{way}") as browser:
                found = [one_round(browser, page.as_uri(), folder, args.files, way) for _ in range(args.rounds)]
                version = browser.capabilities["browserVersion"]
            worst = {key: max(f[key] for f in found) for key in found[0]}
            middle = {key: statistics.median(f[key] for f in found) for key in found[0]}
            cells = (
                f"{middle['read']:.1f}", f"{middle['list']:.1f}", f"{middle['cpu']:.1f}", f"{worst['own_task']:.0f}",
                f"{worst['read_task']:.0f}", f"{middle['change']:.0f}", f"{worst['change_task']:.0f}",
                f"{worst['scroll_task']:.0f}", str(worst["nodes"]),
            )  # fmt: skip
            rows.append(f"| {told} | {' | '.join(cells)} |")
    columns = (
        "folder", "all headers read and shown, s", "of it until the page gets the list, s",
        "CPU (all processes of the browser), s", "longest task of the browser's own before that, ms",
        "longest task of the page meanwhile, ms", "a setting changed: all placed and drawn, ms", "longest task",
        "longest task while scrolling through all, with pictures", "images with nodes",
    )  # fmt: skip
    head = [
        "# The explorer",
        "",
        f"{args.files:,} files in ten folders, on a page from a file. Where a browser has no `showDirectoryPicker`, it "
        "makes one list of all files in a single task of its own before the page gets it; otherwise the page asks for "
        "one file after the other.",
        "",
        f"| {' | '.join(columns)} |",
        f"| --- {'| ---: ' * (len(columns) - 1)}|",
    ]
    foot = [
        "",
        f"Median, and the worst, of {args.rounds} rounds; 0 ms: none of 50 ms or more. Chromium {version}, headless, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}; load"
        f" {load:.1f} when it began (up to 2 is this run alone).",
        "",
    ]
    text = "\n".join([*head, *rows, *foot])
    (REPO / "benchmarks" / "results" / "explorer.md").write_text(text, encoding="utf-8", newline="\n")
    print(text)


if __name__ == "__main__":
    main()
