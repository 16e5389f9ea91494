"""`kohya-bucket plan` and `kohya-bucket simulate`."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.cli.options import SourceOptions, TrainerArguments
from kohya_bucket.cli.sources import source_in
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.config import read_config
from kohya_bucket.trainers.sdscripts.config.keys import DEFAULTS, config_name
from kohya_bucket.trainers.sdscripts.families import NEEDED
from kohya_bucket.trainers.sdscripts.plan import overview
from tests.pictures import make_pictures

ROOT = Path(__file__).parents[2]
SIZES = [(300, 200), (200, 300), (256, 256), (400, 100), (90, 300), (300, 200), (310, 205)]


@pytest.fixture
def folder(tmp_path):
    make_pictures(tmp_path / "images", SIZES, caption="caption")
    return tmp_path / "images"


def write(folder, dataset="", subset="", rest=""):
    file = folder.parent / "dataset.toml"
    file.write_text(
        f"[[datasets]]\nresolution = 256\nbatch_size = 2\nenable_bucket = true\nmin_bucket_reso = 128\n{dataset}\n"
        f"[[datasets.subsets]]\nimage_dir = '{folder}'\ncaption_extension = '.txt'\nnum_repeats = 3\n"
        f"{subset}\n{rest}\n",
        encoding="utf-8",
    )
    return file


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def as_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_what_is_cut_off_leads_from_the_resized_size_to_the_bucket(folder):
    (dataset,) = as_json("plan", write(folder), "--images")["datasets"]
    assert (dataset["images"], len(dataset["image_rows"])) == (7, 7)
    for row in dataset["image_rows"]:
        left, top, right, bottom = row["cut"]
        assert row["resized"][0] - left - right == row["bucket"][0]
        assert row["resized"][1] - top - bottom == row["bucket"][1]


def test_accumulation_counts_updates(folder):
    gpus = as_json("plan", write(folder), "--accumulate", "4")["gpus"][0]
    assert gpus["updates"] == -(-gpus["steps"] // 4)


def test_what_no_epoch_trains_is_named(folder):
    config = write(folder, rest="[kohya_bucket]\nremainder = 'drop'\nstep_shapes = 'one'")
    small = as_json("plan", config, "--gpus", "1,8")["gpus"][1]
    assert small["never_trained"] == []
    assert "small_buckets = 'keep' trains them as a short batch" in small["left_over"]
    config = write(folder, rest="[kohya_bucket]\nremainder = 'drop'\nsmall_buckets = 'drop'\nstep_shapes = 'one'")
    result = run("plan", config, "--gpus", "1,8", "--json")
    assert result.exit_code == 1  # on 8 there is nothing to train
    (error,) = [one for one in json.loads(result.stdout)["findings"] if one["severity"] == "error"]
    assert error["message"].startswith("on 8 GPUs: no batch is left to train: 7 images are never trained")
    lost = json.loads(result.stdout)["gpus"]
    assert lost[0]["never_trained"] == []
    assert len(lost[1]["never_trained"]) == 7
    line = "7 images are never trained (0.png, 1.png, 2.png, 3.png, 4.png and 2 more): what "
    assert f"8 GPUs: {line}" in run("plan", config, "--gpus", "8").output
    refused = run("plan", write(folder, rest="[kohya_bucket]\nsmall_buckets = 'drop'"))
    assert "small_buckets is 'drop'" in refused.output


def test_all_mistakes_in_options_are_named_with_their_lines(folder):
    config = write(folder, rest="[kohya_bucket]\nremaider = 'pad'\nmax_crop = 3\norder = 'runs'")
    plan = json.loads(run("plan", config, "--json").output)
    lines = config.read_text(encoding="utf-8").splitlines()
    wrong = {f"line {lines.index(line) + 1}": key for key in ("remaider", "max_crop") for line in lines if key in line}
    assert {f["where"]: f["names"][0] for f in plan["findings"] if f["code"] == "settings"} == wrong
    assert plan["datasets"] == plan["gpus"] == []  # options that were not asked for would give another plan
    for command in (["analyze", config], ["explore", config, "--no-open", "--out", folder / "page.html"]):
        assert "'remaider'" in str(run(*command).exception)


@pytest.mark.parametrize(("value", "batch_size"), [("'2'", 2), ("2.0", 2), ("'many'", None), ("[[1]]", None)])
def test_no_other_batch_size_is_planned_than_was_meant(folder, value, batch_size):
    config = write(folder)
    config.write_text(config.read_text(encoding="utf-8").replace("batch_size = 2", f"batch_size = {value}"), "utf-8")
    plan = json.loads(run("plan", config, "--json").output)
    assert [data["batch_size"] for data in plan["datasets"]] == ([] if batch_size is None else [batch_size])
    assert "wrong-type" in {finding["code"] for finding in plan["findings"]}


def test_images_without_a_bucket_are_named(folder):
    Image.new("RGB", (40, 400)).save(folder / "narrow.png")
    (folder / "broken.png").write_bytes(b"")
    data = as_json("plan", write(folder, "bucket_no_upscale = true"))
    left_out = {Path(row["image"]).name: row["reason"] for row in data["datasets"][0]["not_trained"]}
    assert set(left_out) == {"narrow.png", "broken.png"}
    assert left_out["narrow.png"].startswith("40x400: a side is shorter")
    text = run("plan", write(folder, "bucket_no_upscale = true"))
    assert "not trained: 2" in text.output
    assert text.exit_code == 0
    assert run("plan", write(folder, "bucket_no_upscale = true"), "--strict").exit_code == 1


def test_the_table_can_be_read(folder):
    output = run("plan", write(folder), "--gpus", "1,8", "--images").output
    assert "256x256" in output
    assert "worst" in output
    assert "idle without kohya_bucket" in output
    changes = [row["shape_changes"] for row in as_json("plan", write(folder), "--gpus", "1,8")["gpus"]]
    assert changes == [12, 1]
    assert "a batch has another shape than the one before: 12 times on 1 GPU, 1 time on 8 GPUs" in output
    assert all(f"{i}.png" in output for i in range(7))
    assert "\x1b[" not in output


@pytest.mark.parametrize(
    ("table", "steps", "repeated"), [("model = 'flux'", 4, 0), ("", 4, 0), ("step_shapes = 'one'", 6, 7)]
)
def test_buckets_with_too_few_images_meet_in_a_step(folder, table, steps, repeated):
    file = write(folder)
    file.write_text(f"[kohya_bucket]\n{table}\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    (row,) = as_json("plan", file, "--gpus", "4")["gpus"]
    assert (row["missed"], row["repeated"], row["steps"]) == (0, repeated, steps)


def test_without_a_config(folder):
    trained = folder.parent / "train"
    trained.mkdir()
    folder.rename(trained / "5_thing")
    data = as_json(
        "plan", "--train-data-dir", trained, "--resolution", "256", "--enable-bucket", "--train-batch-size", 2
    )
    assert (data["datasets"][0]["images"], data["datasets"][0]["samples"]) == (7, 35)
    usual = run("plan", "--train-data-dir", trained, "--arch", "sdxl")
    assert "as is usual for sdxl; for the trainer: --resolution 1024\n" in usual.output
    usual = run("plan", "--train-data-dir", trained, "--arch", "sdxl", "--enable-bucket", "--resolution", "768")
    assert "for the trainer: --min_bucket_reso 256 --max_bucket_reso 2048 --bucket_reso_steps 64\n" in usual.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "name a dataset config, a file for --config_file, a GUI preset, or --train-data-dir"),
        (["plan", "missing.toml"], "missing.toml"),
        (["plan", "CONFIG", "--gpus", "two"], "--gpus is 'two'"),
        (["simulate", "0x5"], "0x5 is not an image size"),
        (["simulate", "nothing.png"], "neither a size such as 576x768 nor a readable image"),
        (["simulate", "1024"], "write 1024x1024"),
        (["cache", "status", "MISTYPED"], "did you mean"),
        (["simulate", "512x512", "--rule", "none"], "rule is 'none'"),
        (["simulate", "512x512", "--bucket-reso-steps", "0"], "bucket-reso-steps is 0, but must be 1 or more"),
        (["simulate", "99999999999x1"], "sizes must fit into 32 bits"),
        (["buckets", "chart", "--rule", "novelai", "--bucket-reso-steps", "0"], "bucket-reso-steps is 0"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(folder, command_line, arguments, message):
    arguments = [{"CONFIG": write(folder), "FOLDER": folder, "MISTYPED": f"{folder}s"}.get(a, a) for a in arguments]
    code, _, error = command_line(*arguments)
    assert code == 2
    assert message in error
    assert "Traceback" not in error


def test_simulate_explains_the_articles_case():
    output = run("simulate", "576x768", "--resolution", "512").output
    assert "448x576" in output
    assert "0.0278 away" in output
    assert "switch at 0.6889 (height/width 1.4516)" in output
    assert "to 448x597" in output
    assert "10 top, 11 bottom" in output


def test_simulate_a_file_with_a_config_and_a_preview(folder):
    target = folder.parent / "preview.png"
    result = run("simulate", folder / "0.png", "--config", write(folder), "--preview", target)
    assert result.exit_code == 0, result.output
    assert "dataset 1 (256x256)" in result.output
    preview = Image.open(target)
    explained = json.loads(run("simulate", folder / "0.png", "--config", write(folder), "--json").stdout)[0]
    assert list(preview.size) == explained["resized"]
    left, top, _, bottom = explained["cut"]
    assert top + bottom > 0 or left > 0


def test_simulate_says_that_a_dataset_leaves_the_image_out(folder):
    config = write(folder, dataset="skip_image_resolution = 200")
    small, large = (run("simulate", size, "--config", config).output for size in ("400x100", "400x101"))
    why = "which does not train it (400x100: no more pixels than skip_image_resolution 200x200)"
    assert f"dataset 1 (256x256), {why}" in " ".join(small.split())
    assert "dataset 1 (256x256)\n" in large


def test_the_demo_is_what_the_readme_promises(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = read_config("configs/demo.toml")
    seen = overview(config, AdapterOptions(), (1, 2))
    assert [len(d.items.keys) for d in seen.datasets] == [20, 18]
    assert [Path(key).name for key, _ in seen.datasets[1].left_out] == ["icon_tiny.png", "ribbon_too_narrow.png"]
    assert [len(one.names) for one in config.findings if one.code == "turned"] == [1, 1]
    assert seen.gpus[0].missed == seen.gpus[0].repeated == 0
    total = sum(f.stat().st_size for f in (ROOT / "configs" / "demo_images").iterdir())
    assert total < 500_000


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda f: f.name)
def test_the_ready_configs_hold_nothing_wrong_but_the_paths(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    wrong = [f for f in read_config(file).findings if f.code not in ("missing-folder", "missing-metadata", "no-images")]
    assert not [f.text for f in wrong if f.severity.value == "error"]


def test_the_command_line_is_spelled_either_way_and_gives_way_to_the_config(folder):
    for options in (("--train_batch_size", "4"), ("--train-batch-size", "4"), ("--batch-size", "4")):
        data = as_json("plan", write(folder), *options, "--min_bucket_reso", "128")
        assert data["datasets"][0]["batch_size"] == 2
        assert [f["code"] for f in data["findings"]] == ["short-batches", "overruled"]


def test_each_option_stands_for_a_key_of_the_config():
    """Another name would be ignored."""
    assert {config_name(field.name) for field in fields(TrainerArguments)} <= DEFAULTS.keys()


def test_the_release_of_sd_scripts_counts(folder):
    file = write(folder, dataset="skip_image_resolution = 8")
    assert run("plan", file).exit_code == 0
    result = run("plan", file, "--sd-scripts", "v0.10.1")
    assert result.exit_code == 1
    assert "new in sd-scripts 0.10.2" in result.output
    assert exit_message("plan", file, "--sd-scripts", "0.9.1").endswith("kohya_bucket needs sd-scripts 0.10.1 or newer")
    (old := folder.parent / "old" / "library").mkdir(parents=True)
    (old / "train_util.py").touch()
    assert exit_message("plan", file, "--sd-scripts", old.parent) == f"{old.parent} is too old: {NEEDED}"
    message = "--sd-scripts is 'newest', but must be a version such as 0.11.1, or a checkout: newest does not exist"
    assert message in exit_message("plan", file, "--sd-scripts", "newest")


def exit_message(*arguments):
    return str(run(*arguments).exception)


def test_the_checkout_at_hand_counts(folder, monkeypatch):
    file = write(folder, dataset="skip_image_resolution = 64")
    library = folder.parent / "here" / "sd-scripts" / "library"
    library.mkdir(parents=True)
    for name in ("train_util", "config_util", "strategy_base"):
        (library / f"{name}.py").touch()
    checkout = library.parent
    assert run("plan", file).exit_code == 0
    for options in (("--sd-scripts", checkout), ("--sd-scripts", checkout.parent)):
        result = run("plan", file, *options)
        assert result.exit_code == 1
        assert f"new in sd-scripts 0.10.2, and {checkout} does not know it" in " ".join(result.output.split())
    monkeypatch.chdir(checkout.parent)
    assert run("plan", file).exit_code == 1
    assert run("plan", file, "--sd-scripts", "0.11.1").exit_code == 0


def test_small_images_are_named_and_counted(folder):
    file = write(folder, dataset="skip_image_resolution = [200, 200]")
    data = as_json("plan", file, "--images")
    (dataset,) = data["datasets"]
    left_out = {Path(row["image"]).name: row["reason"] for row in dataset["not_trained"]}
    assert left_out == {
        "3.png": "400x100: no more pixels than skip_image_resolution 200x200",
        "4.png": "90x300: no more pixels than skip_image_resolution 200x200",
    }
    assert (dataset["images"], dataset["samples"], len(dataset["image_rows"])) == (5, 15, 5)
    text = run("plan", file, "--strict")
    assert (text.exit_code, "not trained: 2" in text.output) == (0, True)
    assert ": 5 images, 3 times each" in text.output
    everything = run("plan", write(folder, dataset="skip_image_resolution = 1000"))
    assert everything.exit_code == 1
    assert "all 7 images have no more pixels than skip_image_resolution 1000x1000" in everything.output


def test_several_resolutions_and_merged_remainders(folder):
    both = as_json("plan", write(folder, rest="[kohya_bucket]\nresolutions = [256, 320]"), "--images")
    assert len(both["datasets"][0]["image_rows"]) == 14
    rotate = "[kohya_bucket]\nresolutions = [256, 320]\nresolution_mode = 'rotate'"
    output = run("plan", write(folder, rest="[kohya_bucket]\nremainder = 'catch_all'")).output
    assert "trained at the base size" in output
    assert "256x256, 320x320 (one per epoch in turn)" in run("plan", write(folder, rest=rotate)).output
    refused = run("plan", write(folder, "bucket_no_upscale = true", rest="[kohya_bucket]\nremainder = 'catch_all'"))
    assert "would enlarge images to the base size" in str(refused.exception)


def test_captions_that_are_no_utf_8_are_named(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "a.txt").write_bytes("grün".encode("latin-1"))
    with pytest.raises(KohyaBucketError, match=r"a\.txt: the caption cannot be read .* it must be UTF-8 text"):
        source_in([str(tmp_path / "a.png")], SourceOptions(), recursive=True)
    (tmp_path / "a.json").write_text('{"caption": "a smile, cut \\ud83d"}', encoding="utf-8")
    with pytest.raises(KohyaBucketError, match=r"a\.json: the caption cannot be read .* it must be UTF-8 text"):
        source_in([str(tmp_path / "a.png")], SourceOptions(caption_extension=".json"), recursive=True)
    with pytest.raises(ConfigError, match=r"a\.txt"):
        source_in([str(tmp_path / "a.png")], SourceOptions(tmp_path / "a.txt"), recursive=True)


@pytest.mark.parametrize("line", ["batch_size = 2\nbatchsize = 3", "bach_size = 2"])
def test_a_misspelt_key_counts_as_what_was_meant_unless_that_is_there_too(folder, line):
    whole, file = as_json("plan", write(folder)), write(folder)
    file.write_text(file.read_text("utf-8").replace("batch_size = 2", line), "utf-8")
    result = run("plan", file, "--json")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert [shown["datasets"], shown["gpus"]] == [whole["datasets"], whole["gpus"]]
    assert [finding["code"] for finding in shown["findings"] if finding["severity"] == "error"] == ["unknown-key"]
    assert "'batch_size'" in run("plan", file).stdout.splitlines()[-1]


def test_only_the_data_sets_from_which_no_buckets_follow_are_left_out(folder):
    broken = f"[[datasets]]\nbatch_size = 0\nresolution = 0\n[[datasets.subsets]]\nimage_dir = '{folder}'\n"
    config = write(folder, rest=broken)
    result = run("plan", config, "--json")
    assert (result.exit_code, len(json.loads(result.stdout)["datasets"])) == (1, 1)
    assert run("plan", config).stdout.rstrip().endswith("dataset 2")


def test_json_names_a_thousand_files_of_a_finding_or_with_images_all(folder):
    for n in range(1200):
        (folder / f"{n}.gif").touch()
    config = write(folder)
    for more, names in ([], 1000), (["--images"], 1200):
        (finding,) = [f for f in as_json("plan", config, *more)["findings"] if f["code"] == "ignored-files"]
        assert (len(finding["names"]), finding["count"]) == (names, 1200)


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "epochs", "limit"),
    [
        ({"epoch": 10, "max_train_steps": 4}, 10, 4),
        ({"epoch": 10, "max_train_steps": "0"}, 10, 35),  # the GUI divides 7 images by 2, ten times
        ({"max_train_epochs": 3, "max_train_steps": 1600}, 3, None),
        ({"max_train_epochs": 3, "gradient_accumulation_steps": 2}, 3, None),
        ({}, 1, 1600),
        ({"max_train_epochs": 3, "num_processes": "2"}, 3, None),
        ({"epoch": 10, "num_processes": 2}, 10, 35),  # the GUI computes steps as for one process
    ],
)
def test_the_whole_training_of_a_preset(folder, settings, epochs, limit):
    folder.rename(folder.with_name("1_cat"))
    given = {"LoRA_type": "Standard", "max_resolution": "256", "train_batch_size": 2, "enable_bucket": True}
    preset = folder.with_name("preset.json")
    given |= {"train_data_dir": str(folder.parent), "min_bucket_reso": 128, "caption_extension": ".txt"}
    preset.write_text(json.dumps(given | settings), encoding="utf-8")
    processes = int(settings.get("num_processes", 1))
    (row,) = as_json("plan", preset)["gpus"]
    assert row == as_json("plan", preset, "--gpus", processes)["gpus"][0]
    assert row["gpus"] == processes
    assert "epochs" not in row
    steps = row["updates"]
    (line,) = [line for line in run("plan", preset).stdout.splitlines() if line.startswith(f"{epochs} epoch")]
    unit = "updates" if "gradient_accumulation_steps" in settings else "steps"
    assert f"= {epochs * steps} {unit}" in line
    assert limit is None or line.endswith(f" epoch {-(-limit // steps)}")


def test_a_folder_of_images_is_planned_for_a_model_that_is_said_first(folder, command_line) -> None:
    (folder / "deeper").mkdir()
    Image.new("RGB", (640, 480)).save(folder / "deeper" / "z.png")
    count = len(list(folder.rglob("*.png")))
    code, out, _ = command_line("plan", folder)
    assert code == 0
    assert out.startswith("Planned for SD 1.5 at 512, batch size 1; others: --arch sdxl")
    assert "give it to the trainer" not in out
    planned = json.loads(command_line("plan", folder, "--json", "--batch-size", 2)[1])["datasets"][0]
    assert sum(row["images"] for row in planned["buckets"]) + len(planned["not_trained"]) == count
    assert command_line("plan", folder, "--arch", "flux")[1].startswith("Planned for Flux trainers at 1024")
    code, _, said = command_line("plan", folder / "deeper" / "..", "--arch", "qwen-image")
    assert (code, "models of other trainers go with their configs" in said) == (2, True)
