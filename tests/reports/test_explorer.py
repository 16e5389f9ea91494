"""The explorer in a real browser: folders, settings, configs, lists, keys, and who sees no screen."""

import json
import re
import shutil
from pathlib import Path

import pytest
import toml
from browser import chromium
from PIL import Image

pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")
from explorer_support import accessibility_faults, asked, change, give, open_explorer, until
from selenium.webdriver.common.keys import Keys
from typer.testing import CliRunner

from kohya_bucket import KohyaBuckets, cli
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.reports.analysis import analyze
from kohya_bucket.reports.explorer_page import render_explorer
from kohya_bucket.reports.page import render_page
from kohya_bucket.trainers.door.subject import ImageTable, Subject
from tests.pictures import make_pictures

pytestmark = pytest.mark.slow
SHAPES = [(640, 480), (480, 640), (700, 700), (1200, 800), (900, 700), (800, 820), (1000, 620)]
SIZES = [(640, 480), (480, 640), (512, 512), (900, 300), (64, 64), (1200, 800)]
CONFIG = """# kept: a comment
[general]
shuffle_caption = true   # and one behind a value
batch_size = 2

[[datasets]]
resolution = [512, 512]
enable_bucket = true

  [[datasets.subsets]]
  image_dir = '/elsewhere/set/a'
  num_repeats = 3
  caption_prefix = "a ] \\" # no comment"

  [[datasets.subsets]]
  image_dir = '/elsewhere/set/b'

[kohya_bucket]
max_crop = 0.2
order = "runs"
run_length = 8
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    for i, size in enumerate(SIZES * 5):
        to = folder / "ab"[i % 2]
        to.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (9 * i % 256, 90, 120)).save(to / f"{i:02d}.png")
    (folder / "a" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    (folder / "a" / "<img src=x onerror=window.pwned=1>.png").write_bytes(b"nothing")
    (folder / "notes.txt").write_text("no image", encoding="utf-8")
    return folder


def numbers(browser) -> list[str]:
    return browser.execute_script("return [...document.querySelectorAll('#numbers b')].map((e) => e.textContent)")


def downloaded(browser, button: str) -> tuple[str, str]:
    """Name and text of what a button hands to the browser's downloads."""
    browser.execute_script("window.kept = []; save = (name, text) => window.kept.push(name, text)")
    browser.execute_script(f"document.getElementById('{button}').click()")
    return tuple(browser.execute_script("return window.kept"))


def test_a_folder_in_its_buckets(browser, images, tmp_path) -> None:
    open_explorer(browser, tmp_path)
    give(browser, images, 32)
    assert numbers(browser)[0] == "2"
    assert browser.find_element("css selector", "#numbers .lead span").text == "not trained, of 32 images"
    assert "2 of them not readable, 1 other file skipped (.txt)" in browser.find_element("css selector", ".status").text
    for settings, rule in (
        ({}, KohyaBuckets(512)),
        ({"resolution": [1024, 1024], "max": 2048}, KohyaBuckets(1024, 256, 2048)),
        ({"resolution": [512, 512], "max": 1024}, KohyaBuckets(512)),
        ({"noUpscale": True}, KohyaBuckets(512, no_upscale=True)),
        ({"steps": 32, "noUpscale": False}, KohyaBuckets(512, 256, 1024, 32)),
    ):
        if settings:
            change(browser, **settings)
        report = analyze(Subject("set", ImageTable.sized(["x"] * 30, _array()), rule, 1)).summary
        found = json.loads(browser.execute_script(
            "const r = explorer.result;"
            "const parts = [r.buckets.length, r.mean, r.p95, r.worst, r.enlarged / r.placed, r.unplaced.length];"
            "return JSON.stringify(parts)"
        ))  # fmt: skip
        wanted = [
            report.buckets,
            report.mean_crop,
            report.p95_crop,
            report.worst_crop,
            report.enlarged,
            report.unplaced,
        ]
        assert found == pytest.approx(wanted, rel=1e-12)
    assert browser.execute_script("return window.pwned === undefined")
    assert "was" in browser.find_element("id", "numbers").text
    assert browser.get_log("browser") == []


