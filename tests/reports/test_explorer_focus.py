"""The explorer's focus in a real browser: drawn, moved by keys, placed as Python places it, saved and read again."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from browser import chromium
from PIL import Image

pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")
from explorer_support import accessibility_faults, asked, change, give, open_explorer, until
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from typer.testing import CliRunner

from kohya_bucket import KohyaBuckets, cli
from kohya_bucket.buckets.focus import FocusCuts, focus_crops, focus_pixels, focused
from kohya_bucket.images.focus_files import focus_in, read_focus

pytestmark = pytest.mark.slow
SIZES = {"a/wide.png": (1200, 400), "a/tall.png": (400, 1200), "b/square.png": (600, 600)}
MARK, AREA = "dialog .mark-area .marked", "dialog .mark-area"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture
def images(tmp_path) -> Path:
    for i, (name, size) in enumerate(SIZES.items()):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").resize(size).point(lambda v, i=i: (v + 60 * i) % 256).save(path)
    return tmp_path / "set"


def show(browser, images: Path, page: Path, count: int = len(SIZES)) -> None:
    """The explorer with the images, of which all but the square lose much."""
    open_explorer(browser, page)
    give(browser, images, count)
    change(browser, resolution=[1024, 1024], min=768, max=1280)


def placement_of(sizes):
    return KohyaBuckets(1024, 768, 1280).place(np.array(list(sizes), dtype=np.int32))


def write(path: Path, *rows) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def load(browser, file: Path) -> None:
    before = browser.execute_script("return document.documentElement.dataset.placed")
    browser.find_element("id", "focus-file").send_keys(str(file))
    until(browser, f"return document.documentElement.dataset.placed !== {json.dumps(before)}")


def look_at(browser, name: str) -> None:
    """Open the dialog of an image."""
    path = f"set/{name}"
    until(browser, f"return explorer.images.items.some((i) => i.path === {json.dumps(path)} && i.bucket)")
    browser.execute_script(f"explorer.closer.show(explorer.images.items.find((i) => i.path === {json.dumps(path)}))")


def rows(browser) -> dict[str, list[float]]:
    return dict(asked(browser, "return [...explorer.focus.rows].map(([path, row]) => [path, row.focus])"))


def notes(browser) -> str:
    return browser.execute_script("return document.getElementById('focus-notes').textContent")


def saved(browser, to: Path) -> Path:
    browser.execute_script("window.kept = null; save = (name, text) => { window.kept = [name, text]; }")
    browser.execute_script("document.getElementById('save-focus').click()")
    name, text = browser.execute_script("return window.kept")
    (to / name).write_text(text, encoding="utf-8")
    return to / name


def drag(browser, start, end) -> None:
    """With the mouse, from one place to another in shares of the picture."""
    area = browser.find_element("css selector", AREA)
    box = browser.execute_script("return [arguments[0].clientWidth, arguments[0].clientHeight]", area)
    (x, y), (to_x, to_y) = ([round((share - 0.5) * side) for share, side in zip(at, box, strict=True)]
                            for at in (start, end))  # fmt: skip
    chain = ActionChains(browser, duration=0).move_to_element_with_offset(area, x, y).click_and_hold()
    chain.move_to_element_with_offset(area, (x + to_x) // 2, (y + to_y) // 2)
    chain.move_to_element_with_offset(area, to_x, to_y).release().perform()


def test_crops_are_those_of_python_to_the_bit(browser, tmp_path) -> None:
    random = np.random.default_rng(0)
    n = 600
    bucket = random.integers(1, 2048, (n, 2))
    resized = bucket + np.where(random.random((n, 2)) < 0.4, 0, random.integers(0, 1200, (n, 2)))
    resized[-20:] = bucket[-20:] + random.integers(10**8, 10**9, (20, 2))
    corners = np.sort(random.random((n, 2, 2)), axis=1).reshape(n, 4)
    corners[: n // 3] = np.round(corners[: n // 3], 2)
    corners[:40, 2:] = corners[:40, :2]  # points
    corners[40:60] = np.stack([corners[40:60, 0], np.zeros(20), corners[40:60, 2], np.ones(20)], axis=1)
    pixels = np.sort(random.integers(0, np.repeat(resized[60:160, None], 2, axis=1) + 1), axis=1).reshape(-1, 4)
    corners[60:160] = pixels / np.tile(resized[60:160], 2)
    mirrored = np.stack([1 - corners[:, 2], corners[:, 1], 1 - corners[:, 0], corners[:, 3]], axis=1)
    corners, resized, bucket = np.concatenate([corners, mirrored]), np.tile(resized, (2, 1)), np.tile(bucket, (2, 1))

    open_explorer(browser, tmp_path)
    cases = np.concatenate([resized, bucket, corners], axis=1).tolist()
    script = """return cases.map(([w, h, bw, bh, ...box]) => {
        const axes = [0, 1].map((i) => pixelsAlong(box[i], box[i + 2], [w, h][i]));
        const { cut } = keeping({ resized: [w, h], bucket: [bw, bh] }, box);
        return [axes[0][0], axes[1][0], axes[0][1], axes[1][1], ...cut];
    })"""
    found = np.array(asked(browser, f"const cases = JSON.parse(args[0]); {script}", json.dumps(cases)))
    rectangles = focus_pixels(corners, resized)
    crops = focus_crops(rectangles, resized, bucket)
    assert np.array_equal(found[:, :4], rectangles)
    assert np.array_equal(found[:, 4:6], crops)
    assert np.array_equal(found[:, 6:], resized - bucket - crops)
    assert (crops != (resized - bucket) // 2).any(axis=1).mean() > 0.3


def test_what_the_middle_and_the_focus_cut_is_counted_as_python_counts_it(browser, images, tmp_path) -> None:
    boxes = {
        "a/wide.png": [0.0, 0.1, 0.2, 0.9],
        "a/tall.png": [0.1, 0.0, 0.9, 0.6],
        "b/square.png": [0.2, 0.2, 0.4, 0.4],
    }
    show(browser, images, tmp_path)
    load(browser, write(tmp_path / "focus.jsonl", *({"image": f"set/{n}", "focus": box} for n, box in boxes.items())))
    focus = np.array(list(boxes.values()))
    counts = FocusCuts.from_placement(focused(KohyaBuckets(1024, 768, 1280).place(list(SIZES.values())), focus), focus)
    line = browser.execute_script("return explorer.focusLine.textContent")
    assert line == f"{str(counts).removeprefix('focus: ')}."
    assert counts.cut_in_middle > 0


def test_a_focus_is_drawn_moved_resized_and_removed(browser, images, tmp_path) -> None:
    show(browser, images, tmp_path)
    assert not browser.find_element("id", "save-focus").is_displayed()  # there is none to save yet
    look_at(browser, "a/wide.png")
    kept = "return document.querySelector('dialog .kept').style.left"
    before = browser.execute_script(kept)
    drag(browser, (0.04, 0.3), (0.2, 0.8))
    drawn = rows(browser)["set/a/wide.png"]
    assert drawn == pytest.approx([0.04, 0.3, 0.2, 0.8], abs=0.02)
    assert float(browser.execute_script(kept)[:-1]) < float(before[:-1])

    drag(browser, (0.12, 0.5), (0.72, 0.5))  # moved
    moved = rows(browser)["set/a/wide.png"]
    assert moved == pytest.approx([share + 0.6 * (i % 2 == 0) for i, share in enumerate(drawn)], abs=0.02)
    assert float(browser.execute_script(kept)[:-1]) > float(before[:-1])

    drag(browser, (moved[2], moved[3]), (0.95, 0.6))  # by a corner
    assert rows(browser)["set/a/wide.png"] == pytest.approx([*moved[:2], 0.95, 0.6], abs=0.03)
    drag(browser, (0.1, 0.1), (0.101, 0.1))  # a click takes no rectangle away
    assert rows(browser)["set/a/wide.png"] == pytest.approx([*moved[:2], 0.95, 0.6], abs=0.03)
    drag(browser, (0.5, 0.9), (0.3, 0.2))  # drawn anew, backwards
    assert rows(browser)["set/a/wide.png"] == pytest.approx([0.3, 0.2, 0.5, 0.9], abs=0.02)

    browser.find_element("id", "mark").click()
    assert rows(browser) == {}
    assert browser.execute_script(kept) == before
    browser.execute_script("document.querySelector('dialog').close()")
    until(browser, "return document.getElementById('focus').hidden")


def test_a_click_sets_a_point_which_is_moved_saved_and_cropped_as_python_does(browser, images, tmp_path) -> None:
    show(browser, images, tmp_path)
    look_at(browser, "a/wide.png")
    drag(browser, (0.2, 0.6), (0.2, 0.6))
    assert rows(browser)["set/a/wide.png"] == pytest.approx([0.2, 0.6], abs=0.02)
    assert accessibility_faults(browser) == []
    drag(browser, (0.9, 0.3), (0.9, 0.3))  # another click: it is there now
    point = rows(browser)["set/a/wide.png"]
    assert point == pytest.approx([0.9, 0.3], abs=0.02)
    drag(browser, point, (0.1, 0.5))
    point = rows(browser)["set/a/wide.png"]
    assert point == pytest.approx([0.1, 0.5], abs=0.02)
    look_at(browser, "a/tall.png")
    drag(browser, (0.5, 0.8), (0.5, 0.8))
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT).key_up(Keys.SHIFT).perform()
    x, y, *more = rows(browser)["set/a/tall.png"]
    assert more == pytest.approx([x + 0.01, y])
    file = saved(browser, tmp_path)
    focus, _ = read_focus(str(file), [str(images / name) for name in SIZES])
    assert focus[:2].tolist() == [[*point, *point], [x, y, *more]]
    placement = focused(placement_of(SIZES.values()), focus)
    crops = asked(browser, "return explorer.images.items.map((i) => [i.path, explorer.placed(i).cut])")
    assert dict(crops) == dict(zip([f"set/{name}" for name in SIZES], placement.cuts.tolist(), strict=True))


def test_a_finger_draws_as_well(browser, images, tmp_path) -> None:
    show(browser, images, tmp_path)
    look_at(browser, "b/square.png")
    area = browser.execute_script(
        f"const r = document.querySelector('{AREA}').getBoundingClientRect(); return [r.left, r.top, r.width, r.height]"
    )
    points = [{"x": area[0] + share * area[2], "y": area[1] + share * area[3]} for share in (0.2, 0.5, 0.7)]
    for kind, at in (("touchStart", 0), ("touchMove", 1), ("touchMove", 2), ("touchEnd", None)):
        browser.execute_cdp_cmd(
            "Input.dispatchTouchEvent", {"type": kind, "touchPoints": [] if at is None else [points[at]]}
        )
    assert rows(browser)["set/b/square.png"] == pytest.approx([0.2, 0.2, 0.7, 0.7], abs=0.02)


def test_the_keyboard_marks_moves_resizes_and_removes(browser, images, tmp_path) -> None:
    show(browser, images, tmp_path)
    look_at(browser, "a/tall.png")
    title = browser.find_element("id", "closer-title").text
    assert accessibility_faults(browser) == []
    browser.find_element("id", "mark").send_keys(Keys.ENTER)
    assert accessibility_faults(browser) == []
    press = lambda *keys: ActionChains(browser).send_keys(*keys).perform()  # noqa: E731
    press(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_UP)
    assert rows(browser)["set/a/tall.png"] == [0.23, 0.24, 0.73, 0.74]
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN).key_up(Keys.SHIFT).perform()
    assert rows(browser)["set/a/tall.png"] == [0.23, 0.24, 0.74, 0.75]
    press(*[Keys.ARROW_RIGHT] * 40)  # not beyond the border
    assert rows(browser)["set/a/tall.png"] == [0.49, 0.24, 1, 0.75]
    assert browser.find_element("id", "closer-title").text == title
    press(Keys.DELETE)
    assert rows(browser) == {}
    assert browser.execute_script("return document.activeElement.id") == "mark"
    press(Keys.ARROW_RIGHT)  # away from the rectangle, arrows go on to the next image
    assert browser.find_element("id", "closer-title").text != title


def test_what_is_saved_is_read_by_python_and_gives_the_same_crops(browser, images, tmp_path) -> None:
    show(browser, images, tmp_path)
    for name, end in (("a/wide.png", (0.31, 0.9)), ("a/tall.png", (0.77, 0.4))):
        look_at(browser, name)
        drag(browser, (0.1, 0.05), end)
    file = saved(browser, tmp_path)
    assert file.name == "focus.jsonl"
    focus, missing = read_focus(str(file), [str(images / name) for name in SIZES])
    assert missing == []
    assert np.isnan(focus).any(axis=1).tolist() == [False, False, True]
    placement = focused(placement_of(SIZES.values()), focus)
    crops = asked(browser, "return explorer.images.items.map((i) => [i.path, explorer.placed(i).cut])")
    assert dict(crops) == dict(zip([f"set/{name}" for name in SIZES], placement.cuts.tolist(), strict=True))


@pytest.mark.parametrize("where", ["in the folder", "above it", "in a folder of it", "given at once"])
def test_rows_find_their_images_wherever_the_file_lies(browser, images, tmp_path, where) -> None:
    """And what is saved in its place names old and new images from there."""
    folder = {"above it": tmp_path, "in a folder of it": images / "a"}.get(where, images)
    names = {name: _relative(images / name, folder) for name in SIZES}
    rows_ = [{"image": names[n], "focus": [0.1, 0.2], "label": "dog"} for n in ("a/wide.png", "a/tall.png")]
    file = write(folder / "focus.jsonl", *rows_, {"image": "gone.png", "focus": [0.5, 0.5]})
    if where == "given at once":
        show(browser, images, tmp_path)
    else:
        content = file.read_bytes()
        file.unlink()
        show(browser, images, tmp_path)
        file.write_bytes(content)
        load(browser, file)
    assert set(rows(browser)) == {"set/a/wide.png", "set/a/tall.png"}
    assert "Of images that are not here, kept when it is saved: gone.png." in notes(browser)
    look_at(browser, "b/square.png")
    drag(browser, (0.1, 0.1), (0.5, 0.5))
    file = saved(browser, folder)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert lines[:2] == rows_
    assert [line["image"] for line in lines[2:]] == [names["b/square.png"], "gone.png"]
    focus, missing = read_focus(str(file), [str(images / name) for name in SIZES])
    assert not np.isnan(focus).any()
    assert missing == ["gone.png"]


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def test_a_file_that_fits_several_folders_is_not_guessed(browser, images, tmp_path) -> None:
    (images / "b" / "wide.png").write_bytes((images / "a" / "wide.png").read_bytes())
    show(browser, images, tmp_path, 4)
    load(browser, write(tmp_path / "focus.jsonl", {"image": "wide.png", "focus": [0.1, 0.1]}))
    assert rows(browser) == {}
    assert "It fits set/a and set/b alike" in notes(browser)


def test_bad_lines_are_named_with_their_number_and_the_others_shown(browser, images, tmp_path) -> None:
    bad = [
        ('{"image": "a/wide.png"', "line 2 is not JSON"),
        ({"focus": [0, 0, 1, 1]}, "line 3 is not a row"),
        ({"image": "a/wide.png", "focus": [10, 20, 300, 400]}, "line 4: the focus of a/wide.png is [10,20,300,400], "),
        ({"image": "a/wide.png", "focus": [0.5, 0, 0.2, 1]}, "line 5: the focus of a/wide.png is [0.5,0,0.2,1], "),
        ({"image": "b/square.png", "focus": [0, 0.5]}, "line 6: b/square.png has more than one focus"),
    ]  # fmt: skip
    show(browser, images, tmp_path)
    load(
        browser, write(tmp_path / "f.jsonl", {"image": "b/square.png", "focus": [0, 0, 1, 1]}, *(row for row, _ in bad))
    )
    assert all(why in notes(browser) for _, why in bad), notes(browser)
    assert rows(browser) == {"set/b/square.png": [0, 0, 1, 1]}


@pytest.mark.parametrize("kind", ["folder", "config", "beside"])
def test_the_focus_of_a_folder_or_a_config_is_in_the_page(browser, images, tmp_path, kind) -> None:
    box = [0.0, 0.1, 0.2, 0.9]
    given, source, where = images / "focus.jsonl", images, None
    if kind != "folder":
        given, source = tmp_path / "focus.jsonl", tmp_path / "set.toml"
        where = "beside" if kind == "beside" else given.as_posix()
        subsets = "".join(f"[[datasets.subsets]]\nimage_dir = '{(images / f).as_posix()}'\n" for f in "ab")
        source.write_text(
            f"[[datasets]]\nresolution = 1024\nmin_bucket_reso = 768\nenable_bucket = true\n{subsets}"
            f"[kohya_bucket]\nfocus = '{where}'\n", encoding="utf-8",
        )  # fmt: skip
    if kind == "beside":
        (images / "a" / "wide.focus.json").write_text(json.dumps(box), encoding="utf-8")
    else:
        write(given, {"image": _relative(images / "a/wide.png", given.parent), "focus": box})
    page = tmp_path / "page.html"
    done = CliRunner().invoke(cli.app, ["explore", str(source), "--out", str(page), "--no-open", "--quiet"])
    assert done.exit_code == 0, (done.output, done.exception)
    browser.get(page.as_uri())
    until(browser, "return document.documentElement.dataset.placed")
    assert rows(browser) == {"a/wide.png": box}
    assert "not shown" not in browser.find_element("css selector", ".notes").text
    file = saved(browser, images if kind == "beside" else given.parent)
    assert focus_in(str(file), str(images / "a/wide.png")) == tuple(box)


def test_a_config_whose_focus_is_not_loaded_says_so(browser, images, tmp_path) -> None:
    show(browser, images, tmp_path)
    config = "[[datasets]]\nresolution = 512\nenable_bucket = true\n[kohya_bucket]\nfocus = 'my.jsonl'\n"
    browser.execute_script("explorer.takeConfig(arguments[0], 'my.toml')", config)
    said = "return document.querySelector('.notes').textContent"
    assert 'focus = "my.jsonl" is not shown until that file is loaded here' in browser.execute_script(said)
    load(browser, write(tmp_path / "my.jsonl", {"image": "set/a/wide.png", "focus": [0, 0]}))
    assert "is not shown until" not in browser.execute_script(said)


def test_where_a_file_lies_is_found_without_comparing_each_row_with_each_image(browser, tmp_path):
    """Clips as folders, whose frames have the same names in each."""
    open_explorer(browser, tmp_path)
    found, slices = browser.execute_script(
        """const paths = Array.from({ length: 3000 }, (_, i) => `clip${Math.floor(i / 10)}/${i % 10}.png`);
        const whole = Array.prototype.slice;
        const rows = new FocusRows({ known: new Set(paths.map((path) => `set/${path}`)) });
        let slices = 0;
        Array.prototype.slice = function (...range) { slices++; return whole.apply(this, range); };
        try {
          rows.load(paths.map((image) => JSON.stringify({ image, focus: [0.5, 0.5] })).join("\\n"), "focus.jsonl");
        } finally { Array.prototype.slice = whole; }
        return [[rows.rows.size, rows.lies.folder.join("/")], slices];"""
    )
    assert found == [3000, "set"]
    assert slices < 20 * 3000
