"""Advice that can be followed: what the commands say of one mixed folder, for each model."""

import json
from pathlib import Path

import numpy as np
import pytest
import toml
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket.buckets import FixedBuckets, KohyaBuckets, load_from_toml
from kohya_bucket.buckets.rules.registry import RULES
from kohya_bucket.cli import app
from tests.pictures import png_header

TURNS = {"turn2": 2, "turn3": 3, "turn6": 6}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """Portraits, squares, a webtoon, icons, turned photos, a GIF, broken and cut off files; captions for all."""
    data = tmp_path_factory.mktemp("mixed") / "data"
    data.mkdir()
    sizes = {f"portrait{i}": (416, 608) for i in range(12)} | {f"square{i}": (512, 512) for i in range(6)}
    sizes |= {"webtoon": (200, 2400), "icon0": (16, 16), "icon1": (32, 32)}
    for name, size in sizes.items():
        Image.new("RGB", size, (len(name) * 9, 90, 80)).save(data / f"{name}.png", compress_level=1)
    for name, orientation in TURNS.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.new("RGB", (600, 400)).save(data / f"{name}.jpg", exif=exif)
    Image.new("RGB", (400, 400)).save(data / "moving.gif")
    (data / "broken.png").write_bytes(b"no image")
    Image.new("RGB", (512, 512), "red").save(data / "cut.jpg", quality=95)
    (data / "cut.jpg").write_bytes((data / "cut.jpg").read_bytes()[:1500])
    for file in list(data.iterdir()):
        file.with_suffix(".txt").write_text("a caption", encoding="utf-8")
    return data


def write(target: Path, data: Path, general: str = "", **keys: object) -> Path:
    table = {"resolution": 512, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 128} | keys
    table["subsets"] = [{"image_dir": str(data), "caption_extension": ".txt"}]
    file = target / "set.toml"
    file.write_text(f"{general}\n{toml.dumps({'datasets': [table]})}", encoding="utf-8")
    return file


def run(*arguments: object, code: int | None = 0):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert code is None or result.exit_code == code, result.output
    return result


def findings(command: str, *arguments: object, code: int = 0) -> dict[str, dict]:
    # an image that cannot be read stops sd-scripts by itself, which doctor says by its exit code too
    report = json.loads(run(command, *arguments, "--json", code=None if command == "doctor" else code).stdout)
    found = report["findings"] if command == "plan" else [f for s in report["sections"] for f in s["findings"]]
    return {finding["code"]: finding for finding in found}


def advice(*arguments: object) -> list[dict]:
    (one,) = json.loads(run("analyze", *arguments, "--json").stdout)["datasets"]
    return one["recommendations"]


# -- steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "proposed"), [("sd", None), ("sdxl", "32"), ("anima_train.py", "32"), (None, None)])
def test_the_first_step_that_is_advised_is_one_that_the_trainer_accepts(mixed, tmp_path, arch, proposed) -> None:
    named = [] if arch is None else ["--arch", arch]
    steps = [r for r in advice("--config", write(tmp_path, mixed), *named) if r["setting"] == "bucket_reso_steps"]
    assert [r["proposed"] for r in steps] == ([] if proposed is None else [proposed])


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_step_that_the_trainer_refuses_is_an_error(mixed, tmp_path, command) -> None:
    config = write(tmp_path, mixed, bucket_reso_steps=32)
    quick = ["--quick"] if command == "doctor" else []
    found = findings(command, config, *quick, "--arch", "sd", code=1)["bucket-steps"]
    assert (found["severity"], found["remedy"]) == ("error", "bucket_reso_steps = 64")
    assert "bucket-steps" not in findings(command, config, *quick, "--arch", "SDXL")
    note = findings(command, config, *quick)["bucket-steps"]
    assert (note["severity"], "SD 1.5 (64)" in note["message"], "--arch" in note["remedy"]) == ("note", True, True)
    assert "bucket-steps" not in findings(command, write(tmp_path, mixed), *quick)


def test_of_a_family_whose_trainers_differ_the_one_that_refuses_is_named(mixed, tmp_path) -> None:
    config = write(tmp_path, mixed, bucket_reso_steps=16)
    found = findings("plan", config, "--arch", "flux")["bucket-steps"]
    assert (found["severity"], "flux_train_network.py (multiples of 32)" in found["message"]) == ("warning", True)
    assert "--arch flux_train.py" in found["remedy"]
    assert "bucket-steps" not in findings("plan", config, "--arch", "flux_train.py")
    found = findings("plan", config, "--arch", "flux_train_network.py", code=1)["bucket-steps"]
    assert found["severity"] == "error"


