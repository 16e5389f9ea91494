"""The report as people use it: what it shows first, on a phone too, by touch and by the keyboard."""

import json
import re

import numpy as np
import pytest
from browser import chromium
from PIL import Image

from kohya_bucket import KohyaBuckets
from kohya_bucket.reports.analysis import analyze
from kohya_bucket.reports.page import render_page
from kohya_bucket.trainers.door.subject import ImageTable, Subject

ActionChains = pytest.importorskip(
    "selenium.webdriver", reason="selenium is not installed: pip install selenium"
).ActionChains
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
until = pytest.importorskip("explorer_support").until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as session:
        yield session


def open_page(browser, uri: str) -> None:
    browser.get(uri)
    until(browser, f"return location.href === {json.dumps(uri)} && !!document.querySelector('footer')")


def on_screen(browser, width: int, height: int) -> None:
    """A window of that size; a narrow one is a phone, which is touched."""
    phone = width < 500
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})


@pytest.fixture
def screen(browser):
    yield lambda width, height: on_screen(browser, width, height)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


@pytest.fixture(scope="module")
def odd_page(tmp_path_factory) -> str:
    """A report on pictures of which one of each kind asks for a change."""
    folder = tmp_path_factory.mktemp("odd")
    sizes = [(900, 600)] * 5 + [(512, 512)] * 4 + [(600, 900)] * 3 + [(40, 40), (2400, 100), (512, 512), (700, 500)]
    for i, size in enumerate(sizes):
        Image.new("RGB", size, (12 * i, 90, 120)).save(folder / f"a_name_that_is_far_too_long_for_a_line_{i:02d}.png")
    paths = sorted(map(str, folder.iterdir()))
    broken = folder / "broken.png"
    broken.write_bytes(b"nothing")
    gif = folder / "moving.gif"
    Image.new("L", (9, 9)).save(gif)
    table = ImageTable.sized([*paths, str(broken), str(gif)], np.array([*sizes, (0, 0), (0, 0)], dtype=np.int32))
    orientation = table.orientation.copy()
    orientation[-3] = 6
    hashes = [str(i) for i in range(len(paths))]
    hashes[0] = hashes[1]
    names, reasons = table.paths, {len(paths): "no image"}
    unlisted = {len(paths) + 1: "no trainer lists it: `kohya-bucket fix` converts it"}
    table = ImageTable(
        names, table.sizes, table.repeats, orientation, failures=reasons, unlisted=unlisted, hashes=[*hashes, "", ""]
    )
    file = folder / "report.html"
    file.write_text(render_page([analyze(Subject("odd", table, KohyaBuckets(512), 4))]), encoding="utf-8")
    return file.as_uri()


@pytest.mark.parametrize("width", [390, 1280])
def test_what_is_lost_leads_and_pictures_come_first_on_a_phone(browser, odd_page, screen, width) -> None:
    screen(width, 844)
    open_page(browser, odd_page)
    cells = browser.execute_script(
        "return [...document.querySelectorAll('.key div')].map((e) => "
        "[e.innerText.replace('\\n', ' '), parseFloat(getComputedStyle(e.firstChild).fontSize)])"
    )
    assert [text for text, _ in cells[:2]] == ["2 not trained, of 18 images: 1 broken, 1 not listed", cells[1][0]]
    assert cells[1][0].endswith("cut off, mean")
    assert cells[0][1] == cells[1][1] >= 1.5 * max(tall for _, tall in cells[2:])
    panels = browser.execute_script("return [...document.querySelectorAll('main .panel')].map((e) => e.id)")
    assert panels[:2] == (["sheets", "advice"] if width == 390 else ["advice", "sheets"])
    picture = browser.find_element("css selector", "figure img").rect
    assert 0 < picture["y"] + picture["height"] < (844 if width == 390 else 1400)
    visible = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility())"
    shown = len(browser.execute_script(visible, ".sheet"))
    used = browser.execute_script("return DATA.datasets[0].sheets.length")
    assert shown == (2 if width == 390 else used)
    browser.execute_script("location.hash = `#${[...document.querySelectorAll('.sheet')].at(-1).id}`")
    until(browser, "return [...document.querySelectorAll('.sheet')].at(-1).checkVisibility()")


def test_advice_stands_by_harm_with_commands_to_copy_and_plurals_that_agree(browser, odd_page) -> None:
    open_page(browser, odd_page)
    harms = browser.execute_script("return [...document.querySelectorAll('.advice .tag')].map((e) => e.innerText)")
    assert harms == sorted(harms, key=["not trained", "harms training", "worth a look"].index)
    assert {"not trained", "harms training", "worth a look"} == set(harms)
    for button in browser.find_elements("css selector", "#images .tabs button"):
        button.click()
        text = browser.execute_script("return document.getElementById('page').innerText")
        assert "`" not in text
    for wrong in (r"\b1 (images|copies|files|buckets|batches)\b", r"\b1 hold\b", r"(?<!\d)1 named .* them", "copys"):
        assert not re.search(wrong, text), re.search(wrong, text)
    assert re.search(r"1 copy\b", text)
    assert re.search(r"1 more image\b", text)
    assert "It is not trained" in text
    chip = browser.find_element("css selector", ".advice .chip")
    command = chip.find_element("tag name", "code").text
    assert command.startswith("kohya-bucket fix ")
    chip.find_element("tag name", "button").send_keys(Keys.ENTER)
    until(browser, "return [...document.querySelectorAll('.chip button')].some((e) => e.textContent === 'Copied')")
    field = browser.find_element("id", "size")
    field.clear()
    field.send_keys(Keys.CONTROL + "v")
    assert field.get_attribute("value") == command


