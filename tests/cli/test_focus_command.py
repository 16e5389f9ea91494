"""A focus on the command line: taken over from other programs, explained, counted, drawn."""

import json
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.command_line import command_line  # noqa: F401

SIZES = {"a.png": (400, 200), "b.png": (200, 400), "deep/c.png": (200, 200)}
# left, top, right, bottom in pixels
BOXES = {"a.png": [(0, 0, 40, 20), (60, 40, 100, 100)], "b.png": [(20, 300, 60, 400)]}
ROWS = [
    {"image": "images/a.png", "focus": [0.0, 0.0, 0.25, 0.5]},
    {"image": "images/b.png", "focus": [0.1, 0.75, 0.3, 1.0]},
]


@pytest.fixture
def run(command_line):  # noqa: F811
    def run(*arguments):
        code, out, err = command_line(*arguments)
        return SimpleNamespace(exit_code=code, stdout=out, output=out + err)

    return run


@pytest.fixture
def folder(tmp_path):
    for name, size in SIZES.items():
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(path)
    return tmp_path


def coco(folder):
    images = [{"id": i, "file_name": n, "width": SIZES[n][0], "height": SIZES[n][1]} for i, n in enumerate(BOXES)]
    boxes = [(i, *box) for i, some in enumerate(BOXES.values()) for box in some]
    annotations = [{"image_id": i, "category_id": 7, "bbox": [x, y, r - x, b - y]} for i, x, y, r, b in boxes]
    data = {"images": images, "annotations": annotations, "categories": [{"id": 7, "name": "dog"}]}
    (folder / "coco.json").write_text(json.dumps(data))
    return folder / "coco.json"


def percent(name, box):
    (width, height), (left, top, right, bottom) = SIZES[name], box
    value = {"x": left / width, "y": top / height, "width": (right - left) / width, "height": (bottom - top) / height}
    return {side: 100 * share for side, share in value.items()}


def label_studio(folder):
    def result(name, box):
        value = percent(name, box) | {"rectanglelabels": ["dog"], "rotation": 0}
        size = {"original_width": SIZES[name][0], "original_height": SIZES[name][1]}
        return {"type": "rectanglelabels", "value": value, **size}

    tasks = [
        {"data": {"image": f"/data/upload/1/0123abcd-{n}"}, "annotations": [{"result": [result(n, b) for b in some]}]}
        for n, some in BOXES.items()
    ]
    (folder / "tasks.json").write_text(json.dumps(tasks))
    return folder / "tasks.json"


def label_studio_min(folder):
    tasks = [
        {"id": 1, "image": f"/data/local-files/?d=images/{n}", "label": [percent(n, b) for b in some]}
        for n, some in BOXES.items()
    ]
    (folder / "min.json").write_text(json.dumps(tasks))
    return folder / "min.json"


def yolo(folder):
    (folder / "labels").mkdir()
    for name, some in BOXES.items():
        boxes = [percent(name, box) for box in some]
        lines = [f"7 {b['x'] / 100 + b['width'] / 200} {b['y'] / 100 + b['height'] / 200} {b['width'] / 100} "
                 f"{b['height'] / 100}" for b in boxes]  # fmt: skip
        (folder / "labels" / name).with_suffix(".txt").write_text("\n".join(lines) + "\n")
    (folder / "labels" / "classes.txt").write_text("dog\ncat\n")
    return folder / "labels"


def csv_in_pixels(folder):
    lines = [f"{n},{SIZES[n][0]},{SIZES[n][1]},dog,{','.join(map(str, b))}" for n, some in BOXES.items() for b in some]
    (folder / "boxes.csv").write_text("\n".join(["filename,width,height,class,xmin,ymin,xmax,ymax", *lines]))
    return folder / "boxes.csv"