def test_a_checkouts_own_steps_count(mixed, tmp_path) -> None:
    (tmp_path / "sd" / "library").mkdir(parents=True)
    (tmp_path / "sd" / "library" / "train_util.py").write_text("skip_image_resolution", "utf-8")
    (tmp_path / "sd" / "library" / "strategy_base.py").touch()
    call = "group.verify_bucket_reso_steps({})\n"
    (tmp_path / "sd" / "lumina_train_network.py").write_text(call.format(32) + call.format(32), encoding="utf-8")
    (tmp_path / "sd" / "lumina_train.py").write_text(call.format(16), encoding="utf-8")
    config = write(tmp_path, mixed, bucket_reso_steps=16)
    arguments = (config, "--arch", "lumina")
    assert "bucket-steps" not in findings("plan", *arguments)
    found = findings("plan", *arguments, "--sd-scripts", tmp_path / "sd")["bucket-steps"]
    assert "lumina_train_network.py (multiples of 32)" in found["message"]


@pytest.mark.parametrize(
    ("box", "steps", "severity"),
    [("sdxl", 32, ""), ("sdxl", 16, "error"), ("flux1_checkbox", 16, "warning"), ("", 32, "note")],
)
def test_a_preset_of_the_gui_says_what_is_trained(mixed, tmp_path, box, steps, severity) -> None:
    data = tmp_path / "train" / "1_one"
    data.mkdir(parents=True)
    (data / "a.png").write_bytes((mixed / "square0.png").read_bytes())
    settings = {"LoRA_type": "Standard", "train_data_dir": str(data.parent), "max_resolution": "512,512"}
    settings |= {"enable_bucket": True, "bucket_reso_steps": steps, box or "sdxl": bool(box)}
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps(settings), encoding="utf-8")
    for command in ("plan", "doctor"):
        quick = ["--quick"] if command == "doctor" else []
        found = findings(command, preset, *quick, code=int(severity == "error"))
        assert found.get("bucket-steps", {"severity": ""})["severity"] == severity
    assert "bucket-steps" not in findings("plan", preset, "--arch", "anima")


def test_a_family_that_is_none_is_named(command_line, mixed, tmp_path) -> None:
    for arch, message in (("sdlx", "did you mean sdxl?"), ("wan", "or a trainer's file, such as flux_train.py")):
        code, output, errors = command_line("plan", write(tmp_path, mixed), "--arch", arch)
        assert (code, output, len(errors.splitlines())) == (2, "", 1)
        assert message in errors


# -- max_bucket_reso --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("arch", [None, "sdxl"])
def test_a_longest_side_that_is_the_resolution_is_said_with_images_and_pixels(mixed, tmp_path, arch) -> None:
    named = [] if arch is None else ["--arch", arch]
    config = write(tmp_path, mixed, resolution=1024)
    lost = "16 of 25 images train with "
    for command in ("plan", "doctor"):
        found = findings(command, config, *named, *(["--quick"] if command == "doctor" else []))["short-buckets"]
        assert found["severity"] == "warning"
        assert lost in found["message"]
        assert (
            " train with 30% fewer pixels than with 2048 (416x608 at 704x1024 instead of 832x1216)" in found["message"]
        )
        assert found["remedy"] == "max_bucket_reso = 2048"
        assert "short-buckets" not in findings(command, write(tmp_path, mixed, resolution=1024, max_bucket_reso=2048))
        config = write(tmp_path, mixed, resolution=1024)
    (one,) = [r for r in advice("--config", config, *named) if r["setting"] == "max_bucket_reso"]
    assert (one["current"], one["proposed"]) == ("1024", "2048")
    assert "images train with " in one["why"]
    placements = [KohyaBuckets(1024, 128, longest).place([(416, 608)]).bucket_sizes for longest in (1024, 2048)]
    assert [p.tolist() for p in placements] == [[[704, 1024]], [[832, 1216]]]
    assert "short-buckets" not in findings("plan", write(tmp_path, mixed))


@pytest.mark.long
@pytest.mark.parametrize("rule", [name for name, one in RULES.items() if not one.own_sizes])
def test_every_rule_that_limits_cut_short_is_said_with_what_they_cost(tmp_path, rule) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number, aspect in enumerate(np.exp(np.linspace(-np.log(3), np.log(3), 100)).tolist()):
        (folder / f"{number}.png").write_bytes(png_header(int(1500 * aspect**0.5), int(1500 / aspect**0.5)))
        (folder / f"{number}.txt").write_text("x", encoding="utf-8")

    def config(longest):
        table = f"[kohya_bucket]\nrule = '{rule}'"
        return write(tmp_path, folder, table, resolution=1024, max_bucket_reso=longest)

    def trained(longest):
        (data,) = json.loads(CliRunner().invoke(app, ["plan", str(config(longest)), "--json"]).stdout)["datasets"]
        weights = [row["images"] for row in data["buckets"]]
        crop = np.average([row["mean_crop_loss"] for row in data["buckets"]], weights=weights)
        return crop, np.average([row["bucket"][0] * row["bucket"][1] for row in data["buckets"]], weights=weights)

    (crop, pixels), (usual_crop, usual_pixels) = trained(1024), trained(2048)
    assert crop > usual_crop + 0.3 or pixels < 0.9 * usual_pixels
    for command in ("plan", "doctor"):
        found = findings(command, config(1024), *(["--quick"] if command == "doctor" else []))["short-buckets"]
        assert found["remedy"] == "max_bucket_reso = 2048"
        assert "no bucket is longer than 1024, so " in found["message"]
        assert ("to the crop, and" in found["message"]) == (rule == "token_band")
        assert "short-buckets" not in findings(command, config(2048), *(["--quick"] if command == "doctor" else []))