def _array():
    import numpy as np

    return np.array(SIZES * 5, dtype=np.int32)


def test_a_dropped_folder_is_read_too(browser, images, tmp_path) -> None:
    open_explorer(browser, tmp_path)
    for kind in ("dragEnter", "dragOver", "drop"):
        data = {"items": [], "files": [str(images)], "dragOperationsMask": 1}
        browser.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 180, "data": data})
    until(browser, "return document.documentElement.dataset.read")
    found = set(asked(browser, "return explorer.images.items.map((i) => i.path)"))
    # Chromium keeps names with < or > from pages, without a word; docs/look.md says so.
    assert found == {f"set/{p.parent.name}/{p.name}" for p in images.glob("*/*") if "<" not in p.name}


def test_bad_files_as_a_list(browser, images, tmp_path) -> None:
    open_explorer(browser, tmp_path)
    give(browser, images, 32)
    change(browser, noUpscale=True, steps=128)
    name, text = downloaded(browser, "export")
    rows = dict(line.split("\t") for line in text.splitlines())
    assert name == "bad-files.txt"
    assert rows["set/a/broken.jpg"] == "its JPEG header is damaged or cut off"
    assert rows["set/a/<img src=x onerror=window.pwned=1>.png"] == "not an image that is known here"
    assert sum(why == Reason.TOO_SMALL.text for why in rows.values()) == 5


def test_settings_that_cannot_be_are_said_and_nothing_moves(browser, images, tmp_path) -> None:
    open_explorer(browser, tmp_path)
    give(browser, images, 32)
    before = numbers(browser)
    browser.execute_script("explorer.settings.put({max: 256})")
    assert "max_bucket_reso 256" in browser.find_element("css selector", "[role=alert]").text
    assert numbers(browser) == before


def show_with(browser, images, file, text) -> str:
    """The images by a config or preset that is loaded, and what the page says of it."""
    open_explorer(browser, file.parent)
    give(browser, images, 32)
    file.write_text(text, encoding="utf-8")
    browser.find_element("id", "toml").send_keys(str(file))
    until(browser, "return document.querySelector('.notes p')")
    until(browser, "return explorer.settled && explorer.settled.batches")
    return browser.find_element("css selector", ".notes").text


def test_a_config_is_shown_changed_and_saved_with_all_that_was_in_it(browser, images, tmp_path) -> None:
    notes = show_with(browser, images, tmp_path / "set.toml", CONFIG)
    assert all(key in notes for key in ("shuffle_caption", "caption_prefix", "kohya_bucket.run_length"))
    repeats = "return [...document.querySelectorAll('#folders input')].map((e) => +e.value)"
    assert browser.execute_script(repeats) == [3, 1]
    assert browser.execute_script(
        "const v = explorer.settings.values; return [v.resolution, v.batch, v.maxCrop, v.max]"
    ) == [[512, 512], 2, 0.2, 1024]
    assert downloaded(browser, "save") == ("set.toml", CONFIG)

    change(browser, resolution=[768, 512], batch=4, max=1536, maxCrop=None, noUpscale=True)
    browser.execute_script(
        "const f = document.querySelectorAll('#folders input')[1]; f.value = 7; f.dispatchEvent(new Event('change'))"
    )
    _, text = downloaded(browser, "save")
    wanted = toml.loads(CONFIG)
    wanted["general"]["batch_size"] = 4
    wanted["datasets"][0].update(resolution=[768, 512], max_bucket_reso=1536, bucket_no_upscale=True)
    wanted["datasets"][0]["subsets"][1]["num_repeats"] = 7
    del wanted["kohya_bucket"]["max_crop"]
    assert toml.loads(text) == wanted
    assert all(comment in text for comment in ("# kept: a comment", "# and one behind a value"))