def csv_in_shares(folder):
    lines = [
        f"{name[:-4]},{left / SIZES[name][0]},{right / SIZES[name][0]},{top / SIZES[name][1]},{bottom / SIZES[name][1]}"
        for name, some in BOXES.items()
        for left, top, right, bottom in some
    ]
    (folder / "open.csv").write_text("\r\n".join(["\ufeffImageID,XMin,XMax,YMin,YMax", *lines, ""]), encoding="utf-8")
    return folder / "open.csv"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filename,xmin,ymin,xmax\na.png,0,0,1", "no column for bottom"),
        ("image,x1,y1,x2,y2\na.png,0,0,40,20", "line 2: 40 is not a share of a picture"),
        ("image,x1,y1,x2,y2\na.png,0,0,one,1", "line 2: the box is"),
        ("image,width,height,x1,y1,x2,y2\na.png,0,9,0,0,1,1", "line 2: the image's width and height are 0 and 9"),
        ("", "no column for image"),
    ],
)
def test_a_table_that_holds_no_boxes_says_what_it_lacks(run, folder, text, message) -> None:
    (folder / "t.csv").write_text(text)
    result = run("focus", "import", folder / "t.csv", "--images", folder / "images", "-o", folder / "out.jsonl")
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("kind", [coco, label_studio, label_studio_min, yolo, csv_in_pixels, csv_in_shares])
def test_boxes_of_other_programs_become_one_rectangle_for_each_image(run, folder, kind) -> None:
    out = folder / "focus.jsonl"
    result = run("focus", "import", kind(folder), "--images", folder / "images", "-o", out)
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["image"] for row in found] == [row["image"] for row in ROWS]
    assert [row["focus"] for row in found] == [pytest.approx(row["focus"]) for row in ROWS]
    again = run("focus", "import", kind(folder) if kind is coco else folder, "--images", folder / "images", "-o", out)
    assert again.exit_code
    assert str(out) in again.output.replace("\n", "")


def test_boxes_of_upright_pictures_are_turned_like_the_stored_one(run, folder) -> None:
    turned = Image.new("RGB", (200, 400))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter to the right
    turned.save(folder / "images" / "a.png", exif=exif)
    arguments = ["focus", "import", coco(folder), "--images", folder / "images", "-o", folder / "focus.jsonl"]
    refused = run(*arguments)
    assert refused.exit_code
    assert "--upright" in refused.output
    assert run(*arguments, "--upright").exit_code == 0
    rows = [json.loads(line) for line in (folder / "focus.jsonl").read_text().splitlines()]
    assert rows[0]["focus"] == [0.0, 0.75, 0.5, 1.0]
    assert rows[1] == ROWS[1]


def test_what_cannot_be_taken_over_is_named(run, folder) -> None:
    def tried(data, *more):
        (folder / "x.json").write_text(data if isinstance(data, str) else json.dumps(data))
        out = folder / "out.jsonl"
        out.unlink(missing_ok=True)
        return run("focus", "import", folder / "x.json", "--images", folder / "images", "-o", out, *more)

    good = json.loads(coco(folder).read_text())
    assert "not JSON" in tried("{").output
    assert "neither COCO" in tried({}).output
    assert "annotation 1" in tried({**good, "annotations": [{"image_id": 99, "bbox": [0, 0, 1, 1]}]}).output
    assert "finite" in tried({**good, "annotations": [{"image_id": 0, "bbox": [0, 0, 1]}]}).output
    outside = tried({**good, "annotations": [{"image_id": 0, "bbox": [500, 0, 10, 10]}]})
    assert "outside" in outside.output
    assert "1.25" in outside.output
    assert "dog" in tried(good, "--label", "cat").output
    gone = {**good, "images": [{**good["images"][0], "file_name": "gone.png"}, good["images"][1]]}
    result = tried(gone)
    assert result.exit_code == 0
    assert "gone.png" in result.output
    written = len(BOXES) - 1
    boxes = sum(map(len, BOXES.values())) - len(next(iter(BOXES.values())))
    assert f"{written} image, {boxes} box" in result.output
    (folder / "empty").mkdir()
    nowhere = run("focus", "import", coco(folder), "--images", folder / "empty", "-o", folder / "out2.jsonl")
    assert nowhere.exit_code == 2
    assert not (folder / "out2.jsonl").exists()


