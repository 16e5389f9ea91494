"""Jobs of ai-toolkit: read, planned, and shown by the commands."""

import json
import locale
import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import kohya_bucket
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import argument
from kohya_bucket.trainers.ai_toolkit.companions import companions_of
from kohya_bucket.trainers.ai_toolkit.config import read_job
from kohya_bucket.trainers.door import environment
from tests.cli.test_preview import mistakes
from tests.command_line import command_line
from tests.pictures import make_pictures

pytest.importorskip("yaml")
__all__ = ["command_line"]
SIZES = [(300, 200), (200, 300), (300, 200), (256, 256), (310, 205)]


@pytest.fixture
def job(tmp_path):
    """A file that is made of a dataset's keys, and of others for the process and for the whole."""
    make_pictures(tmp_path / "images", SIZES, caption="caption")
    hidden = tmp_path / "images" / ".thumbs"
    hidden.mkdir()
    shutil.copy(tmp_path / "images" / "0.png", hidden)

    def make(*datasets, whole=None, **process):
        listed = [{"folder_path": str(tmp_path / "images"), **keys} for keys in datasets or ({},)]
        process = {"type": "sd_trainer", "datasets": listed, "train": {"batch_size": 2, "steps": 101}, **process}
        data = {"job": "extension", "config": {"name": "x", "process": [process]}, **(whole or {})}
        file = tmp_path / "job.yaml"
        file.write_text(json.dumps(data), encoding="utf-8")  # JSON is YAML
        return file

    return make


@pytest.mark.parametrize(
    "key", ["control_path", "control_path_2", "mask_path", "inpaint_path", "clip_image_path", "unconditional_path"]
)
def test_companions_that_are_missing_are_named(job, command_line, tmp_path, key):
    folder = tmp_path / "beside"

    def found(**more):
        keys = {key: str(folder), "resolution": [64, 128], "batch_size": 1, **more}
        data = json.loads(command_line("plan", job(keys), "--json")[1])
        return [(one["count"], sorted(Path(name).name for name in one["names"])) for one in data["findings"]]

    assert found() == [(1, ["beside"])]
    folder.mkdir()
    assert found() == [(5, [f"{i}.png" for i in range(5)])]
    for i, ending in enumerate((".png", ".webp", ".jpg", ".gif")):
        (folder / f"{i}{ending}").touch()
    missing = [f"{i}.png" for i in ((2, 3, 4) if key == "inpaint_path" else (3, 4))]
    assert found() == [(len(missing), missing)]
    assert (found(alpha_mask=True) == []) == (key == "mask_path")
    for i in range(5):
        (folder / f"{i}.png").touch()
    assert found() == []


def test_on_windows_names_of_companions_may_differ_in_case(tmp_path, monkeypatch):
    (tmp_path / "IMG_1.PNG").touch()
    images = [str(tmp_path / "x" / f"img_{i}.png") for i in (1, 2)]
    assert companions_of(images, str(tmp_path), "control_path") == ["", ""]
    monkeypatch.setattr(os.path, "normcase", str.lower)
    assert companions_of(images, str(tmp_path), "control_path") == [str(tmp_path / "img_1.png"), ""]


def test_a_model_that_edits_needs_control_images(job, command_line, tmp_path):
    def found(arch, **keys):
        data = json.loads(command_line("plan", job({"batch_size": 1, **keys}, model={"arch": arch}), "--json")[1])
        return [one["code"] for one in data["findings"]]

    assert found("flux_kontext") == found("qwen_image_edit_plus") == ["missing-control"]
    assert found("flux") == found("flux_kontext", controls=["depth"]) == []
    assert found("flux_kontext", control_path=str(tmp_path / "images")) == []
    assert found("flux", control_path=5) == ["wrong-type"]


@pytest.mark.parametrize(
    ("train", "code"),
    [({"batch_size": "2"}, "wrong-type"), ({"batch_size": 0}, "batch-size"), ({"steps": "9"}, "wrong-type"),
     ({"gradient_accumulation": 0}, "gradient-accumulation")],
)  # fmt: skip
def test_numbers_that_end_a_training_are_found(job, command_line, train, code):
    assert code in command_line("plan", job(train=train), "--json")[1]