PRESET = """{
  "LoRA_type": "Standard",
  "bucket_no_upscale": true,
  "enable_bucket": true,
  "learning_rate": 1e-05,
  "max_bucket_reso": 1024,
  "max_resolution": "512,512",
  "min_bucket_reso": "256",
  "noise": "not \\"max_bucket_reso\\": 7",
  "train_batch_size": 2,
  "train_data_dir": "D:/pictures/img"
}"""


def test_a_preset_is_shown_changed_and_saved_as_another_file(browser, images, tmp_path) -> None:
    show_with(browser, images, tmp_path / "my.json", PRESET)
    assert browser.execute_script(
        "const v = explorer.settings.values; return [v.resolution, v.batch, v.min, v.max, v.steps, v.noUpscale]"
    ) == [[512, 512], 2, 256, 1024, 64, True]
    assert browser.find_element("id", "save").text == "Save the preset"
    assert downloaded(browser, "save") == ("my-buckets.json", PRESET)

    change(browser, resolution=[768, 512], batch=4, min=320, max=1536, steps=32, noUpscale=False)
    _, text = downloaded(browser, "save")
    changed = {
        "1024": "1536",
        '"512,512"': '"768,512"',
        '"256"': '"320"',
        'size": 2': 'size": 4',
        'upscale": true': 'upscale": false',
    }
    wanted = PRESET.replace("{\n", '{\n  "bucket_reso_steps": 32,\n')
    for before, after in changed.items():
        wanted = wanted.replace(before, after)
    assert text == wanted

    change(browser, maxCrop=0.2)
    browser.find_element("id", "save").click()
    assert "A preset has no place for max_crop" in browser.find_element("css selector", ".notes").text


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "it is not JSON"), ("[1]", "not a preset"), ('{"a": 1}', "has no max_resolution"),
     ('{"max_resolution": "512,512", "dataset_config": "D:/own.toml"}', "its datasets are in D:/own.toml")],
)  # fmt: skip
def test_files_that_are_no_preset_say_why(browser, tmp_path, text, why) -> None:
    open_explorer(browser, tmp_path)
    browser.execute_script("explorer.takeConfig(arguments[0], 'my.json')", text)
    said = browser.find_element("css selector", ".notes").text
    assert said.startswith("my.json is not read: ")
    assert why in said


@pytest.mark.parametrize(
    ("ours", "counted"),
    [("", True), ('remainder = "keep"', True), ('remainder = "pad"', False), ("max_tokens = 4096", False)],
)
def test_batches_that_follow_from_other_options_are_not_counted(browser, images, tmp_path, ours, counted) -> None:
    open_explorer(browser, tmp_path)
    give(browser, images, 32)
    text = f"[kohya_bucket]\n{ours}\n[[datasets]]\nresolution = 512\nbatch_size = 4\nenable_bucket = true\n"
    browser.execute_script("explorer.takeConfig(arguments[0], 'my.toml')", text)
    until(browser, "return explorer.settled && document.querySelectorAll('#numbers b').length")
    shown = browser.find_element("tag name", "body").text
    assert ("batches of 4 an epoch" in shown) is counted
    assert ("Last batch" in shown) is counted
    assert ("Batches are not counted here" in shown) is not counted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = ", "line 1: a value is missing"),
        ("[[datasets]]\nresolution = 'wide'", "line 2: resolution is"),
        ("[general]\nbatch_size = 1", "it has no [[datasets]]"),
        ("datasets = [{resolution = 512}]", "it has no [[datasets]]"),
        ("[[datasets]]\nresolution = 512 512", "line 2: something follows"),
    ],
)
def test_configs_that_are_none_say_why(browser, tmp_path, text, why) -> None:
    open_explorer(browser, tmp_path)
    browser.execute_script("explorer.takeConfig(arguments[0], 'my.toml')", text)
    said = browser.find_element("css selector", ".notes").text
    assert said.startswith("my.toml is not read: ")
    assert why in said


