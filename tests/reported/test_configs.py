"""Configs that are misread"""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.trainers.sdscripts.config import Release
from kohya_bucket.trainers.sdscripts.config.keys import KEYS, Level, known_keys
from tests.command_line import Command, command_line  # noqa: F401
from tests.reported.case import reported


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("img").mkdir()
    for i in range(5):
        Image.new("RGB", (512, 768)).save(f"img/{i}.png")
        Path(f"img/{i}.txt").write_text("a cat", encoding="utf-8")


def config(dataset: str = "", subset: str = "", top: str = "", name: str = "d.toml") -> str:
    text = f"{top}\n[[datasets]]\nresolution = 512\nenable_bucket = true\n{dataset}\n[[datasets.subsets]]\n"
    Path(name).write_text(text + f"image_dir = 'img'\ncaption_extension = '.txt'\n{subset}\n", encoding="utf-8")
    return name


def settings(**more: object) -> str:
    """A trainer's settings, as `--config_file` reads them."""
    config()
    rows = {"dataset_config": "d.toml", "pretrained_model_name_or_path": "m", **more}
    Path("run.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in rows.items()), encoding="utf-8")
    return "run.toml"


def findings(run: Command, *arguments: object, code: int = 0) -> dict[str, dict[str, object]]:
    """Those of `plan`, by their codes, which are those of `doctor` and, except for notes, of `analyze`."""
    ended, out, err = run("plan", *arguments, "--json")
    assert ended == code, out + err
    found = json.loads(out)["findings"]
    return {one["code"]: one for one in found}


@reported(
    "`extra keys not allowed @ data['datasets'][0]['subsets'][0]['caption_separator']`",
    "kohya-ss/sd-scripts#1311",
    trainer="each version refuses the keys that came after it",
    here="the key and the version that brought it are named; an unknown version is said to be unknown, and the keys of "
    "a checkout are read from its source",
    command="kohya-bucket plan my.toml --sd-scripts 0.10.1",
    origin="`config_util.py` of the tags v0.4.5 to v0.11.1",
)
def test_a_key_that_an_older_version_refuses(command_line: Command, tmp_path: Path) -> None:  # noqa: F811
    file = config(dataset="skip_image_resolution = 8")
    found = findings(command_line, file, "--sd-scripts", "0.10.1", code=1)["misplaced-key"]
    assert found["message"] == "'skip_image_resolution' is new in sd-scripts 0.10.2, and 0.10.1 does not know it"
    assert findings(command_line, file, "--sd-scripts", "0.10.2") == {}
    for unknown in ("0.99", "1.0", "0.11.7", "v0.11.1.2"):
        assert unknown in str(findings(command_line, file, "--sd-scripts", unknown)["unknown-version"])
    assert findings(command_line, file, "--sd-scripts", "0.11") == {}
    library = tmp_path / "sd" / "library"
    library.mkdir(parents=True)
    (tmp_path / "sd" / "train_network.py").touch()
    (library / "strategy_base.py").touch()
    schema = (
        "class C:\n    SUBSET_ASCENDABLE_SCHEMA = {'num_repeats': int, 'ours': str}\n    DATASET_ASCENDABLE_SCHEMA = {"
    )
    schema += (
        "'resolution': f(int), 'enable_bucket': bool}\n    DB_SUBSET_DISTINCT_SCHEMA = {Required('image_dir'): str}\n"
    )
    schema += "    DB_SUBSET_ASCENDABLE_SCHEMA = {'caption_extension': str}\n    raise SystemExit('read, not run')\n"
    (library / "config_util.py").write_text(schema, encoding="utf-8")
    found = findings(command_line, file, "--sd-scripts", tmp_path / "sd", code=1)
    assert found["misplaced-key"]["names"] == ["skip_image_resolution"]
    own = findings(command_line, config(subset="ours = 'x'"), "--sd-scripts", tmp_path / "sd")
    assert own["own-key"]["names"] == ["ours"]


def test_the_keys_of_every_version() -> None:
    """As the tags of sd-scripts have them in `config_util.py`."""
    before, after = (known_keys(Level.GENERAL, None, Release.from_version(version)) for version in ("0.10.1", "0.10.6"))
    assert after - before == {name for name, key in KEYS.items() if key.since} == {"skip_image_resolution"}
    assert after == known_keys(Level.GENERAL, None)


@reported(
    "`extra keys not allowed @ data['datasets'][0]['subsets']`",
    "kohya-ss/musubi-tuner#607",
    trainer="musubi-tuner has no subsets, and stops",
    here="the config is known to be musubi-tuner's by its keys, the plan is shown, and the message says where they go",
    command="kohya-bucket plan my.toml --arch wan",
    origin="its `ConfigSanitizer`",
)
def test_subsets_for_musubi_tuner(command_line: Command) -> None:  # noqa: F811
    text = "[[datasets]]\nresolution = 512\ncaption_extension = '.txt'\nenable_bucket = true\n"
    text += "[[datasets.subsets]]\nimage_directory = 'img'\ncache_directory = 'c'\nnum_repeats = 2\n"
    Path("m.toml").write_text(text, encoding="utf-8")
    found = findings(command_line, "m.toml", "--arch", "wan", code=1)
    assert list(found) == ["misplaced-key"]
    assert found["misplaced-key"]["message"] == "musubi-tuner has no subsets, and stops at [[datasets.subsets]]"
    out = command_line("plan", "m.toml", "--arch", "wan", "--json")[1]
    assert [data["samples"] for data in json.loads(out)["datasets"]] == [10]
    assert command_line("doctor", "m.toml", "--arch", "wan", "--quick")[0] == 1
    assert "has no subsets" in command_line("analyze", "--config", "m.toml", "--arch", "wan")[2]


@reported(
    "`AssertionError: resolution is required`, or `'int' object has no attribute 'split'`, with a dataset config",
    "kohya-ss/sd-scripts#1449",
    "kohya-ss/sd-scripts#2094",
    trainer="a file for `--config_file` is read as options, and the `[[datasets]]` in it are ignored",
    here="`plan` says which option takes the file, and names settings of a trainer that stand in a dataset config",
    command="kohya-bucket plan config.toml",
    origin="runs of `train_network.py` of c162e90",
)
def test_a_dataset_config_as_config_file(command_line: Command) -> None:  # noqa: F811
    code, out, _ = command_line("plan", config())
    assert code == 0
    assert out.rstrip().endswith("give it to the trainer as --dataset_config d.toml, not as --config_file")
    mixed = config(top="pretrained_model_name_or_path = 'm'\n[training]\noutput_dir = 'o'\nlearning_rate = 1e-4")
    found = findings(command_line, mixed, code=1)
    assert list(found) == ["misplaced-key"]
    assert found["misplaced-key"]["names"] == ["pretrained_model_name_or_path", "training"]
    assert "sd-scripts does not read [[datasets]]" in str(found["misplaced-key"]["message"])


@reported(
    "a dataset config without `[[datasets.subsets]]` beside `--train_data_dir`",
    trainer="the folder is ignored, and no image is trained",
    here="both are named, and what to write",
    command="kohya-bucket plan my.toml --train_data_dir train",
    origin="the trainers' handling of `--dataset_config`",
)
def test_a_config_without_subsets_beside_a_folder(command_line: Command) -> None:  # noqa: F811
    Path("n.toml").write_text("[[datasets]]\nresolution = 512\n", encoding="utf-8")
    code, _, err = command_line("plan", "n.toml", "--train_data_dir", "img")
    assert code == 2
    assert "has no [[datasets.subsets]], so it names no images" in err
    assert "brings its own" in command_line("plan", config(), "--train_data_dir", "img")[2]


@reported(
    "`when caching latents, either color_aug or random_crop cannot be used`",
    "bmaltais/kohya_ss#1503",
    trainer="stops after it has read the images",
    here="exit code 1 with both keys, for every pair that a trainer refuses",
    command="kohya-bucket plan my.toml --cache-latents",
    origin="`is_latent_cacheable` of its datasets",
)
@pytest.mark.parametrize("key", ["color_aug", "random_crop"])
def test_latents_are_not_cached_beside_random_pixels(command_line: Command, key: str) -> None:  # noqa: F811
    file = config(subset=f"{key} = true")
    assert "cache-conflict" not in findings(command_line, file)
    assert findings(command_line, file, "--cache-latents", code=1)["cache-conflict"]["names"] == ["cache_latents", key]
    assert command_line("doctor", file, "--cache-latents", "--quick")[0] == 1
    run = settings(cache_latents_to_disk=True)
    config(subset=f"{key} = true")
    assert findings(command_line, run, code=1)["cache-conflict"]["names"] == ["cache_latents", key]
    assert f"{key} is set beside cache_latents" in command_line("analyze", "--config", run)[1]


@pytest.mark.long
@reported(
    "`when caching Text Encoder output, either caption_dropout_rate, shuffle_caption, token_warmup_step or "
    "caption_tag_dropout_rate cannot be used`",
    "kohya-ss/sd-scripts#886",
    "kohya-ss/sd-scripts#1543",
    "kohya-ss/sd-scripts#1460",
    "gazingstars123/Anima-Standalone-Trainer#69",
    trainer="stops; Anima takes caption_dropout_rate, and `lumina_train_network.py` ignores them all in silence",
    here="exit code 1 with both keys; a warning where a setting does nothing",
    command="kohya-bucket plan my.toml --cache-text-encoder-outputs --arch flux",
    origin="`is_text_encoder_output_cacheable` of its datasets, and each trainer's `assert_extra_args`",
)
@pytest.mark.parametrize(
    "line",
    ["shuffle_caption = true", "token_warmup_step = 2", "caption_tag_dropout_rate = 0.1", "caption_dropout_rate = 0.1"],
)
def test_text_outputs_are_not_cached_beside_random_captions(command_line: Command, line: str) -> None:  # noqa: F811
    file, key = config(subset=line), line.partition(" ")[0]
    pair = ["cache_text_encoder_outputs", key]
    for arch in (("--arch", "flux"), ()):
        assert (
            findings(command_line, file, "--cache-text-encoder-outputs", *arch, code=1)["cache-conflict"]["names"]
            == pair
        )
    anima = findings(
        command_line, file, "--cache-text-encoder-outputs", "--arch", "anima", code=int("caption_d" not in key)
    )
    assert ("cache-conflict" in anima) == (key != "caption_dropout_rate")
    lumina = findings(command_line, file, "--cache-text-encoder-outputs", "--arch", "lumina_train_network.py")
    assert lumina["cached-captions"]["names"] == pair
    assert "cache-conflict" not in findings(command_line, file, "--cache-text-encoder-outputs", "--arch", "sd")


@reported(
    "`network for Text Encoder cannot be trained with caching Text Encoder outputs`",
    "bmaltais/kohya_ss#1210",
    trainer="stops",
    here="exit code 1 with both settings, from a preset of the GUI or a file for `--config_file`",
    command="kohya-bucket plan preset.json",
    origin="the assertions of `sdxl_train_network.py`, `sdxl_train.py` and `sd3_train.py`",
)
def test_text_encoders_are_not_trained_beside_their_cache(command_line: Command) -> None:  # noqa: F811
    lora = {"network_module": "networks.lora", "cache_text_encoder_outputs": True}
    refused = {
        "sdxl": [lora, {"cache_text_encoder_outputs": True, "train_text_encoder": True}],
        "sd3": [{"cache_text_encoder_outputs": True, "train_text_encoder": True}],
        "flux": [{**lora, "network_args": ["train_t5xxl=True"]}],
    }
    for arch, cases in refused.items():
        for case in cases:
            ended = command_line(
                "plan", settings(**case), "--arch", f"{arch}_train{'_network' * ('network_module' in case)}.py"
            )
            assert ended[0] == 1, (arch, case, ended)
            assert re.search(r"is set (beside|without)", ended[1])
    assert command_line("plan", settings(**refused["sdxl"][1]))[0] == 1  # no trainer that has both takes them
    weighted = settings(cache_text_encoder_outputs=True, weighted_captions=True)
    assert findings(command_line, weighted, "--arch", "sdxl_train.py", code=1)["cache-conflict"]["severity"] == "error"
    assert findings(command_line, weighted, "--arch", "sdxl")["cache-conflict"]["severity"] == "warning"
    good = settings(**lora, network_train_unet_only=True)
    assert findings(command_line, good, "--arch", "sdxl") == {}
    config()
    preset = {
        "LoRA_type": "Standard", "sdxl": True, "sdxl_cache_text_encoder_outputs": True, "text_encoder_lr": 5e-05,
        "dataset_config": "d.toml", "train_batch_size": 1, "max_resolution": "512,512",
    }  # fmt: skip
    Path("preset.json").write_text(json.dumps(preset), encoding="utf-8")
    assert findings(command_line, "preset.json", code=1)["cache-conflict"]["names"] == [
        "cache_text_encoder_outputs", "network_train_unet_only"
    ]  # fmt: skip
    Path("preset.json").write_text(json.dumps({**preset, "text_encoder_lr": 0}), encoding="utf-8")
    assert "cache-conflict" not in findings(command_line, "preset.json")


@reported(
    "all images are cropped to a square, `min_bucket_reso` equal to the resolution",
    "kohya-ss/sd-scripts#543",
    trainer="cuts a third off 512x768 at 512, in silence",
    here="a warning in `plan`, `doctor` and `analyze`, with the share that is lost and the value to set",
    command="kohya-bucket doctor my.toml",
    origin="its own placement with both values",
)
def test_the_lower_limit_of_buckets(command_line: Command) -> None:  # noqa: F811
    file = config(dataset="min_bucket_reso = 512")
    found = findings(command_line, file)["wide-buckets"]
    assert found["message"] == (
        "at resolution 512x512 no bucket is narrower than 512, so 5 of 5 images lose 33% to the crop, "
        "and 10% with 256 (512x768 at 512x512 instead of 384x640)"
    )
    assert found["remedy"] == "min_bucket_reso = 256"
    for command in (("doctor", file, "--quick"), ("analyze", "--config", file)):
        assert "is narrower than 512, so 5 of 5 images lose 33%" in command_line(*command)[1]
    assert findings(command_line, config()) == {}


@reported(
    "`validation_split` trains an image that it also validates",
    trainer="rounds the training part up and the other one to the nearest number: 0.07 of 41 images are 39 and 3",
    here="a warning with both numbers and the image",
    command="kohya-bucket plan my.toml",
    origin="its `split_train_val`, run on 41 images with five shares",
)
def test_an_image_in_both_parts(command_line: Command) -> None:  # noqa: F811
    for i in range(5, 41):
        Image.new("RGB", (64, 64)).save(f"img/{i}.png")
        Path(f"img/{i}.txt").write_text("a cat", encoding="utf-8")
    found = findings(command_line, config(dataset="validation_split = 0.07\nvalidation_seed = 1"))["validation-overlap"]
    assert "validation_split 0.07 of 41 images: 39 are trained and 3 held back" in str(found["message"])
    assert len(list(found["names"])) == 1  # type: ignore[call-overload]
    whole = findings(command_line, config(dataset="validation_split = 1.0\nvalidation_seed = 1"), code=1)
    assert "validation-overlap" not in whole


@pytest.mark.weekly
def test_one_finding_for_many_of_a_kind(command_line: Command) -> None:  # noqa: F811
    """Three, and then how many more; each misspelt key is a kind of its own, up to twenty."""
    table = "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'gone{}'\n"
    Path("many.toml").write_text("".join(map(table.format, range(500))), encoding="utf-8")
    out = command_line("plan", "many.toml", "--json")[1]
    found = [one for one in json.loads(out)["findings"] if one["code"] == "missing-folder"]
    assert [one["count"] for one in found] == [1, 1, 1, 497]
    assert found[-1]["message"].startswith("and 497 more of this kind (line 15, dataset 4, subset 1, ")
    assert len(found[-1]["names"]) == 497
    text = command_line("plan", "many.toml")[1]
    assert text.count("is not a folder") == 3
    assert "sd-scripts stops: and 497 more of this kind" in text
    lines = "".join(f"wrong_{i} = 1\n" for i in "abcdef")
    out = command_line("plan", config(subset=lines), "--json")[1]
    assert len([one for one in json.loads(out)["findings"] if one["code"] == "unknown-key"]) == 6
    lines = "".join(f"wrong_{i} = 1\n" for i in range(60))
    out = command_line("plan", config(subset=lines), "--json")[1]
    found = [one for one in json.loads(out)["findings"] if one["code"] == "unknown-key"]
    assert [one["count"] for one in found] == [1] * 23 + [37]
    assert found[-1]["names"] == [f"wrong_{i}" for i in range(23, 60)]


@reported(
    "a preset or a config with `C:\\…` on Linux, in WSL or in a container",
    trainer="finds no images, or says that the folder does not exist",
    here="every command says that it is a Windows path, and names the folder under /mnt if it is there",
    command="kohya-bucket plan preset.json",
    origin="the same path in five kinds of files",
)
@pytest.mark.posix("the path is right on Windows")
def test_windows_paths_elsewhere(command_line: Command) -> None:  # noqa: F811
    path, keys = r"C:\data\cats", "resolution = 512\ncaption_extension = '.txt'\n"
    preset = {"train_data_dir": path, "max_resolution": "512,512", "LoRA_type": "Standard"}
    job = {"job": "extension", "config": {"name": "x", "process": [{"datasets": [{"folder_path": path}]}]}}
    files = {
        "p.json": json.dumps(preset), "j.json": json.dumps(job),
        "s.toml": f"[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = '{path}'\n",
        "m.toml": f"[[datasets]]\n{keys}image_directory = '{path}'\n",
    }  # fmt: skip
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
        for command in ("plan", "doctor"):
            assert "this is a Windows path" in "".join(map(str, command_line(command, name)[1:])), (command, name)
    for more in (("plan", "--train-data-dir", path), ("analyze", path)):
        assert "this is a Windows path" in "".join(map(str, command_line(*more)[1:]))