def test_each_resolution_and_turn_is_planned(job, command_line):
    file = job({"resolution": [128, 64], "flip_x": True, "num_repeats": 3}, model={"arch": "zimage"})
    code, out, err = command_line("plan", file, "--json", "--images", "--gpus", "1,2")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert mistakes(found) == []
    assert (found["architecture"], [data["keys"]["resolution"] for data in found["datasets"]]) == ("zimage", [128, 64])
    for data in found["datasets"]:
        assert (data["files"], data["items"], data["samples"]) == (5, 10, 30)
        assert {row["path"][-5:] for row in data["rows"]} == {f"{i}.png" for i in range(5)}
        assert all(side % 16 == 0 for row in data["buckets"] for side in row["bucket"])
    assert [(row["gpus"], row["samples"], row["missed"]) for row in found["gpus"]] == [(1, 60, 0), (2, 60, 0)]


def test_a_table_says_how_many_epochs_the_steps_are(job, command_line):
    code, out, _ = command_line("plan", job({"resolution": 128}))
    assert code == 0
    assert "128x128, buckets, for sd1, batch size 2" in out
    assert "101 steps are 25 epochs and 1 step of the next" in out


@pytest.mark.parametrize("keys", [{}, {"scale": 0.3}, {"fast_image_size": True}], ids=str)
def test_a_report_places_images_as_the_plan_does(job, command_line, tmp_path, keys):
    """A quarter turn that EXIF asks for is obeyed, except where sizes are read without it."""
    with Image.open(tmp_path / "images" / "0.png") as image:
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(tmp_path / "images" / "0.png", exif=exif)
    file = job({"resolution": 128, **keys})
    planned = json.loads(command_line("plan", file, "--json", "--images")[1])["datasets"][0]
    report = json.loads(command_line("analyze", "--config", file, "--json")[1])["datasets"][0]
    rows = {tuple(row["bucket"]): row["samples"] for row in planned["buckets"]}
    assert rows == {(row["width"], row["height"]): row["samples"] for row in report["buckets"] if row["samples"]}
    assert report["exif_rotated"]["count"] == ("fast_image_size" in keys)
    picture = tmp_path / "drawn.png"
    code, out, _ = command_line("simulate", tmp_path / "images" / "0.png", "--config", file, "--preview", picture)
    (turned,) = [row for row in planned["rows"] if row["path"].endswith("0.png")]
    width, height = turned["size"]
    assert (width < height) != ("fast_image_size" in keys)
    assert code == 0
    assert out.startswith(f"{width}x{height}, ")
    assert f"{turned['bucket'][0]}x{turned['bucket'][1]}  (aspect" in out
    assert "asks for: a quarter turn clockwise; ai-toolkit turns the pixels accordingly" in out
    with Image.open(picture) as drawn:
        assert (drawn.width < drawn.height) == (width < height)


def test_a_report_says_that_it_leaves_out_clips(job, command_line, tmp_path):
    (tmp_path / "images" / "clip.mp4").touch()
    file = job({"resolution": 128, "num_frames": 9})
    code, _, err = command_line("analyze", "--config", file)
    assert code == 0
    assert err == f"dataset 1, 128: 1 clip left out; `kohya-bucket plan {argument(file)}` counts them\n"


@pytest.mark.parametrize(
    ("key", "said"),
    [("scale", "above 0, and no more than 1,000"), ("num_frames", "no more than 1,000,000")],
)  # fmt: skip
def test_numbers_beyond_all_sizes_are_found(job, command_line, key, said):
    code, out, err = command_line("plan", job({"resolution": 128, key: 10**30}))
    assert code == 1
    assert f"but must be {said}" in out + err


def test_a_scale_that_leaves_nothing_is_one_line(job, command_line):
    code, _, err = command_line("simulate", "300x200", "--config", job({"resolution": 128, "scale": 0.001}))
    assert code == 2
    assert err.endswith("dataset 1, 128: scale = 0.001 leaves no pixel of 300x200\n")