# -- files ------------------------------------------------------------------------------------------------------


def test_files_come_before_settings_and_can_be_listed(mixed, tmp_path) -> None:
    listed = tmp_path / "bad.txt"
    found = advice("--config", write(tmp_path, mixed), "--decode", "--list-bad", listed)
    names = [Path(line).name for line in listed.read_text(encoding="utf-8").splitlines()[1:]]
    assert sorted(names) == ["broken.png", "cut.jpg", "icon0.png", "icon1.png", "webtoon.png"]
    settings = [r["setting"] for r in found]
    assert settings == sorted(settings, key=lambda name: name != "files")
    texts = [f"{r['current']}: {r['proposed']}" for r in found]
    assert texts[1].startswith("3 turned or mirrored by EXIF: ")
    assert texts[2].startswith("2 images enlarged more than 2 times: ")
    assert texts[3] == "1 image far longer than a bucket: split or leave out"
    assert all(r["gain"] and (r["cost"] or "turned" in r["current"] or "unreadable" in r["current"]) for r in found[:4])
    assert not any(setting.startswith("min_bucket_reso") for setting in settings)
    # what is listed is what a list of paths may hold
    assert advice(listed, "--decode")[0]["current"] == "2 unreadable"


def test_enlargement_is_a_column_of_plan_and_a_finding_of_doctor(mixed, tmp_path) -> None:
    config = write(tmp_path, mixed)
    buckets = json.loads(run("plan", config, "--json").stdout)["datasets"][0]["buckets"]
    square = next(b for b in buckets if b["bucket"] == [512, 512])
    assert (square["enlarged"], square["largest_enlargement"]) == (2, 32.0)
    lines = run("plan", config).output.splitlines()
    assert any(line.endswith("enlarged") for line in lines)
    assert any("512x512" in line and line.rstrip().endswith("2 (32x)") for line in lines)
    found = findings("doctor", config, "--quick")
    assert "2 images enlarged 16 to 32 times" in found["enlarged"]["message"]
    assert [Path(name.rpartition(": ")[0] or name).name for name in found["too-long"]["names"]] == ["webtoon.png"]
    assert f"--config {config} --list-bad" in found["enlarged"]["remedy"]
    assert "nothing found that would stop the training, " in run("doctor", config, "--quick", code=1).output
    sharp = write(tmp_path, mixed, bucket_no_upscale=True)
    assert "enlarged" not in findings("doctor", sharp, "--quick")


