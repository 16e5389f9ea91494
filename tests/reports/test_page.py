"""The HTML report in a real browser: its answers are Python's, and no name becomes markup."""

import json
import re

import numpy as np
import pytest
from browser import chromium
from PIL import Image, features

from kohya_bucket import AutoBuckets, BucketSet, ExactBuckets, FixedBuckets, KohyaBuckets, NovelAIBuckets, load_preset
from kohya_bucket.reports.analysis import analyze
from kohya_bucket.reports.compare import trained_on
from kohya_bucket.reports.page import render_page
from kohya_bucket.reports.rule_data import browser_rule
from kohya_bucket.trainers.door.subject import ImageTable, Subject

pytestmark = pytest.mark.slow
RULES = {
    "upscaling": KohyaBuckets(1024, 256, 2048),
    "no upscaling": KohyaBuckets(1024, no_upscale=True),
    "512": KohyaBuckets(512),
    "odd": KohyaBuckets((832, 1216), 256, 1536, 8),
    "odd, no upscaling": KohyaBuckets((700, 900), reso_steps=24, no_upscale=True),
    "preset": FixedBuckets(load_preset("sdxl")),
    "area": FixedBuckets(load_preset("sd15"), switching="area"),
    "max crop": FixedBuckets(load_preset("sdxl"), max_crop=0.06),
    "never enlarging": FixedBuckets(load_preset("novelai"), no_upscale=True),
    "geometric": KohyaBuckets(768, 256, 1536, switching="geometric", max_crop=0.12),
    "largest": KohyaBuckets(1024, no_upscale=True, no_upscale_fit="largest"),
    "largest, odd": KohyaBuckets((700, 900), reso_steps=24, no_upscale=True, no_upscale_fit="largest", max_crop=0.07),
    "standard": KohyaBuckets(1024, no_upscale=True, no_upscale_fit="standard"),
    "standard, odd": KohyaBuckets(
        (700, 900), 240, 960, 24, True, switching="area", no_upscale_fit="standard", max_crop=0.05
    ),
    "no upscaling, max crop": KohyaBuckets(768, no_upscale=True, max_crop=0.02),
    "novelai": NovelAIBuckets(),
    "novelai, odd base": NovelAIBuckets(base_res=(448, 576), max_ar_error=0.4, no_upscale=True),
    "auto": AutoBuckets.from_dims(np.array([(900 + 40 * i, 1400 - 30 * i) for i in range(30)]), num_buckets=5),
    "one bucket": FixedBuckets(BucketSet.from_dims([(640, 512)])),
    "both limits": FixedBuckets(load_preset("novelai"), no_upscale=True, max_crop=0.1),
}
HOSTILE = [
    "</script><script>window.pwned=1</script>.png",
    '"><img src=x onerror="window.pwned=2">.png',
    "'--><svg onload=window.pwned=3>.png",
    "<!--<script>.png",
    "a\u2028window.pwned=4\u2029b.png",
    "${window.pwned=5}`+(window.pwned=6)+`.png",
    "\\u003cimg src=x onerror=window.pwned=7\\u003e.png",
    "@@DATA@@ @@SCRIPT@@.png",
    "bytes that are no text \udcff\udcfe.png",
    "&lt;b&gt;&amp;.png",
    "日本語 🐈 \x01\x7f.png",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as session:
        yield session


def wait_for(browser, script: str) -> object:
    """What `script` returns as soon as that is anything."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 120, poll_frequency=0.05).until(lambda b: b.execute_script(script))


def open_page(browser, uri: str) -> None:
    """A report from a file, once it is drawn: on a busy machine `get` may return before."""
    browser.get(uri)
    wait_for(browser, f"return location.href === {json.dumps(uri)} && !!document.querySelector('footer')")


def sizes_to_ask(n: int = 1000) -> np.ndarray:
    """Random sizes, sizes of buckets, and sizes next to a switching point."""
    rng = np.random.default_rng(7)
    log = np.exp(rng.uniform(np.log(16), np.log(9000), (n, 2)))
    out = np.rint(log).astype(np.int32)
    exact = [list(b) for b in KohyaBuckets(1024, 256, 2048).bucket_set]
    out[: len(exact)] = exact
    out[len(exact) : len(exact) + 40] = [(1000 + 10 * i, 1000 - 5 * i) for i in range(40)]
    return out


def page_of(rules, sizes, tmp_path, names=None, **options):
    names = names or [f"/set/{i}.png" for i in range(len(sizes))]
    table = ImageTable.sized(names, np.asarray(sizes, dtype=np.int32))
    page = render_page([analyze(Subject(name, table, rule, 4)) for name, rule in rules.items()], **options)
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8", newline="\n")
    return page, path.as_uri()


def assert_equal_to_python(answers, rule, sizes) -> None:
    placement = rule.place(sizes)
    placed = placement.placed
    assert [a["bucket"] is not None for a in answers] == placed.tolist()
    assert [a["reason"] for a in answers] == placement.reasons.tolist()
    for i, answer in enumerate(answers):
        if answer["bucket"] is None:
            continue
        assert answer["bucket"] == placement.bucket_sizes[i].tolist()
        assert answer["resized"] == placement.resized_sizes[i].tolist()
        assert answer["cropLtrb"] == placement.crop_ltrb[i].tolist()
        assert answer["aspectError"] == placement.aspect_errors[i]
        assert answer["cropLoss"] == placement.crop_loss[i]
        excess = placement.resized_sizes[i] - placement.bucket_sizes[i]
        assert answer["cut"] == [*(excess // 2).tolist(), *(excess - excess // 2).tolist()]


def test_the_field_answers_as_python_for_a_thousand_sizes(browser, tmp_path) -> None:
    sizes = sizes_to_ask()
    asked = {name: RULES[name] for name in ("upscaling", "no upscaling")}
    _, uri = page_of(asked, sizes[:50], tmp_path, thumbnails=0)
    open_page(browser, uri)
    for i, (name, rule) in enumerate(asked.items()):
        browser.find_elements("css selector", "#page > .tabs button")[i].click()
        answers = browser.execute_script(
            """
            const field = document.getElementById("size"), box = document.getElementById("answer"), out = [];
            for (const [w, h] of arguments[0]) {
              field.value = `${w}x${h}`;
              field.dispatchEvent(new Event("input"));
              out.push(box.dataset.result);
              const shown = box.querySelector("dd.big");
              const bucket = JSON.parse(box.dataset.result).bucket;
              if (bucket ? shown.textContent !== `${bucket[0]}×${bucket[1]}` : shown) throw new Error(`${w}x${h}`);
            }
            return out;
            """,
            sizes.tolist(),
        )
        assert len(answers) == 1000, name
        assert_equal_to_python([json.loads(a) for a in answers], rule, sizes)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_repeated_exactly(browser, tmp_path, name) -> None:
    sizes = sizes_to_ask()
    _, uri = page_of({name: RULES[name]}, sizes[:5], tmp_path, thumbnails=0)
    open_page(browser, uri)
    answers = browser.execute_script(
        "return JSON.stringify(arguments[0].map(([w, h]) => place(DATA.datasets[0].rule, w, h)))", sizes.tolist()
    )
    assert_equal_to_python(json.loads(answers), RULES[name], sizes)


def test_no_name_or_caption_becomes_markup(browser, tmp_path) -> None:
    picture = tmp_path / "real.png"
    Image.new("RGB", (700, 500)).save(picture)
    picture.with_suffix(".txt").write_text("</script><img src=x onerror=window.pwned=8>\u2028", encoding="utf-8")
    names = [*HOSTILE, str(picture)]
    sizes = [(907 + 61 * i, 701) for i in range(len(names))]
    table = ImageTable.sized(names, np.array(sizes, dtype=np.int32))
    table = ImageTable(
        names, table.sizes, table.repeats, table.orientation + 5, failures={0: HOSTILE[1]},
        mislabelled={1: HOSTILE[0]}, hashes=["a"] * len(names),
    )  # fmt: skip
    title = HOSTILE[0] + HOSTILE[8]
    page = render_page([analyze(Subject(title, table, RULES["upscaling"], 4, HOSTILE[1]))], title=title)
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script", page)) == 2
    assert "\u2028" not in page
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8", newline="\n")
    browser.get_log("browser")
    open_page(browser, path.as_uri())
    assert browser.execute_script("return window.pwned === undefined")

    def read(script: str):
        # Through JSON, since the driver cannot pass on text with lone surrogates.
        return json.loads(browser.execute_script(f"return JSON.stringify({script})"))

    assert read("document.querySelector('h1').textContent") == title
    for button in browser.find_elements("css selector", "#images .tabs button"):
        button.click()
    browser.find_elements("css selector", "#images .tabs button")[0].click()
    shown = read("[...document.querySelectorAll('tbody .name')].map((n) => n.textContent)")
    assert set(HOSTILE) <= set(shown)
    beside = read("[...document.querySelectorAll('figure .details')].map((n) => n.textContent)")
    assert any("onerror=window.pwned=8" in text for text in beside)
    assert (
        browser.execute_script("return window.pwned === undefined && document.querySelectorAll('figure img').length")
        == 1
    )
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_a_page_asks_nothing_from_the_network(browser, tmp_path) -> None:
    page, uri = page_of(RULES, sizes_to_ask()[:80], tmp_path)
    addresses = set(re.findall(r"https?://[^\s\"'`]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page).group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    browser.get_log("browser")
    open_page(browser, uri)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    # The policy holds: a script and a picture from elsewhere are refused.
    blocked = browser.execute_script(
        """
        window.refused = [];
        document.addEventListener("securitypolicyviolation", (e) => window.refused.push(e.effectiveDirective));
        const script = document.createElement("script");
        script.textContent = "window.ran = 1";
        document.body.append(script);
        const image = new Image(); image.src = "http://127.0.0.1:9/x.png"; document.body.append(image);
        return window.ran === undefined;
        """
    )
    assert blocked
    wait_for(browser, "return window.refused.length >= 2")
    assert browser.execute_script("return window.refused.sort()") == ["img-src", "script-src-elem"]


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", *["avif"] * features.check("avif")])
def test_a_chosen_image_counts_as_it_is_stored(browser, tmp_path, ending) -> None:
    exif = Image.Exif()
    exif[274] = 6
    path = tmp_path / f"lying.{ending}"
    Image.new("RGB", (900, 600), "teal").save(path, exif=exif)
    _, uri = page_of({"set": RULES["upscaling"]}, [(800, 600)], tmp_path, thumbnails=0)
    open_page(browser, uri)
    browser.execute_script("delete document.getElementById('answer').dataset.result")  # of the size that is filled in
    browser.find_element("id", "file").send_keys(str(path))
    answer = json.loads(wait_for(browser, "return document.getElementById('answer').dataset.result"))
    assert_equal_to_python([answer], RULES["upscaling"], np.array([(900, 600)], dtype=np.int32))
    assert browser.find_element("id", "size").get_attribute("value") == "900×600"
    assert browser.execute_script(
        "return document.querySelector('.frame img').offsetWidth > document.querySelector('.frame img').offsetHeight"
    )


def test_without_javascript_the_numbers_are_there(tmp_path) -> None:
    table = ImageTable.sized([f"/set/{i}.png" for i in range(9)], np.array([(900, 300)] * 8 + [(0, 0)], dtype=np.int32))
    bad = {8: "`kohya-bucket fix` turns it"}
    table = ImageTable(table.paths, table.sizes, table.repeats, table.orientation, failures=bad)
    page, _ = page_of_table(table, tmp_path)
    plain = re.search(r"<noscript>(.*)</noscript>", page, re.DOTALL).group(1)
    bucket = RULES["512"].place([(900, 300)]).bucket(0)
    assert f'<th scope="row">{bucket}</th><td>8</td>' in plain
    assert '<th scope="row">8.png</th><td><code>kohya-bucket fix</code> turns it</td>' in plain
    assert re.search(r"<title>(.*)</title>", page).group(1).startswith("set: 8 images in 1 bucket, ")


def page_of_table(table, tmp_path):
    page = render_page([analyze(Subject("set", table, RULES["512"], 4))], thumbnails=8)
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8", newline="\n")
    return page, path.as_uri()


def test_sections_rows_and_pictures_for_the_keyboard_and_for_readers(browser, tmp_path) -> None:
    Image.new("RGB", (900, 300)).save(tmp_path / "wide.png")
    table = ImageTable.sized([str(tmp_path / "wide.png")] * 3, np.array([(900, 300)] * 3, dtype=np.int32))
    _, uri = page_of_table(table, tmp_path)
    browser.get("about:blank")
    open_page(browser, f"{uri}#sheets")
    links = browser.find_elements("css selector", "nav.links a")
    shown = ["Contact sheets", "Try a size", "Buckets", "What an epoch trains", "Images that stand out"]
    assert [a.text for a in links][-6:] == [*shown, "For the curious"]
    for link in links:
        name = link.get_attribute("href").partition("#")[2]
        assert browser.find_element("id", name).find_element("tag name", "h2").text.startswith(link.text)
    placed = RULES["512"].place([(900, 300)])
    loss = f"{100 * placed.crop_loss[0]:.1f}%" if placed.crop_loss[0] < 0.1 else f"{100 * placed.crop_loss[0]:.0f}%"
    shown = str(placed.bucket(0)).replace("x", "×")
    alt = browser.find_element("css selector", "figure img").get_attribute("alt")
    assert alt == f"wide.png: 900×300 to {shown}, {loss} cut off"
    field = browser.find_element("id", "size")
    for button in ("figure button", "#images tbody button"):
        browser.execute_script("arguments[0].value = ''", field)
        browser.find_element("css selector", button).send_keys("\ue007")
        assert field.get_attribute("value") == "900×300"


def test_what_an_epoch_trains_is_the_plan_first_and_then_each_trainers_loader(browser, tmp_path) -> None:
    table = ImageTable.sized([f"{i}.png" for i in range(30)], np.array([(600 + 37 * i, 400) for i in range(30)]))
    _, uri = page_of_table(table, tmp_path)
    browser.get("about:blank")
    open_page(browser, uri)
    rows = browser.find_elements("css selector", "#trainers tbody tr")
    shown = [[cell.text for cell in row.find_elements("css selector", "th, td")] for row in rows]
    expected = trained_on(analyze(Subject("set", table, RULES["512"], 4)))
    assert [row[0] for row in shown] == [name for name, *_ in expected]
    assert [int(row[3]) for row in shown] == [never for *_, never, _ in expected]
    assert shown[0][2] == "0"
    assert any(row[3] != "0" for row in shown)


def test_what_is_for_the_curious_opens_by_a_click_or_a_link(browser, tmp_path) -> None:
    _, uri = page_of({"set": RULES["512"]}, [(600 + 37 * i, 400) for i in range(20)], tmp_path, thumbnails=0)
    width = "document.querySelector('#aspects svg')?.getBoundingClientRect().width"
    browser.get("about:blank")
    open_page(browser, uri)
    assert not browser.execute_script(f"return {width}")
    browser.find_element("css selector", "#curious > h2 .fold").click()
    wait_for(browser, f"return {width} > 300")
    browser.get("about:blank")
    open_page(browser, f"{uri}#aspects")
    wait_for(browser, f"return {width} > 300")


def ask(browser, text) -> None:
    field = browser.find_element("id", "size")
    field.clear()
    field.send_keys(text)


def test_lists_sort_and_filter(browser, tmp_path) -> None:
    names = [f"/set/{word}{i}.png" for i, word in enumerate(["cat", "dog"] * 10)]
    _, uri = page_of({"set": RULES["512"]}, [(600 + 37 * i, 400) for i in range(20)], tmp_path, names, thumbnails=0)
    open_page(browser, uri)
    column = "return [...document.querySelectorAll('#images tbody .name')].map((n) => n.textContent)"
    head = "#images th:first-child button"
    browser.execute_script(f"document.querySelector('{head}').click()")
    ascending = browser.execute_script(column)
    assert ascending == sorted(ascending)
    browser.execute_script(f"document.querySelector('{head}').click()")
    assert browser.execute_script(column) == ascending[::-1]
    browser.find_element("css selector", "input[type=search]").send_keys("dog")
    assert browser.execute_script(column) == [n for n in ascending[::-1] if "dog" in n]


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_sticks_out_and_colours_follow_the_system(browser, tmp_path, width, theme) -> None:
    some = {name: RULES[name] for name in ("upscaling", "no upscaling", "preset")}
    _, uri = page_of(some, sizes_to_ask()[:200], tmp_path, thumbnails=0)
    scheme = [{"name": "prefers-color-scheme", "value": theme}]
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        open_page(browser, uri)
        for tab in browser.find_elements("css selector", "#page > .tabs button"):
            tab.click()
            assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
        ground = "return parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
        assert (browser.execute_script(ground) < 60) == (theme == "dark")
        button = browser.find_element("css selector", "button.theme")
        button.click()
        assert browser.execute_script(ground) > 200
        button.click()
        assert browser.execute_script(ground) < 60
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_an_empty_set_and_a_wholly_broken_one_still_make_a_page(browser, tmp_path) -> None:
    for sizes in ([], [(0, 0), (0, 0)]):
        _, uri = page_of(RULES, np.array(sizes, dtype=np.int32).reshape(-1, 2), tmp_path)
        browser.get_log("browser")
        open_page(browser, uri)
        assert browser.execute_script("return document.querySelectorAll('.key').length") == 1
        assert browser.get_log("browser") == []


@pytest.mark.weekly
def test_a_large_set_makes_a_small_page(tmp_path) -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(200, 4000, (100_000, 2)).astype(np.int32)
    for name in ("upscaling", "no upscaling"):
        page, _ = page_of({name: RULES[name]}, sizes, tmp_path, thumbnails=0)
        assert len(page) < 600_000


def test_a_rule_the_page_cannot_repeat_still_makes_a_page(browser, tmp_path) -> None:
    others = {"exact": ExactBuckets(512)}
    _, uri = page_of(others, sizes_to_ask()[:60], tmp_path, thumbnails=0)
    browser.get_log("browser")
    open_page(browser, uri)
    ask(browser, "800x600")
    assert "cannot be repeated" in browser.find_element("id", "answer").text
    assert browser.get_log("browser") == []


def test_rules_of_other_kinds_are_not_guessed() -> None:
    class Other(KohyaBuckets):
        """A rule whose placement the script does not know."""

    assert browser_rule(Other(512)) is None
    assert browser_rule(RULES["512"])["kind"] == "set"


def narrow(browser, width: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )


@pytest.mark.parametrize("width", [360, 1000, 1600])
def test_charts_are_true_and_readable_at_every_width(browser, tmp_path, width) -> None:
    """Bars keep their proportions, no two numbers of an axis overlap, and the row of key numbers has no holes."""
    sizes = [(1000, 1000)] * 60 + [(1500, 1000)] * 30 + [(1000, 1500)] * 6 + [(1, 1), (9000, 8000)]
    _, uri = page_of({"set": RULES["upscaling"]}, sizes, tmp_path)
    narrow(browser, width)
    try:
        open_page(browser, uri)
        boxes = browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map(e => {const r = e.getBoundingClientRect();"
            "return [r.left, r.top, r.right, r.bottom, e.textContent]})",
            "svg[aria-label^='Widths'] text",
        )
        numbers = [box for box in boxes if box[4].replace(",", "").isdigit()]
        assert len(numbers) > 8
        for i, one in enumerate(numbers):
            for other in numbers[i + 1 :]:
                apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] + 2 or other[3] <= one[1] + 2
                assert apart, (one, other)
        bars = browser.execute_script(
            "return [...document.querySelectorAll('tr[data-bucket]')].map(r => [+r.cells[2].textContent,"
            "r.querySelector('.meter').getBoundingClientRect().width, r.querySelector('.meterbox').clientWidth])"
        )
        most = max(bars)
        assert most[1] <= most[2]
        for count, wide, _ in bars:
            assert wide == pytest.approx(max(most[1] * count / most[0], most[1] / 100), abs=0.6)
        ends = browser.execute_script(
            "return [...document.querySelectorAll('.key div')].map((e) => e.getBoundingClientRect())"
            ".map((r) => [Math.round(r.top), Math.round(r.right)])"
        )
        assert len({max(right for top, right in ends if top == row) for row, _ in ends}) == 1
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_thousands_of_buckets_do_not_stop_the_page(browser, tmp_path) -> None:
    rng = np.random.default_rng(3)
    sizes = np.exp(rng.normal(np.log(900), 0.5, (20_000, 2))).astype(np.int32).clip(64, 9000)
    rule = KohyaBuckets(1024, no_upscale=True, reso_steps=8)
    _, uri = page_of({"set": rule}, sizes, tmp_path, thumbnails=0)
    used = len(analyze(Subject("set", ImageTable.sized(["x"] * len(sizes), sizes), rule)).used_buckets)
    assert used > 5000
    open_page(browser, uri)
    rows = "return document.querySelectorAll('tr.link[data-bucket]').length"
    assert browser.execute_script(rows) == 25
    browser.execute_script("document.querySelector('#buckets .more').click()")
    assert browser.execute_script(rows) == 400
    assert browser.execute_script("return document.querySelectorAll('path.tick').length") == 400
    assert f"The first 400 of {used:,} buckets" in browser.page_source
    assert "the 400 fullest of the buckets that occur" in browser.page_source


def test_the_bucket_of_the_asked_size_stays_marked_when_the_table_is_sorted(browser, tmp_path) -> None:
    _, uri = page_of({"set": RULES["upscaling"]}, [(1000, 1000), (1500, 1000), (1000, 1500)], tmp_path)
    open_page(browser, uri)
    ask(browser, "1500x1000")
    marked = (
        "return new Promise(done => setTimeout(() => done("
        "[...document.querySelectorAll('tr.link.here')].map(e => e.cells[0].textContent)), 100))"
    )
    first = browser.execute_script(marked)
    assert len(first) == 1
    assert first[0].startswith(str(RULES["upscaling"].place([(1500, 1000)]).bucket(0).width))
    browser.execute_script("[...document.querySelectorAll('th button')].find(b => b.textContent === 'Images').click()")
    assert browser.execute_script(marked) == first