def test_preview_takes_a_job(job):
    found = kohya_bucket.preview(str(job({"resolution": 128})))
    assert sum(bucket.samples for bucket in found.buckets) == len(SIZES)
    assert Counter(name[-5:] for bucket in found.buckets for name in bucket.files) == {f"{i}.png": 1 for i in range(5)}


def test_regularization_has_epochs_of_its_own(job, command_line):
    code, out, _ = command_line("plan", job({"resolution": 64}, {"resolution": 64, "is_reg": True}), "--json")
    found = json.loads(out)
    assert code == 0
    assert [data["kind"] for data in found["datasets"]] == ["images", "regularization"]
    assert found["gpus"][0]["samples"] == len(SIZES)


@pytest.mark.parametrize(
    ("arch", "raw"), [("flux_kontext", False), ("qwen_image_edit_plus", True), ("krea2", False), ("krea2 edit", True)]
)
def test_control_images_are_alike_in_each_bucket(job, command_line, tmp_path, arch, raw):
    """As many in each item, of equal sizes where the model takes them as they are; and each image is trained once."""
    draws, folders, wanted = np.random.default_rng(2), [tmp_path / "one", tmp_path / "two"], Counter()
    images = tmp_path / "images"
    make_pictures(images, [(200, 160)] * 30, caption="caption")
    for folder in folders:
        folder.mkdir()
    for i in range(30):
        beside = []
        for folder in folders[: draws.integers(3)]:
            size = tuple(map(int, draws.choice([(64, 64), (96, 64), (64, 96)])))
            Image.new("RGB", size).save(folder / f"{i}.webp")
            beside.append(size if raw else ())
        wanted[(len(beside),) if arch == "krea2 edit" and len(beside) > 1 else tuple(beside)] += 1
    keys = {"resolution": 128, "control_path": [str(folder) for folder in folders]}
    model = {"arch": arch.split()[0], "model_kwargs": {"edit": "edit" in arch}}
    file = job(keys, model=model)
    planned = json.loads(command_line("plan", file, "--json")[1])
    (data,) = planned["datasets"]
    found = Counter()
    for row in data["buckets"]:
        controls = tuple(tuple(one) for one in row.get("controls", ()))
        if not raw:
            assert set(controls) <= {tuple(row["bucket"])}
            controls = ((),) * len(controls)
        found[controls[0] if controls and len(controls[0]) == 1 else controls] += row["samples"]
        assert row["batches"] == -(-row["samples"] // 2)
    assert found == wanted
    assert planned["gpus"][0]["steps"] == data["batches"]
    report = json.loads(command_line("analyze", "--config", file, "--json")[1])["datasets"][0]
    assert sum(row["batches"] for row in report["buckets"]) == data["batches"]
    assert ("2 images" in command_line("plan", file)[1]) == (arch == "krea2 edit")


def test_options_stand_in_the_job(job, command_line):
    whole = {"kohya_bucket": {"remainder": "merge", "merge_max_crop": 0.5}}
    found = [json.loads(command_line("plan", job({"resolution": 128}, whole=w), "--json")[1]) for w in ({}, whole)]
    assert [one["settings"]["remainder"] for one in found] == ["keep", "merge"]
    assert found[1]["gpus"][0]["steps"] < found[0]["gpus"][0]["steps"]
    assert found[1]["gpus"][0]["moved"] > 0


@pytest.mark.parametrize(
    ("keys", "whole", "words"),
    [
        ({"bach_size": 3}, {}, "ignores 'bach_size' without a word: it has no such key: did you mean 'batch_size'"),
        ({"batch_size": "2"}, {}, "batch_size is '2'"),
        ({"resolution": "512x512"}, {}, "resolution is '512x512', but must be whole numbers"),
        ({"resolution": []}, {}, "resolution is [], but must be whole numbers"),
        ({"folder_path": None}, {}, "names no images"),
        ({"folder_path": "nowhere"}, {}, "nowhere is neither a folder nor a JSON file"),
        ({"buckets": False}, {}, "buckets is false"),
        ({"num_frames": 9, "auto_frame_count": True}, {}, "auto_frame_count lets each clip keep its own length"),
        ({"num_repeats": 10**6}, {}, "100,000 can be"),
        ({}, {"kohya_bucket": {"remaindr": "pad"}}, "remaindr"),
    ],
)
def test_what_is_wrong_is_said(keys, whole, words, job, command_line):
    code, out, err = command_line("plan", job({"resolution": 64, **keys}, whole=whole), "--strict")
    assert code == 1
    assert words in " ".join((out + err).split())


@pytest.mark.parametrize(
    ("keys", "whole", "words"),
    [
        ({}, {"kohya_bucket": {"rule": "novelai"}}, "images are placed, cut and cached by ai-toolkit itself"),
        ({"cache_latents": True}, {"kohya_bucket": {"remainder": "merge"}}, "keeps one size"),
    ],
)
def test_options_that_cannot_stand_there_are_refused_as_in_training(keys, whole, words, job, command_line):
    code, _, err = command_line("plan", job({"resolution": 64, **keys}, whole=whole))
    assert code == 2
    assert words in err


_NINE_LEVELS = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


def test_files_that_are_no_jobs(tmp_path):
    for text, words in (("a: [", "line 1"), ("a: 1", "not a job of ai-toolkit"),
                        ("{job: x, config: {process: 3}}", "nothing to train"),
                        ("{job: x, config: &a {process: [*a]}}", "contains itself"),
                        (_NINE_LEVELS, "over and over"), ("a: !!int ''", "not YAML"), ("a: !!bool x", "not YAML"),
                        ("a: !!timestamp x", "not YAML"), ("a: 1" + ":59" * 3000, "not YAML"),
                        ("{job: x, config: {process: [{type: y}]}}", "nothing to train")):  # fmt: skip
        file = tmp_path / "job.yaml"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            read_job(file)


def test_settings_of_other_kinds_are_as_if_not_there(job):
    read = read_job(job({"resolution": 64}, train=["batch_size"], model="flux"))
    assert (read.datasets[0].batch_size, read.arch, read.length) == (1, "sd1", None)


@pytest.mark.parametrize(
    ("entry", "counts"),
    [
        ([100, 300, "{size}:{time}"], True), ([100, 300, "{size}:1"], False), ([100, 300], False),
        ([0, 300, "{size}:{time}"], False), ("text", False), ([100, 300, "{size}:{time}", 40, 24.0], False),
    ],
)  # fmt: skip
def test_sizes_that_ai_toolkit_has_kept_count_while_an_image_is_as_it_was(
    entry, counts, tmp_path, job, command_line, monkeypatch
):
    now = (tmp_path / "images" / "0.png").stat()
    if isinstance(entry, list):
        entry = [one.format(size=now.st_size, time=int(now.st_mtime)) if isinstance(one, str) else one for one in entry]
    kept = tmp_path / "images" / ".aitk_size.json"
    kept.write_text(json.dumps({"__version__": "0.1.2", f"{os.sep}0.png": entry}), encoding="utf-8")
    code, out, err = command_line("plan", job({"resolution": 128}), "--json", "--images")
    assert (code, err) == (0, "")
    found = json.loads(out)
    row = next(row for row in found["datasets"][0]["rows"] if row["path"].endswith("0.png"))
    assert tuple(row["size"]) == ((100, 300) if counts else SIZES[0])
    assert ("kept-sizes" in [one["code"] for one in found["findings"]]) == counts
    monkeypatch.chdir(tmp_path)
    for image in (Path("images", "0.png"), tmp_path / "images" / "0.png"):
        (shown,) = json.loads(command_line("simulate", image, "--config", job({"resolution": 128}), "--json")[1])
        assert [*shown["bucket"].values()] == row["bucket"]
    for other in ("{", json.dumps({"__version__": "0.1.1", f"{os.sep}0.png": entry})):  # the latter is made anew
        kept.write_text(other, encoding="utf-8")
        assert "kept-sizes" not in command_line("plan", job({"resolution": 128}), "--json")[1]


def test_doctor_and_commands_that_do_not_take_it(tmp_path, job, command_line):
    file = job({"resolution": 128})
    (tmp_path / "images" / "broken.png").write_bytes(b"no image")
    code, out, _ = command_line("doctor", file, "--quick")
    assert code == 0
    assert "1 file that ai-toolkit leaves out" in out
    assert "sd1, in steps of 16" in out
    for arguments in (
        ("explore", file, "--no-open", "--out", tmp_path / "p.html"),
        ("precompute", "--config", file, "--vae", "x"),
    ):
        code, _, err = command_line(*arguments)
        assert code == 2
        assert "ai-toolkit" in err


def test_doctor_knows_of_which_model_the_vae_is_slow(job, command_line, monkeypatch):
    monkeypatch.setattr(environment, "version_of", lambda _: "2.9.0")
    for arch, slow in (("qwen_image_edit", True), ("wan22_14b_i2v", True), ("ltx2.3", True), ("flux", False)):
        out = command_line("doctor", job(model={"arch": arch}), "--json", "--quick")[1]
        codes = [one["code"] for section in json.loads(out)["sections"] for one in section["findings"]]
        assert ("slow-conv3d" in codes) == slow


def test_a_list_that_windows_reads_in_its_code_page(tmp_path, job, command_line, monkeypatch):
    def codes(caption):
        entries = {str(tmp_path / "images" / "0.png"): {"caption": caption}}
        (tmp_path / "list.json").write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")
        file = job({"dataset_path": str(tmp_path / "list.json")})
        return [one["code"] for one in json.loads(command_line("plan", file, "--json")[1])["findings"]]

    assert codes("caf\xe9") == []
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _=True: "cp1252")
    assert codes("cafe") == []
    assert codes("caf\xe9") == ["code-page"]


