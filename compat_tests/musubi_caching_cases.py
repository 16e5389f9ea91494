"""What befalls a dataset and its caches, as steps of `musubi_caching_script.py`.

All scenarios of a side run in one process, with models that need no files.
"""

import json
import subprocess
import sys

from musubi_support import HERE, environment, family

from kohya_bucket.trainers.musubi.checkout import clips_always_in_buckets

DOOR = ("-m", "kohya_bucket.launch")
SIZE = (128, 128)
MODELS = {
    "latents": {"fp": ("--vae", "--image_encoder"), "mmh3": ("--video_vae",)},
    "text": {
        "wan": ("--t5",),
        "hv": ("--text_encoder1", "--text_encoder2"),
        "mf": ("--text_encoder1", "--text_encoder2"),
        "fp": ("--text_encoder1", "--text_encoder2"),
        "fk": ("--text_encoder1", "--text_encoder2"),
    },
}


class Case:
    """The steps of one scenario in a folder of its own."""

    def __init__(self, folder, family):
        self.folder, self.family, self.steps = folder, family, []
        self.config, self.cache = str(folder / "dataset.toml"), str(folder / "cache")
        self.table = ""  # [kohya_bucket]
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
        lines += [*(f"{k} = {json.dumps(v)}" for k, v in keys.items()), self.table, ""]
        self.do("write", self.config, "\n".join(lines))

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

    def cached(self, many, *size):
        for i in range(many):
            self.image(f"a{i}.png", i)
        self.dataset(*size)
        self.both()

    def train(self):
        self.do("train", self.config, self.family)

    def files(self):
        self.do("files", self.cache)


def resolution(case):
    case.cached(3, (128, 128))
    case.dataset((256, 256))
    case.train()
    case.both("--skip_existing")
    case.train()


def edited(case):
    case.cached(3)
    case.image("a1.png", 101)
    case.train()
    case.both("--skip_existing")
    case.train()


def cut_off(case):
    case.cached(3)
    case.do("cut", f"{case.cache}/a1_0128x0128_{case.family}.safetensors", 4000)
    case.train()
    case.both("--skip_existing")
    case.train()


def deleted(case):
    case.cached(3)
    case.do("remove", case.folder / "im" / "a1.png")
    case.train()
    case.files()
    case.both()
    case.files()


def replaced(case):
    case.cached(2)
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


def not_finite(case):
    for i, value in enumerate((0, 253, 2)):
        case.image(f"a{i}.png", value)
    case.dataset()
    case.both()
    case.image("a1.png", 101, caption=False)
    case.latents()
    case.train()


def other_encodings(case):
    for i in range(2):
        case.image(f"a{i}.png", i)
    case.do("write", case.folder / "im" / "a1.txt", "caf\xe9 1", "cp1252")
    case.dataset()
    case.both()
    row = {"image_path": str(case.folder / "im" / "a0.png"), "caption": "caf\xe9 1"}
    case.do("write", case.folder / "list.jsonl", json.dumps(row, ensure_ascii=False), "cp1252")
    case.dataset(source="image_jsonl_file", lies="list.jsonl")
    case.latents()
    case.files()


def no_text(case):
    case.cached(3)
    case.do("remove", f"{case.cache}/a1_{case.family}_te.safetensors")
    case.train()


def kept(case):
    case.cached(3)
    case.files()
    case.both()
    case.files()
    case.do("write", case.folder / "other.bin", "another model")
    case.latents("--skip_existing", model="other.bin")
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
    """Since 0.3.6 such clips have one size, and what was cached in buckets is of other sizes."""
    videos(case, 4, target_frames=[5])
    case.both()
    videos(case, 4, target_frames=[5], enable_bucket=False)
    case.train()
    case.both()
    case.train()


def not_enlarged(case):
    """Clips that are smaller than their bucket; since 0.3.6 they keep their size. The last is too small for one."""
    videos(case, 3, target_frames=[5], resolution=[256, 256])
    case.both()
    rows = [(f"v{v}", 10 * v + 10) for v in range(3)]
    if case.keeps_small:
        frames(case, "v9", [70] * 9, (48, 12))
        rows.append(("v9", 70))
    rows = [{"video_path": str(case.folder / name), "caption": f"caption {value}"} for name, value in rows]
    case.lines(rows, "video_jsonl_file", target_frames=[5], resolution=[256, 256], bucket_no_upscale=True)
    case.train()
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
    case.cached(3)
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
    """Every key of a list and a dataset that says how often an item is trained."""
    rows = []
    for i in range(3):
        for name in (f"a{i}", f"c{i}"):
            case.do("picture", case.folder / f"{name}.png", i, *SIZE)
        path = str(case.folder / f"a{i}.png")
        rows.append({"image_path": path, "caption": f"caption {i}", "control_path": str(case.folder / f"c{i}.png")})
    case.lines(rows, num_repeats=3)
    case.both()
    case.train()


def other_controls(case):
    """One image and caption with controls that differ, in number too, and a line that says what the first does."""
    for name in ("a0", "c0", "c1"):
        case.do("picture", case.folder / f"{name}.png", 0, *SIZE)
    row = {"image_path": str(case.folder / "a0.png"), "caption": "caption 7"}
    both = [str(case.folder / name) for name in ("c0.png", "c1.png")]
    rows = [{**row, **{f"control_path_{i}": one for i, one in enumerate(own)}} for own in (both[:1], both[1:], both)]
    case.lines([*rows, rows[0]])
    case.both()
    case.train()
    case.both()