def test_a_new_config_is_one_that_sd_scripts_takes(browser, images, tmp_path) -> None:
    open_explorer(browser, tmp_path)
    give(browser, images, 32)
    change(browser, resolution=[832, 1216], max=2048, buckets="sdxl")
    name, text = downloaded(browser, "save")
    made = toml.loads(text)
    assert name == "dataset.toml"
    assert made["datasets"][0]["resolution"] == [832, 1216]
    assert [s["image_dir"] for s in made["datasets"][0]["subsets"]] == ["set/a", "set/b"]
    assert made["kohya_bucket"] == {"rule": "preset:sdxl"}
    assert made["general"] == {"enable_bucket": True}


@pytest.mark.parametrize("opened", ["above", "itself", "in the page", "itself in the page"])
@pytest.mark.parametrize("captions", [".txt", ".caption", ""])
def test_what_is_saved_passes_plan_and_gives_the_numbers_that_were_shown(browser, tmp_path, opened, captions) -> None:
    folder, other = tmp_path / "data" / "10_cat", tmp_path / "data" / "3_dog"
    for path in (*make_pictures(folder, SHAPES), *make_pictures(other, SHAPES[:3])):
        if captions:
            path.with_suffix(captions).write_text("a cat", encoding="utf-8")
    itself, count = "itself" in opened, len(SHAPES) if "itself" in opened else len(SHAPES) + 3
    source = folder if itself else folder.parent
    if "page" in opened:
        page = tmp_path / "page.html"
        assert CliRunner().invoke(cli.app, ["explore", str(source), "--out", str(page), "--no-open"]).exit_code == 0
        open_explorer(browser, tmp_path, page.read_text(encoding="utf-8"))
        until(browser, "return explorer.settled")
    else:
        open_explorer(browser, tmp_path)
        give(browser, source, count)
    change(browser, batch=4, resolution=[640, 640], maxCrop=0.2, switching="geometric")
    buckets = "return explorer.settled.buckets.map((b) => [b.bucket, b.items.length, b.samples, b.batches])"
    shown = asked(browser, buckets)
    _, text = downloaded(browser, "save")
    if "page" not in opened:  # a browser does not tell where a folder lies
        text = text.replace('image_dir = "', f'image_dir = "{source.parent.as_posix()}/')
    config = tmp_path / "dataset.toml"
    config.write_text(text, encoding="utf-8")
    planned = CliRunner().invoke(cli.app, ["plan", str(config), "--json", "--strict"])
    plan = json.loads(planned.stdout)
    found = [[row[key] for key in ("bucket", "images", "samples", "batches")] for row in plan["datasets"][0]["buckets"]]
    assert sorted(found) == sorted(shown)
    assert sum(row[2] for row in found) == 10 * (count - 3 * (not itself)) + 9 * (not itself)
    assert plan["findings"] == []


def test_the_keyboard_reaches_every_image(browser, images, tmp_path) -> None:
    open_explorer(browser, tmp_path)
    give(browser, images, 32)
    label = "return document.activeElement.title"
    browser.execute_script("document.querySelector('[role=gridcell][tabindex=\"0\"]').focus()")
    seen = [browser.execute_script(label)]
    for _ in range(29):
        browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
        seen.append(browser.execute_script(label))
    assert len(set(seen)) == 30
    browser.switch_to.active_element.send_keys(Keys.HOME)
    assert browser.execute_script(label) == seen[0]
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.execute_script("return document.querySelector('dialog').open")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    until(browser, f"return document.activeElement.title === {json.dumps(seen[1])}")  # when the dialog has closed


def test_thousands_of_images_have_few_nodes(browser, tmp_path) -> None:
    open_explorer(browser, tmp_path)
    browser.execute_script(
        "const g = explorer.images.group('many');"
        "for (let i = 0; i < 20000; i++) explorer.images.add({path: `many/${i}.png`,"
        "width: 300 + i % 900, height: 300 + (i * 7) % 800, orientation: 1, reason: null}, g); explorer.update()"
    )
    until(browser, "return (document.documentElement.dataset.placed || '').startsWith('20000')")
    cells = "return document.querySelectorAll('[role=gridcell]').length"
    assert 0 <= browser.execute_script(cells) < 200
    browser.execute_script("scrollTo(0, document.documentElement.scrollHeight / 2)")
    until(browser, f"{cells} > 10")
    assert browser.execute_script(cells) < 200