def test_a_list_of_paths_and_square_crops(tmp_path, job, command_line):
    paths = {str(tmp_path / "images" / f"{i}.png"): {"caption": "x"} for i in (0, 1, 3)}
    (tmp_path / "list.json").write_text(json.dumps(paths), encoding="utf-8")
    listed = {"folder_path": None, "dataset_path": str(tmp_path / "list.json"), "resolution": 64, "square_crop": True}
    found = json.loads(command_line("plan", job(listed), "--json")[1])["datasets"][0]
    assert [(row["bucket"], row["items"]) for row in found["buckets"]] == [([64, 64], 3)]


@pytest.mark.parametrize("info", ["[1]", "null", "text", "1:59:59", "{step: 3, kohya_bucket: text}", "&a [*a]",
                                  "{step: 3, kohya_bucket: {main: [1]}}", "{step: [3]}", "}"])  # fmt: skip
@pytest.mark.parametrize("beside", [True, False])
def test_a_checkpoint_that_says_nothing_usable_starts_the_epoch_again(tmp_path, caplog, monkeypatch, info, beside):
    import safetensors.numpy as numpy

    from kohya_bucket.trainers.ai_toolkit import loaders

    path = tmp_path
    if beside:
        (path / "aitk_meta.yaml").write_text(f"training_info: {info}", encoding="utf-8")
    else:
        path /= "lora.safetensors"
        metadata = {"training_info": json.dumps(None if info == "null" else [1] if info == "[1]" else info)}
        numpy.save_file({"a": np.zeros(1, np.float32)}, path, metadata)
    process = SimpleNamespace(step_num=3, get_latest_save_path=lambda: str(path))
    monkeypatch.setattr(loaders, "is_first_process", lambda: True)
    assert loaders._saved_with(process, "main") is None
    assert [record.getMessage().count("starts again from its first image") for record in caplog.records] == [1]


def test_loader_settings_that_end_the_run(job, command_line):
    def found(*datasets):
        data = json.loads(command_line("plan", job(*datasets), "--json")[1])
        return [one["message"] for one in data["findings"] if one["code"] == "loader"]

    assert found({"num_workers": -1}) == ["num_workers is -1, but must be a whole number of 0 or more"]
    assert found({"prefetch_factor": 0}) == ["prefetch_factor is 0, but must be a whole number of 1 or more"]
    assert found({"num_workers": 0, "prefetch_factor": 0}) == []  # which ai-toolkit then does not hand on
    assert found({}, {"num_workers": -1}) == []  # the first dataset's count for all