def config(folder, table='focus = "{}/focus.jsonl"', keys="", subset=""):
    (folder / "focus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = f"""[[datasets]]
resolution = 128
enable_bucket = true
min_bucket_reso = 128
max_bucket_reso = 128
{keys}
[[datasets.subsets]]
image_dir = '{folder / "images"}'
{subset}
[kohya_bucket]
{table.format(folder.as_posix())}
"""
    (folder / "my.toml").write_text(text)
    return folder / "my.toml"


@pytest.mark.long
def test_a_file_of_another_form_is_one_line(run, folder) -> None:
    """Every value in turn, and every list and table, is something else."""
    size = {"original_width": 400, "original_height": 200}
    value = {"x": 1, "y": 2, "width": 3, "height": 4, "rotation": 5, "rectanglelabels": ["dog"]}
    result = {"value": value, **size}
    full = {"data": {"image": "/data/a.png"}, "annotations": [{"was_cancelled": False, "result": [result]}]}
    small = {"image": "/data/a.png", "label": [{**value, **size}]}
    others = (None, 7, "http://[", [[]], {"a": 1}, 10**400)
    for good in (json.loads(coco(folder).read_text()), [full], [small]):
        for i, place in enumerate(places(good)):
            for other in (others[i % 6], others[(i + 3) % 6]):
                (folder / "x.json").write_text(json.dumps(changed(good, place, other)))
                out = folder / "out.jsonl"
                out.unlink(missing_ok=True)
                run("focus", "import", folder / "x.json", "--images", folder / "images", "-o", out, "--quiet")


def places(data):
    yield ()
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield from ((key, *rest) for rest in places(data[key]))


def changed(data, place, other):
    if not place:
        return other
    copy = dict(enumerate(data)) if isinstance(data, list) else dict(data)
    copy[place[0]] = changed(data[place[0]], place[1:], other)
    return list(copy.values()) if isinstance(data, list) else copy


def test_text_files_of_yolo_that_are_no_boxes(run, folder) -> None:
    labels = yolo(folder)
    arguments = ["focus", "import", labels, "--images", folder / "images", "-o", folder / "focus.jsonl"]
    (labels / "caption.txt").write_text("2 dogs run through a green field\nand bark\n")
    assert run(*arguments).exit_code == 0
    (folder / "focus.jsonl").unlink()
    for line in ("0 0.1 0.2 0.3 0.2 0.3 0.4 0.1 0.4", "0 0.5 0.5 0.2", "a dog"):  # an outline, one too few, a text
        (labels / "a.txt").write_text(f"0 0.5 0.5 0.2 0.2\n{line}\n")
        refused = run(*arguments)
        assert refused.exit_code
        assert "a.txt, line 2: " in refused.output


def test_simulate_says_what_is_kept(run, folder) -> None:
    (row,) = json.loads(run("simulate", "400x200", "--max-bucket-reso", 512, "--min-bucket-reso", 512, "--resolution",
                            512, "--focus", "0,0,0.25,0.5", "--json").stdout)  # fmt: skip
    assert row["cut"] == [0, 0, 512, 0]
    assert row["focus_cut"] == [1.0, 0.0]
    path = config(folder)
    (row,) = json.loads(run("simulate", folder / "images" / "a.png", "--config", path, "--json").stdout)
    assert row["cut"] == [0, 0, 128, 0]
    (row,) = json.loads(run("simulate", folder / "images" / "deep" / "c.png", "--config", path, "--json").stdout)
    assert row["focus"] is None
    preview = folder / "preview.png"
    result = run("simulate", folder / "images" / "a.png", "--config", path, "--preview", preview)
    assert "focus" in result.output
    assert preview.is_file()
    assert run("simulate", "400x200", "--focus", "0.9,0,0.1,1").exit_code == 2


def test_plan_and_analyze_count_what_is_cut(run, folder) -> None:
    path = config(folder)
    plan = json.loads(run("plan", path, "--images", "--json").stdout)
    (dataset,) = plan["datasets"]
    assert dataset["focus"] == [{"rectangles": 2, "cut_in_middle": 2, "cut": 0}]
    assert [row["cut"] for row in dataset["image_rows"]] == [[0, 0, 128, 0], [0, 128, 0, 0]]
    page = folder / "report.html"
    result = run("analyze", "--config", path, "--html", page, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["datasets"][0]["focus"] == {
        "rectangles": 2,
        "cut_in_middle": 2,
        "cut": 0,
    }
    assert '"focus":{' in page.read_text(encoding="utf-8").replace(" ", "")
    plain = json.loads(run("plan", config(folder, table=""), "--json").stdout)["datasets"][0]
    assert plain["focus"] == []


@pytest.mark.parametrize(
    ("command", "change", "word"),
    [
        ("plan", {"subset": "random_crop = true"}, "random_crop"),
        ("plan", {"keys": "enable_bucket = false"}, "enable_bucket"),
        ("plan", {"table": 'focus = "nowhere.jsonl"'}, "nowhere.jsonl"),
        ("simulate", {"subset": "random_crop = true"}, "random_crop"),
        (
            "simulate",
            {"table": "focus = 'beside'\nfocus_weight = 0.3"},
            "'focus_weight'",
        ),
        ("simulate", {"keys": "enable_bucket = false"}, "enable_bucket"),
        ("explore", {"subset": "random_crop = true"}, "random_crop"),
    ],
)
def test_what_does_not_keep_a_focus_refuses_it_in_one_line(run, folder, command, change, word) -> None:
    path = config(folder, **change)
    if "enable_bucket" in change.get("keys", ""):
        path.write_text(path.read_text().replace("enable_bucket = true\n", ""))
    arguments = {
        "plan": [path],
        "explore": [path, "--no-open", "--out", folder / "page.html"],
        "simulate": [folder / "images" / "a.png", "--config", path],
    }
    result = run(command, *arguments[command])
    assert result.exit_code == 2
    assert word in result.output
    assert not (folder / "page.html").exists()


def test_before_0_11_a_focus_of_control_images_is_refused(run, folder) -> None:
    path = config(folder, subset=f"conditioning_data_dir = '{folder / 'images'}'")
    assert run("plan", path, "--sd-scripts", "0.11.1").exit_code == 0
    refused = run("plan", path, "--sd-scripts", "0.10.6")
    assert refused.exit_code == 2
    assert "control images" in refused.output


def test_in_a_config_of_musubi_tuner(run, folder) -> None:
    (folder / "images" / "a.focus.json").write_text("[0, 0, 0.25, 1]")
    text = f"[[datasets]]\nresolution = [256, 256]\nimage_directory = '{folder / 'images'}'\ncaption_extension = '.txt'"
    path = folder / "musubi.toml"
    for table, more in (("[kohya_bucket]\nfocus = 'beside'\n", []), ("", ["--focus", "0,0,1,1"])):
        path.write_text(f"[general]\nenable_bucket = true\n{table}{text}\n")
        result = run("simulate", folder / "images" / "a.png", "--config", path, *more, "--json")
        assert result.exit_code == 0, result.output
        (row,) = json.loads(result.stdout)
        assert row["focus"] == ([0, 0, 1, 1] if more else [0, 0, 0.25, 1])
        assert row["cut"][0] == (row["cut"][2] if more else 0)
    path.write_text(f"[general]\nenable_bucket = false\n[kohya_bucket]\nfocus = 'beside'\n{text}\n")
    for name in ("a", "b", "deep/c"):
        (folder / "images" / name).with_suffix(".txt").write_text("a dog")
    (planned,) = json.loads(run("plan", path, "--json").stdout)["datasets"]
    assert planned["focus"] == [{"rectangles": 1, "cut_in_middle": 1, "cut": 0}]
    assert "focus: 1 rectangle; the middle would cut 1" in run("plan", path).output


@pytest.mark.parametrize("command", ["explore", "precompute"])
def test_commands_for_sd_scripts_alone_say_so_of_a_config_of_musubi_tuner(run, folder, command) -> None:
    path = folder / "musubi.toml"
    path.write_text(
        f"[[datasets]]\nresolution = [256, 256]\nimage_directory = '{folder}'\ncaption_extension = '.txt'\n"
    )
    more = {
        "explore": (path, "--no-open", "--out", folder / "e.html"),
        "precompute": ("--vae", "x", "-o", folder / "store", "--config", path),
    }
    result = run(command, *more[command])
    assert result.exit_code == 2
    assert "musubi-tuner" in result.output