def test_what_the_trainer_does_not_read_is_named(browser, images, tmp_path) -> None:
    open_explorer(browser, tmp_path, render_explorer(trained=[".jpg"]))
    give(browser, images, 32)
    reasons = asked(browser, "return explorer.images.items.filter((i) => i.path.endsWith('.png')).map((i) => i.reason)")
    assert set(reasons) == {"sd-scripts lists no .png files: kohya-bucket fix converts or renames it"}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("what", ["explorer", "report"])
def test_axe_finds_nothing_and_nothing_sticks_out(browser, images, tmp_path, theme, what) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    metrics = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    unfold = (
        "for (const one of document.querySelectorAll('details')) one.open = true;"
        "for (const one of document.querySelectorAll('.panel')) setFolded(one, false)"
    )
    try:
        if what == "report":
            table = ImageTable.sized([f"{images}/{'ab'[i % 2]}/{i:02d}.png" for i in range(30)], _array())
            (tmp_path / "r.html").write_text(
                render_page([analyze(Subject("set", table, KohyaBuckets(512), 4))]), encoding="utf-8"
            )
            browser.get((tmp_path / "r.html").as_uri())
            assert "×" in browser.find_element("id", "size").get_attribute("value")  # an example is filled in
        else:
            open_explorer(browser, tmp_path)
            assert accessibility_faults(browser) == []
            give(browser, images, 32)
        browser.execute_script(unfold)
        assert accessibility_faults(browser) == []
        if what == "explorer":
            browser.execute_script("document.querySelector('[role=gridcell]').click()")
            assert accessibility_faults(browser) == []
            browser.execute_script("document.querySelector('dialog').close()")
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
        assert accessibility_faults(browser) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_command_puts_a_folder_or_a_config_into_the_page(browser, images, tmp_path) -> None:
    (tmp_path / "set.toml").write_text(CONFIG.replace("/elsewhere/set", images.as_posix()), encoding="utf-8")
    for source in (images, tmp_path / "set.toml"):
        out = tmp_path / "page.html"
        done = CliRunner().invoke(cli.app, ["explore", str(source), "--out", str(out), "--no-open", "--quiet"])
        assert done.exit_code == 0, (done.output, done.exception)
        browser.get_log("browser")
        browser.get(out.as_uri())
        until(browser, "return document.documentElement.dataset.placed")
        assert browser.execute_script("return explorer.images.items.filter((i) => i.reason).length") == 2
        assert browser.execute_script("return explorer.settings.values.resolution") == [512, 512]
        browser.execute_script("document.getElementById('images').scrollIntoView()")
        until(browser, "return [...document.querySelectorAll('.stored img')].some((i) => i.naturalWidth)")
        assert browser.get_log("browser") == []
    browser.execute_script(
        "const f = document.querySelectorAll('#folders input')[0]; f.value = 9; f.dispatchEvent(new Event('change'))"
    )
    assert toml.loads(downloaded(browser, "save")[1])["datasets"][0]["subsets"][0]["num_repeats"] == 9