def tap(browser, node) -> None:
    at = browser.execute_script(
        "const r = arguments[0].getBoundingClientRect(); return {x: r.x + r.width / 2, y: r.y + r.height / 2}", node
    )
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [at]})
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@pytest.mark.parametrize("width", [390, 1280])
def test_captions_of_pictures_are_one_line_and_tell_the_rest_when_pointed_at(browser, odd_page, screen, width) -> None:
    screen(width, 844)
    open_page(browser, odd_page)
    talls = (
        "return [...document.querySelectorAll('figcaption')].filter((e) => e.checkVisibility())"
        ".map((e) => e.offsetHeight)"
    )
    figures = browser.find_elements("css selector", "#sheets .sheet:first-child figure")
    figure = max(figures, key=lambda one: one.rect["x"])  # which has least room beside it
    details, picture = figure.find_element("css selector", ".details"), figure.find_element("tag name", "button")
    assert max(browser.execute_script(talls)) < 20
    assert not details.is_displayed()
    field = browser.find_element("id", "size")
    before = field.get_attribute("value")
    if width == 390:
        tap(browser, picture)
        until(browser, "return document.querySelector('.shot.open')")
        assert details.is_displayed()
        assert field.get_attribute("value") == before
        tap(browser, picture)
    else:
        ActionChains(browser).move_to_element(picture).perform()
        assert details.is_displayed()
        picture.click()
    box = details.rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert "a_name_that_is_far_too_long" in details.get_attribute("textContent")
    assert re.search(r"\d+×\d+ → \d+×\d+, ", details.get_attribute("textContent"))
    wanted = re.search(r"(\d+×\d+) →", details.get_attribute("textContent"))[1]
    until(browser, f"return document.getElementById('size').value === {json.dumps(wanted)}")


def test_pictures_are_ordered_by_one_click(browser, odd_page) -> None:
    open_page(browser, odd_page)
    sheets = "[...document.querySelectorAll('.sheet')].map((e) => +e.id.split('-')[1])"
    rows = "Object.fromEntries(DATA.datasets[0].sheets.map((s) => [s.bucket, s.shots.map((one) => one.row)]))"
    buttons = {e.text: e for e in browser.find_elements("css selector", "#sheets .tabs button")}
    of = {int(k): shown for k, shown in browser.execute_script(f"return {rows}").items()}
    full = browser.execute_script("return DATA.datasets[0].buckets.map((b) => b[2])")
    values = {
        "Most cut off": lambda k: max(row[4] for row in of[k]),
        "Most enlarged": lambda k: max(row[5] for row in of[k]),
        "Fullest bucket": lambda k: full[k],
    }
    assert list(buttons) == ["Fullest bucket", "Most cut off", "Most enlarged"]
    for name, value in values.items():
        buttons[name].click()
        assert buttons[name].get_attribute("aria-pressed") == "true"
        found = [value(k) for k in browser.execute_script(f"return {sheets}")]
        assert found == sorted(found, reverse=True), name
    browser.find_elements("css selector", "#sheets .tabs button")[2].click()
    first = browser.find_element("css selector", "#sheets figure .details").get_attribute("textContent")
    assert "40×40" in first  # the smallest picture


def test_only_used_buckets_are_named_below_the_chart_whose_help_opens(browser, odd_page) -> None:
    open_page(browser, odd_page)
    browser.find_element("css selector", "#curious > h2 .fold").click()
    until(browser, "return document.querySelectorAll('#aspects .tick').length")
    named, used, marks = browser.execute_script(
        "const b = DATA.datasets[0].buckets; return [[...document.querySelectorAll('.bucket-label')]"
        ".map((e) => e.textContent), b.filter((one) => one[2]).map((one) => `${one[0]}×${one[1]}`),"
        "document.querySelectorAll('#aspects .tick.idle').length]"
    )
    assert named
    assert set(named) <= set(used)
    assert marks
    about = browser.find_element("css selector", "#aspects .help p")
    assert not about.is_displayed()
    browser.find_element("css selector", "#aspects .help summary").send_keys(Keys.ENTER)
    assert about.is_displayed()
    assert "Bars count images" in about.text


def test_the_tab_key_reaches_everything_and_arrows_read_the_charts(browser, odd_page) -> None:
    open_page(browser, odd_page)
    browser.find_element("css selector", "#curious > h2 .fold").click()
    until(browser, "return document.querySelector('#aspects svg')")
    count = browser.execute_script(
        "const all = [...document.querySelectorAll('a[href], button, input, summary, svg[tabindex], [tabindex=\"0\"]')]"
        ".filter((e) => e.checkVisibility());"
        "window.reached = new Set(); document.addEventListener('focusin', (e) => reached.add(e.target));"
        "window.missing = () => all.filter((e) => !reached.has(e)).map((e) => e.outerHTML.slice(0, 90));"
        "document.activeElement.blur(); scrollTo(0, 0); return all.length"
    )
    browser.find_element("tag name", "body").click()
    for _ in range(count + 5):
        ActionChains(browser).send_keys(Keys.TAB).perform()
    assert browser.execute_script("return missing()") == []
    for where, line in (
        ("aspects", r"Aspect [\d.]+ to [\d.]+: [1-9]\d* images?.*"),
        ("sizes", r"\d+×\d+.*: .*cut off"),
    ):
        chart, read = browser.find_element("css selector", f"#{where} svg"), []
        browser.execute_script("arguments[0].focus()", chart)
        for _ in range(3):
            chart.send_keys(Keys.ARROW_RIGHT)
            read.append(browser.find_element("css selector", f"#{where} .readout").text)
        assert len(set(read)) == 3
        assert all(re.fullmatch(line, one) for one in read), read