def test_all_turns_and_mirrors_are_counted(mixed, tmp_path) -> None:
    config = write(tmp_path, mixed)
    text = "1 mirrored left to right; 1 upside down; 1 a quarter turn clockwise"
    output = run("plan", config).output
    assert f"3 images with an EXIF turn or mirroring, which sd-scripts ignores ({text})" in output
    assert f"which sd-scripts ignores ({text})" in run("doctor", config, "--quick", code=1).output
    turned = next(r for r in advice("--config", config) if "turned" in r["current"])
    assert turned["current"] == "3 turned or mirrored by EXIF"
    meta = {str(mixed / f"{name}.jpg"): {"caption": "x", "train_resolution": [600, 400]} for name in TURNS}
    (tmp_path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    stated = tmp_path / "stated.toml"
    subset = {"metadata_file": str(tmp_path / "meta.json"), "image_dir": str(mixed)}
    stated.write_text(toml.dumps({"datasets": [{"resolution": 512, "enable_bucket": True, "subsets": [subset]}]}))
    found = json.loads(run("plan", stated, "--json").stdout)["findings"]
    assert [one["count"] for one in found if one["code"] == "turned"] == [3]


def test_simulate_and_previews_say_what_exif_asks_for(mixed, tmp_path) -> None:
    result = run("simulate", mixed / "turn6.jpg", "--preview", tmp_path / "p.png")
    assert "asks for: a quarter turn clockwise; training ignores it" in result.output
    assert "as stored, without what EXIF asks for (a quarter turn clockwise)" in result.stderr
    (row,) = json.loads(run("simulate", mixed / "turn2.jpg", "--json").stdout)
    assert row["exif_orientation"] == 2
    assert "EXIF" not in run("simulate", mixed / "square0.png").output


def test_simulate_says_what_sd_scripts_does_not_read(mixed) -> None:
    gif = mixed / "moving.gif"
    (row,) = json.loads(run("simulate", gif, "--json").stdout)
    assert row["bucket"]
    assert row["not_read"] == "sd-scripts lists no .gif files: `kohya-bucket fix` converts or renames it"
    assert row["not_read"] in run("simulate", gif).output
    assert "lists no" not in run("simulate", mixed / "square0.png").output
    assert json.loads(run("simulate", "300x200", "--json").stdout)[0]["not_read"] == ""


def test_what_sd_scripts_does_not_read_is_not_counted_as_trained(mixed) -> None:
    (one,) = json.loads(run("analyze", mixed, "--json").stdout)["datasets"]
    assert (one["images"]["found"], one["images"]["readable"]) == (27, 25)
    assert (one["images"]["broken"], one["images"]["not_listed"]) == (1, 1)
    assert [Path(b["path"]).name for b in one["not_listed"]["listed"]] == ["moving.gif"]
    assert one["summary"]["placed"] == 25
    output = run("buckets", "make", mixed).output
    assert "(1 unreadable left out) (1 left out" in output


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_keys_captions_and_broken_images_are_told_in_one_run(mixed, tmp_path, command) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("square0.png", "broken.png", "cut.jpg"):
        (data / name).write_bytes((mixed / name).read_bytes())
        (data / name).with_suffix(".txt").write_text("" if name == "cut.jpg" else "x", encoding="utf-8")
    config = write(tmp_path, data, num_repeat=2, batch_size="4")
    found = findings(command, config, code=1)
    wanted = {"unknown-key", "wrong-type", "broken-caption"}
    assert wanted | ({"left-out", "undecodable"} if command == "doctor" else set()) == set(found)
    (dataset,) = json.loads(run("plan", config, "--json", code=1).stdout)["datasets"]
    assert [Path(one["image"]).name for one in dataset["not_trained"]] == ["broken.png"]
    table = "[kohya_bucket]\nremainer = 'pad'"
    if command == "doctor":
        (data / "cut.txt").write_text("x", encoding="utf-8")
        found = findings(command, write(tmp_path, data, general=table), code=1)
        assert {"settings", "unreadable-image", "undecodable"} == set(found)


def test_an_image_that_is_cut_off_is_told_alike(mixed, tmp_path) -> None:
    config = write(tmp_path, mixed)
    (name,) = findings("doctor", config)["undecodable"]["names"]
    (one,) = json.loads(run("analyze", "--config", config, "--decode", "--json").stdout)["datasets"]
    reason = next(b["reason"] for b in one["broken"]["listed"] if b["path"].endswith("cut.jpg"))
    assert name == f"{mixed / 'cut.jpg'}: {reason}"
    assert reason.startswith("cannot be read as an image (image file is truncated")


# -- buckets make ---------------------------------------------------------------------------------------


def test_a_set_that_is_worse_than_the_default_is_called_so(mixed) -> None:
    worse = run("buckets", "make", mixed, "--resolution", 512, "--num", 2).output
    assert "Mean crop loss (sd-scripts)" in worse
    own = len(KohyaBuckets(512).bucket_set)
    assert f"These 2 buckets crop more than sd-scripts' own {own}: raise --num" in worse
    asked = ("buckets", "make", mixed, "--resolution", 512, "--num", 2, "--json")
    made, best = (json.loads(run(*asked, "--method", method).stdout) for method in ("kmeans", "optimal"))
    assert made["crop_loss_mean"] > made["default_crop_loss_mean"]
    assert best["crop_loss_mean"] < made["crop_loss_mean"]
    better = run("buckets", "make", mixed, "--resolution", 512, "--num", 12, "--method", "optimal").output
    assert "crop more" not in better
    assert "--output my_buckets.toml" in better


def test_the_lines_that_train_with_the_file_are_those_that_work(mixed, tmp_path) -> None:
    output = tmp_path / "own's.toml"
    lines = run("buckets", "make", mixed, "--resolution", 512, "--output", output).output.splitlines()
    at = lines.index("  [kohya_bucket]")
    config = write(tmp_path, mixed, general="\n".join(lines[at : at + 2]))
    planned = json.loads(run("plan", config, "--json").stdout)["datasets"][0]["buckets"]
    rule = FixedBuckets(load_from_toml(output))
    assert {tuple(b["bucket"]) for b in planned} <= {b.as_tuple() for b in rule.bucket_set}
    finer = run("buckets", "make", mixed, "--bucket-reso-steps", 32, "--output", output).output
    assert "and bucket_reso_steps = 32 in its [[datasets]]" in finer