def no_item(case):
    case.do("write", case.folder / "im" / "readme.md", "no image")
    one_image(case)
    case.do("remove", case.folder / "im" / "a.png")
    case.train()


def all_broken(case):
    case.cached(2)
    for i in range(2):
        case.do("cut", case.folder / "im" / f"a{i}.png", 60)
    case.latents()
    case.files()


def skip_broken(case):
    """The option for broken files (since 0.3.6) is no reason to make what is current again."""
    case.cached(3)
    case.files()
    case.do("cut", case.folder / "im" / "a1.png", 60)
    case.latents("--skip_broken")
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


def minimax_h3(case):
    """Clips at 24 frames per second, each with outputs of its own; sound and further keys of a line count."""
    for name, frames, fps in (("v0", 22, 24), ("v1", 22, 12), ("v2", 7, 24)):
        case.do("clip", case.folder / f"{name}.mp4", frames, 96, 64, fps)
    case.do("picture", case.folder / "face.png", 50, 32, 32)
    rows = [{"video_path": f"v{v}.mp4", "caption": f"caption {v}"} for v in range(3)]
    rows[2]["references"] = [{"type": "image", "path": "face.png"}]
    keys = {"source": "video_jsonl_file", "resolution": [96, 64], "batch_size": 1}
    case.lines(rows, target_frames=[5, 22], **keys)
    case.both()
    case.train()
    case.files()
    case.both()
    case.files()
    case.do("sound", case.folder / "v0.wav", 2)
    case.do("picture", case.folder / "face.png", 60, 32, 32)
    rows[1]["teacher_caption"] = "another"
    case.lines(rows, target_frames=[5, 22], **keys)
    case.train()
    case.both("--skip_existing")
    case.train()
    case.lines(rows, target_frames=[5], **keys)
    case.train()
    case.both()
    case.files()
    case.train()


def minimax_h3_images(case):
    for i in range(3):
        case.image(f"a{i}.png", i, (96, 64))
        case.do("picture", case.folder / "control" / f"a{i}.png", 50 + i, 96, 64)
    keys = {"control_directory": str(case.folder / "control"), "batch_size": 1}
    case.dataset((128, 128), fp_1f_clean_indices=[0], fp_1f_target_index=5, **keys)
    case.both()
    case.train()
    case.dataset((128, 128), fp_1f_clean_indices=[0], fp_1f_target_index=9, **keys)
    case.train()


def knows_minimax_h3(source):
    return (source / "musubi_tuner" / "dataset" / "audio_utils.py").is_file()


SCENARIOS = {
    "repeated": repeated, "no_item": no_item, "all_broken": all_broken, "short_video": short_video,
    "sections": sections, "two_passes": two_passes, "controls": controls, "other_controls": other_controls,
    "resolution": resolution, "edited": edited, "cut_off": cut_off, "deleted": deleted, "replaced": replaced,
    "same_stem": same_stem, "same_name": same_name, "too_small": too_small, "unreadable": unreadable,
    "no_text": no_text, "other_encodings": other_encodings, "kept": kept, "one_image": one_image,
    "other_frames": other_frames, "without_buckets": without_buckets, "skip_broken": skip_broken,
    "not_enlarged": not_enlarged, "minimax_h3": minimax_h3, "minimax_h3_images": minimax_h3_images,
    "not_finite": not_finite,
}  # fmt: skip
FAMILIES = {
    "repeated": "qie", "short_video": "wan", "sections": "fp", "two_passes": "hv", "controls": "qie",
    "other_controls": "qie", "too_small": "qi", "other_frames": "wan", "without_buckets": "wan",
    "not_enlarged": "wan", "minimax_h3": "mmh3", "minimax_h3_images": "mmh3",
}  # fmt: skip


def play(source, folder, cases, door, **told):
    """Per scenario the results of its steps; `told` are further variables of the environment."""
    folder.mkdir(exist_ok=True)
    steps, out = folder / "steps.json", folder / "results.json"
    steps.write_text(json.dumps({name: case.steps for name, case in cases.items()}), encoding="utf-8")
    command = [sys.executable, *door, str(HERE / "musubi_caching_script.py"), str(steps), str(out)]
    done = subprocess.run(
        command, env=environment(source) | told, capture_output=True, encoding="utf-8", errors="replace", timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text(encoding="utf-8"))


def cases_in(source, folder, names=SCENARIOS, of=None):
    """The scenarios of those names; of the family `of`, or of the usual ones."""
    made = {}
    for name in names:
        if FAMILIES.get(name) == "mmh3" and not knows_minimax_h3(source):
            continue
        made[name] = Case(folder / name, of or FAMILIES.get(name, family(source)))
        made[name].keeps_small = not clips_always_in_buckets(source / "musubi_tuner")
        SCENARIOS[name](made[name])
    return made


def items(result):
    return sorted(item for row in result["rows"] for item in row["items"])


def captions(result):
    return sorted(caption for row in result["rows"] for caption in row["captions"])


def refused(result, *words):
    """The line that a training ended with before its first step."""
    assert result["exit"] == 2, result
    (line,) = [line for line in result["log"].splitlines() if line.startswith("kohya_bucket: ")]
    for word in words:
        assert word in line
    return line