def test_a_picture_taken_away_while_it_loads_makes_room_for_the_next(browser, tmp_path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    open_explorer(browser, tmp_path)
    browser.execute_script(
        """
        const thumbs = new Thumbs(1), next = thumbs.next.bind(thumbs), boxes = [h("span"), h("span")];
        const item = { path: "a.png", file: new File([Uint8Array.from(arguments[0])], "a.png") };
        thumbs.next = () => { next(); if (thumbs.shown.has(boxes[0])) thumbs.remove(boxes[0]); };
        document.body.prepend(...boxes);
        for (const box of boxes) thumbs.add(box, item, 8, 8);
        window.second = boxes[1];
        """,
        list((tmp_path / "a.png").read_bytes()),
    )
    until(browser, "return second.querySelector('img')?.naturalWidth === 8")


def test_it_asks_nothing_from_the_network(browser, tmp_path) -> None:
    page = render_explorer()
    assert set(re.findall(r"https?://[^\s\"'`]+", page)) == {
        "http://www.w3.org/2000/svg",
        "http://ns.adobe.com/xap/1.0/\\0",
    }
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page).group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    open_explorer(browser, tmp_path, page)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("width", [390, 1280])
def test_numbers_and_pictures_come_first_on_a_phone(browser, images, tmp_path, width) -> None:
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        open_explorer(browser, tmp_path)
        give(browser, images, 32)
        cells = browser.execute_script(
            "return [...document.querySelectorAll('#numbers div')].map((e) => "
            "[e.innerText.replaceAll('\\n', ' '), parseFloat(getComputedStyle(e.firstChild).fontSize)])"
        )
        assert cells[0][0] == "2 not trained, of 32 images"
        assert cells[1][0].endswith("cut off, mean")
        assert cells[0][1] == cells[1][1] >= 1.5 * max(tall for _, tall in cells[2:])
        parts = browser.execute_script("return [...document.querySelectorAll('main .panel')].map((e) => e.id)")
        assert parts[0] == ("images" if width == 390 else "settings")
        cells = "document.querySelectorAll('[role=gridcell]')"
        more = browser.find_element("css selector", "#images .more")
        assert more.is_displayed() == (width == 390)
        if width == 390:
            assert 0 < browser.execute_script(f"return {cells}[0].getBoundingClientRect().bottom") < 844
            browser.execute_script("arguments[0].scrollIntoView()", more)
            assert more.text == "Show 18 more"
            more.click()
            assert not more.is_displayed()
        assert browser.execute_script("return explorer.gallery.sections.flatMap((s) => s.items).length") == 30
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_pictures_are_ordered_by_one_click(browser, images, tmp_path) -> None:
    open_explorer(browser, tmp_path)
    give(browser, images, 32)
    shown = "return explorer.gallery.sections.flatMap((s) => s.items).map((item) => [item.loss, item.scale])"
    buttons = browser.find_elements("css selector", "#images [aria-label=Order] button")
    assert [e.text for e in buttons] == ["Fullest bucket", "Most cut off", "Most enlarged"]
    for i in (1, 2):
        buttons[i].click()
        values = [row[i - 1] for row in browser.execute_script(shown)]
        assert len(values) == 30
        assert values == sorted(values, reverse=True)
    browser.execute_script("document.querySelector('#buckets tbody button').click()")  # leads to its bucket
    counts = browser.execute_script("return explorer.gallery.sections.map((s) => s.items.length)")
    assert len(counts) > 1
    assert counts == sorted(counts, reverse=True)


def test_many_folders_are_folded_and_stay_open_when_repeats_change(browser, tmp_path) -> None:
    open_explorer(browser, tmp_path)
    browser.execute_script(
        "for (let i = 0; i < 7; i++) { const g = explorer.images.group(`folder${i}`);"
        "explorer.images.add({path: `folder${i}/a.png`, width: 500 + 9 * i, height: 400, orientation: 1,"
        "reason: null}, g); }"
        "explorer.update()"
    )
    until(browser, "return document.querySelectorAll('#folders tbody tr').length")
    rows = "return document.querySelectorAll('#folders tbody tr').length"
    assert browser.execute_script(rows) == 5
    more = browser.find_element("css selector", "#folders .more")
    assert more.text == "Show all 7"
    more.click()
    field = browser.find_elements("css selector", "#folders input")[6]
    field.send_keys(Keys.ARROW_UP)
    field.send_keys(Keys.ENTER)
    until(browser, "return explorer.result.buckets.reduce((sum, b) => sum + b.samples, 0) === 8")
    assert browser.execute_script(rows) == 7
    assert browser.execute_script("return document.activeElement === arguments[0]", field)
