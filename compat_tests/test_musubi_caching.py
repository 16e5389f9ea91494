"""musubi-tuner's real caching programs and data sets: what they do of themselves, and what they do with the door open.

All scenarios of a side run in one process, with models that need no files (`musubi_caching_script.py`).
"""

import json
import subprocess
import sys

import pytest
from musubi_support import HERE, environment, family

DOOR = ("-m", "kohya_bucket.launch")
SIZE = (128, 128)
MODELS = {
    "latents": {"fp": ("--vae", "--image_encoder")},
    "text": {
        "wan": ("--t5",),
        "hv": ("--text_encoder1", "--text_encoder2"),
        "fp": ("--text_encoder1", "--text_encoder2"),
    },
}


class Case:
    """The steps of one scenario in a folder of its own."""

    def __init__(self, folder, family):
        self.folder, self.family, self.steps = folder, family, []
        self.config, self.cache = str(folder / "dataset.toml"), str(folder / "cache")
        self.do("write", folder / "model.bin", "model")

    def do(self, what, *arguments):
        self.steps.append([what, *(str(a) if not isinstance(a, (int, list)) else a for a in arguments)])

    def image(self, name, value, size=SIZE, caption=True):
        self.do("picture", self.folder / "im" / name, value, *size)
        if caption:
            self.caption(name, value)

    def caption(self, name, value):
        self.do("write", (self.folder / "im" / name).with_suffix(".txt"), f"caption {value}")

    def dataset(self, resolution=SIZE, source="image_directory", lies="im", **keys):
        general = {"resolution": list(resolution), "caption_extension": ".txt", "batch_size": 2, "enable_bucket": True}
        keys = {source: str(self.folder / lies), "cache_directory": self.cache} | keys
        general = {name: value for name, value in general.items() if name not in keys}
        lines = ["[general]", *(f"{name} = {json.dumps(value)}" for name, value in general.items()), "[[datasets]]"]
        self.do("write", self.config, "\n".join([*lines, *(f"{k} = {json.dumps(v)}" for k, v in keys.items()), ""]))

    def lines(self, rows, source="image_jsonl_file", **keys):
        self.do("write", self.folder / "list.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
        self.dataset(source=source, lies="list.jsonl", **keys)

    def latents(self, *options, model="model.bin"):
        self.run("latents", ("--vae",), model, options)

    def text(self, *options, model="model.bin"):
        self.run("text", ("--text_encoder",), model, options)

    def run(self, what, usual, model, options):
        models = [part for name in MODELS[what].get(self.family, usual) for part in (name, self.folder / model)]
        edit = ("--edit",) if self.family == "qie" else ()
        self.do(what, self.family, "--dataset_config", self.config, *models, *edit, *options)

    def both(self, *options):
        self.latents(*options)
        self.text(*options)

    def train(self):
        self.do("train", self.config, self.family)

    def files(self):
        self.do("files", self.cache)


def resolution(case):
    for i in range(3):
        case.image(f"a{i}.png", i)
    case.dataset((128, 128))
    case.both()
    case.dataset((256, 256))
    case.train()
    case.both("--skip_existing")
    case.train()


def edited(case):
    for i in range(3):
        case.image(f"a{i}.png", i)
    case.dataset()
    case.both()
    case.image("a1.png", 101)
    case.train()
    case.both("--skip_existing")
    case.train()


def cut_off(case):
    for i in range(3):
        case.image(f"a{i}.png", i)
    case.dataset()
    case.both()
    case.do("cut", f"{case.cache}/a1_0128x0128_{case.family}.safetensors", 4000)
    case.train()
    case.both("--skip_existing")
    case.train()


def deleted(case):
    for i in range(3):
        case.image(f"a{i}.png", i)
    case.dataset()
    case.both()
    case.do("remove", case.folder / "im" / "a1.png")
    case.train()
    case.files()
    case.both()
    case.files()


def replaced(case):
    for i in range(2):
        case.image(f"a{i}.png", i)
    case.dataset()
    case.both()
    case.image("a1.png", 1, (160, 128))
    case.both("--keep_cache")
    case.train()


def same_stem(case):
    case.image("a.png", 1)
    case.image("a.jpg", 200, caption=False)
    case.image("b.png", 3)
    case.dataset()
    case.both()
    case.train()
    case.both()
    case.files()


def same_name(case):
    """Two images of one name, and one of them twice: with a caption of its own, and in a line that says the same."""
    rows = []
    for folder, value in (("x", 10), ("y", 20), ("y", 30)):
        path = case.folder / folder / "im.png"
        if value < 30:
            case.do("picture", path, value, *SIZE)
        rows.append({"image_path": str(path), "caption": f"caption {value}"})
    case.lines([*rows, rows[0]])
    case.both()
    case.train()


def too_small(case):
    case.image("a.png", 1)
    case.image("thin.png", 2, (300, 12))
    case.dataset(bucket_no_upscale=True)
    case.both()
    case.files()
    case.train()


def unreadable(case):
    for i in range(5):
        case.image(f"a{i}.png", i, (200, 150))
    case.do("cut", case.folder / "im" / "a1.png", 200)
    case.dataset()
    case.latents()
    case.text()
    case.train()


def no_text(case):
    for i in range(3):
        case.image(f"a{i}.png", i)
    case.dataset()
    case.both()
    case.do("remove", f"{case.cache}/a1_{case.family}_te.safetensors")
    case.train()


def kept(case):
    for i in range(3):
        case.image(f"a{i}.png", i)
    case.dataset()
    case.both()
    case.files()
    case.both()
    case.files()
    case.do("write", case.folder / "other.bin", "another model")
    case.latents(model="other.bin")
    case.files()


def frames(case, name, values, size=SIZE):
    """A folder of frames, which a list may name as a video: its pixels are exact."""
    for i, value in enumerate(values):
        case.do("picture", case.folder / name / f"{i:03d}.png", value, *size)


def videos(case, count, **keys):
    rows = []
    for v in range(count):
        frames(case, f"v{v}", [10 * v + 10] * 9, SIZE if v % 2 else (160, 112))
        rows.append({"video_path": str(case.folder / f"v{v}"), "caption": f"caption {10 * v + 10}"})
    case.lines(rows, source="video_jsonl_file", **keys)


def other_frames(case):
    videos(case, 2, target_frames=[1, 5])
    case.both()
    case.train()
    videos(case, 2, target_frames=[9])
    case.train()
    case.both("--keep_cache")
    case.train()


def without_buckets(case):
    videos(case, 4, target_frames=[5], enable_bucket=False)
    case.both()
    case.train()


def one_image(case):
    case.image("a.png", 7)
    case.dataset()
    case.both()
    case.train()


def sections(case):
    """FramePack keeps a clip in several files."""
    videos(case, 2, target_frames=[9], fp_latent_window_size=1)
    case.both()
    case.files()
    case.train()
    case.both()
    case.do("remove", f"{case.cache}/v1_00000-009-0001_0128x0128_fp.safetensors")
    case.train()
    case.both()
    case.train()
    videos(case, 2, target_frames=[9], fp_latent_window_size=2)
    case.train()


def two_passes(case):
    """HunyuanVideo's two text encoders add to one file."""
    for i in range(3):
        case.image(f"a{i}.png", i)
    case.dataset()
    case.both()
    case.train()
    case.caption("a1.png", 101)
    case.text("--skip_existing")
    case.train()


def controls(case):
    for i in range(2):
        case.image(f"a{i}.png", i)
        case.do("picture", case.folder / "control" / f"a{i}_0.png", 50 + i, 128, 128)
        case.do("picture", case.folder / "control" / f"a{i}_1.png", 60 + i, 128, 128)
    case.dataset(control_directory=str(case.folder / "control"))
    case.both()
    case.train()
    case.both()
    case.do("picture", case.folder / "control" / "a1_1.png", 77, 160, 128)
    case.train()
    case.both("--skip_existing")
    case.train()


def repeated(case):
    """Every key of a list and a data set that says how often an item is trained."""
    rows = []
    for i in range(3):
        for name in (f"a{i}", f"c{i}"):
            case.do("picture", case.folder / f"{name}.png", i, *SIZE)
        path = str(case.folder / f"a{i}.png")
        rows.append({"image_path": path, "caption": f"caption {i}", "control_path": str(case.folder / f"c{i}.png")})
    case.lines(rows, num_repeats=3)
    case.both()
    case.train()


def no_item(case):
    case.do("write", case.folder / "im" / "readme.md", "no image")
    one_image(case)
    case.do("remove", case.folder / "im" / "a.png")
    case.train()


def all_broken(case):
    for i in range(2):
        case.image(f"a{i}.png", i)
    case.dataset()
    case.both()
    for i in range(2):
        case.do("cut", case.folder / "im" / f"a{i}.png", 60)
    case.latents()
    case.files()


def short_video(case):
    videos(case, 2, target_frames=[5])
    frames(case, "v1b", [70] * 3)
    rows = [(name, value) for name, value in (("v0", 10), ("v1", 20), ("v1b", 70))]
    case.lines(
        [{"video_path": str(case.folder / name), "caption": f"caption {v}"} for name, v in rows],
        source="video_jsonl_file",
        target_frames=[5],
    )
    case.both()
    case.train()


SCENARIOS = {
    "repeated": repeated, "no_item": no_item, "all_broken": all_broken, "short_video": short_video,
    "sections": sections, "two_passes": two_passes, "controls": controls,
    "resolution": resolution, "edited": edited, "cut_off": cut_off, "deleted": deleted, "replaced": replaced,
    "same_stem": same_stem, "same_name": same_name, "too_small": too_small, "unreadable": unreadable,
    "no_text": no_text, "kept": kept, "one_image": one_image, "other_frames": other_frames,
    "without_buckets": without_buckets,
}  # fmt: skip
FAMILIES = {
    "repeated": "qie", "short_video": "wan", "sections": "fp", "two_passes": "hv", "controls": "qie",
    "too_small": "qi", "other_frames": "wan", "without_buckets": "wan",
}  # fmt: skip


def play(source, folder, cases, door):
    """Per scenario the results of its steps."""
    folder.mkdir(exist_ok=True)
    steps, out = folder / "steps.json", folder / "results.json"
    steps.write_text(json.dumps({name: case.steps for name, case in cases.items()}), encoding="utf-8")
    command = [sys.executable, *door, str(HERE / "musubi_caching_script.py"), str(steps), str(out)]
    done = subprocess.run(
        command, env=environment(source), capture_output=True, encoding="utf-8", errors="replace", timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text(encoding="utf-8"))


def cases_in(source, folder, names=SCENARIOS):
    made = {}
    for name in names:
        made[name] = Case(folder / name, FAMILIES.get(name, family(source)))
        SCENARIOS[name](made[name])
    return made


@pytest.fixture(scope="module")
def sides(musubi_source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("caching")
    return {
        "left": play(musubi_source, folder / "left", cases_in(musubi_source, folder / "left"), ()),
        "right": play(musubi_source, folder / "right", cases_in(musubi_source, folder / "right"), DOOR),
        "folder": folder,
    }


@pytest.fixture(scope="module")
def left(sides):
    return sides["left"]


@pytest.fixture(scope="module")
def right(sides):
    return sides["right"]


def items(result):
    return sorted(item for row in result["rows"] for item in row["items"])


def captions(result):
    return sorted(caption for row in result["rows"] for caption in row["captions"])


def refused(result, *words):
    assert result["exit"] == 2, result
    (line,) = [line for line in result["log"].splitlines() if line.startswith("kohya_bucket: ")]
    for word in words:
        assert word in line
    return line


@pytest.mark.slow
def test_a_resolution_that_changed(left, right):
    """Their names hold no resolution, and what is skipped is what exists."""
    *_, before, _, _, after = left["resolution"]
    assert {tuple(row["size"]) for result in (before, after) for row in result["rows"]} == {(16, 16)}
    *_, before, again, text, after = right["resolution"]
    line = refused(before, "3 of 3 items", "the bucket changed (128x128 -> 256x256)", "_cache_latents.py")
    assert "text_encoder" not in line
    assert "3 items: 0 current, 3 made" in again["log"]
    assert "3 captions: 3 current, 0 made" in text["log"]
    assert {tuple(row["size"]) for row in after["rows"]} == {(32, 32)}


@pytest.mark.slow
def test_an_image_and_a_caption_that_changed(left, right):
    *_, before, _, _, after = left["edited"]
    assert items(before) == captions(before) == items(after) == captions(after) == [0, 1, 2]
    *_, before, again, text, after = right["edited"]
    refused(before, "1 of 3 items", "a1.png (latents: the image changed", "text: the caption changed")
    assert "3 items: 2 current, 1 made" in again["log"]
    assert "3 captions: 2 current, 1 made" in text["log"]
    assert items(after) == captions(after) == [0, 2, 101]


@pytest.mark.slow
def test_a_file_that_is_cut_off(left, right):
    *_, before, _, _, after = left["cut_off"]
    assert "SafetensorError" in before["error"]
    assert "SafetensorError" in after["error"]
    *_, before, again, _, after = right["cut_off"]
    refused(before, "a1.png (latents: it is broken (4000 bytes of ")
    assert "3 items: 2 current, 1 made" in again["log"]
    assert items(after) == [0, 1, 2]


@pytest.mark.slow
def test_an_image_that_was_deleted(left, right):
    _, _, trained, files, _, _, cleaned = left["deleted"]
    assert items(trained) == [0, 1, 2]
    _, _, trained, kept, _, _, after = right["deleted"]
    assert items(trained) == [0, 2]
    assert "because the config does not ask for it: 2 files (a1_" in trained["log"]
    assert kept["files"].keys() == files["files"].keys()
    assert after["files"].keys() == cleaned["files"].keys()
    assert not any(name.startswith("a1") for name in after["files"])


@pytest.mark.slow
def test_an_image_of_another_size(left, right):
    assert items(left["replaced"][-1]) == [0, 1, 1]
    trained = right["replaced"][-1]
    assert items(trained) == [0, 1]
    assert "because the config does not ask for it: 1 file (a1_0128x0128_" in trained["log"]


@pytest.mark.slow
def test_images_that_share_a_stem_or_a_name(left, right):
    assert len(items(left["same_stem"][2])) == 2
    assert len(items(left["same_name"][-1])) == 1
    *_, trained, latents, text, files = right["same_stem"]
    assert sorted(items(trained)) == [1, 3, 200]
    assert captions(trained) == [1, 1, 3]
    assert "3 items: 3 current" in latents["log"]
    assert "3 captions: 3 current" in text["log"]
    assert len(files["files"]) == 6
    trained = right["same_name"][-1]
    assert items(trained) == [10, 20, 20]
    assert captions(trained) == [10, 20, 30]


@pytest.mark.slow
def test_an_image_shorter_than_a_step(left, right):
    *_, files, trained = left["too_small"]
    assert "thin_0300x0012_qi.safetensors" in files["files"]
    assert "size 0" in trained["error"]
    cached, _, files, trained = right["too_small"]
    assert "1 item left out: thin.png: 300x12 is too small" in cached["log"]
    assert "thin_0300x0012_qi.safetensors" not in files["files"]
    assert items(trained) == [1]
    assert "1 item left out: thin.png" in trained["log"]


@pytest.mark.slow
def test_an_image_that_cannot_be_read(left, right):
    cached, _, trained = left["unreadable"]
    assert "truncated" in cached["error"]
    assert "rows" not in trained
    cached, _, trained = right["unreadable"]
    assert "1 item left out: a1.png: cannot be read as an image" in cached["log"]
    assert items(trained) == [0, 2, 3, 4]
    assert "1 item left out: a1.png" in trained["log"]


@pytest.mark.slow
def test_images_none_of_which_can_be_read(left, right):
    """A drive that is not there shall not cost the caches."""
    ended, files = right["all_broken"][2:]
    assert ended["exit"] == 2
    assert "not one of 2 items can be read" in ended["log"]
    assert files["files"].keys() == left["all_broken"][-1]["files"].keys()


@pytest.mark.slow
def test_an_item_without_a_cached_caption(left, right):
    assert items(left["no_text"][-1]) == [0, 2]
    line = refused(right["no_text"][-1], "a1.png (text: not encoded yet)", "_cache_text_encoder_outputs.py")
    assert "_cache_latents" not in line


@pytest.mark.slow
def test_what_is_current_is_kept(left, right):
    def made_again(results):
        first, second, third = (result["files"] for result in results if "files" in result)
        return [
            {name.split("_")[-1] for name in a if a[name] != b[name]} for a, b in ((first, second), (second, third))
        ]

    assert all(made_again(left["kept"]))
    kept, other_vae = made_again(right["kept"])
    assert kept == set()
    assert len(other_vae) == 1
    assert "te.safetensors" not in other_vae
    assert "the VAE's weights changed" in right["kept"][-2]["log"]


@pytest.mark.slow
def test_a_folder_without_items(left, right):
    assert items(left["no_item"][-1]) == [7]
    refused(right["no_item"][-1], "has no items with captions")


@pytest.mark.slow
def test_other_target_frames(left, right):
    _, _, first, before, _, _, after = left["other_frames"]
    assert len(items(before)) == 4
    assert len(items(after)) == 6
    _, _, same, before, _, _, after = right["other_frames"]
    assert items(same) == items(first) == [10, 10, 20, 20]
    refused(before, "target_frames changed ([1, 5] -> [9])")
    assert items(after) == [10, 20]
    assert "because the config does not ask for it: 4 files" in after["log"]


@pytest.mark.slow
def test_clips_without_enable_bucket(left, right):
    assert "stack expects each tensor to be equal size" in left["without_buckets"][-1]["error"]
    trained = right["without_buckets"][-1]
    assert items(trained) == [10, 20, 30, 40]
    assert {len(row["items"]) for row in trained["rows"]} == {2}


@pytest.mark.slow
def test_a_video_that_is_too_short(left, right):
    trained = right["short_video"][-1]
    assert items(trained) == items(left["short_video"][-1]) == [10, 20]
    assert "v1b: 3 frames, and none of target_frames is that short" in trained["log"]


@pytest.mark.slow
def test_a_clip_in_several_files(left, right):
    """FramePack: a section is missing, then the window changes."""
    _, _, files, whole, *_, missing, _, _, after, other = right["sections"]
    assert files["files"].keys() == left["sections"][2]["files"].keys()
    assert items(whole) == items(after) == [10, 10, 20, 20]
    refused(missing, "v1 (latents: not encoded yet)")
    refused(other, "fp_latent_window_size changed (1 -> 2)")


@pytest.mark.slow
def test_two_text_encoders_in_one_file(left, right):
    _, _, first, text, after = right["two_passes"]
    assert captions(first) == captions(left["two_passes"][-1]) == [0, 1, 2]
    assert "3 captions: 2 current, 1 made" in text["log"]
    assert captions(after) == [0, 2, 101]


@pytest.mark.slow
def test_control_images(left, right):
    """Latents and, with this model family, text outputs depend on them."""
    *_, before, latents, text, after = right["controls"]
    assert items(left["controls"][-1]) == items(after) == [0, 1]
    refused(before, "a1.png (latents: the image changed", "text: the image changed")
    assert "2 items: 1 current, 1 made" in latents["log"]
    assert "2 captions: 1 current, 1 made" in text["log"]
    trained = right["repeated"][-1]
    assert items(trained) == captions(trained) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.fixture(scope="module")
def mixed(musubi_source, sides):
    """What each side makes of the other's files."""
    folder = sides["folder"]
    resolutions = []
    for side in ("left", "right"):
        case = Case(folder / side / "kept", family(musubi_source))
        case.steps.clear()
        case.train()
        resolutions.append(case)
    ours, theirs = resolutions[1], resolutions[0]
    theirs.dataset((256, 256))
    theirs.train()
    theirs.dataset()
    theirs.both()
    theirs.image("a1.png", 101)
    theirs.train()
    theirs.text()
    theirs.latents()
    theirs.train()
    first = play(musubi_source, folder / "again", {"ours": ours}, ())
    return first | play(musubi_source, folder / "again", {"theirs": theirs}, DOOR)


@pytest.mark.slow
def test_each_reads_what_the_other_made(mixed):
    assert items(mixed["ours"][0]) == captions(mixed["ours"][0]) == [0, 1, 2]
    believed, other, latents, text, edited, _, _, after = mixed["theirs"]
    assert items(believed) == captions(believed) == [0, 1, 2]
    refused(other, "the bucket changed (128x128 -> 256x256)")
    assert "3 items: 3 current" in latents["log"]
    assert "3 captions: 3 current" in text["log"]
    refused(edited, "a1.png (latents: the image is newer than its cache", "text: the caption changed")
    assert items(after) == captions(after) == [0, 2, 101]
