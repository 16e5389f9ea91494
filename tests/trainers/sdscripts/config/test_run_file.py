"""What a trainer's `--config_file` and the presets of the kohya_ss GUI say of the data."""

import json

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.findings import Severity
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.config import read_config


@pytest.fixture
def folder(tmp_path):
    for subfolder in ("img/10_cat", "reg/1_animal"):
        (tmp_path / subfolder).mkdir(parents=True)
        for i, size in enumerate([(300, 400), (400, 300)]):
            Image.fromarray(np.zeros((size[1], size[0], 3), dtype=np.uint8)).save(tmp_path / subfolder / f"{i}.png")
            (tmp_path / subfolder / f"{i}.txt").write_text("a cat", encoding="utf-8")
    return tmp_path


def preset(folder, **more):
    """As the GUI saves it: numbers as text, names of its own, and what is empty."""
    settings = {
        "LoRA_type": "Standard", "max_resolution": "1024,1024", "train_batch_size": 3, "batch_size": "7",
        "enable_bucket": 1, "bucket_no_upscale": False, "bucket_reso_steps": 32.0, "min_bucket_reso": "256",
        "max_bucket_reso": 2048, "caption_extension": ".txt", "keep_tokens": "1", "caption_dropout_every_n_epochs": 0.0,
        "sdxl": True, "flux1_checkbox": False, "seed": "", "reg_data_dir": "", "dataset_config": "",
        "train_data_dir": str(folder / "img"), **more,
    }  # fmt: skip
    file = folder / "preset.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return file


def test_a_preset_of_the_gui(folder):
    read = read_config(preset(folder))
    (dataset,) = read.datasets
    assert not list(read.findings)
    assert read.programs.family == "sdxl"
    keys = dataset.config.dataset_keys
    assert (keys.resolution, keys.min_bucket_reso, keys.max_bucket_reso) == ((1024, 1024), 256, 2048)
    assert (keys.bucket_reso_steps, keys.bucket_no_upscale, dataset.config.batch_size) == (32, False, 3)
    assert type(keys.bucket_reso_steps) is int
    assert dataset.config.subsets[0].keep_tokens == 1
    assert dataset.images.repeats.tolist() == [10, 10]


def test_regularization_images_of_a_preset(folder):
    read = read_config(preset(folder, reg_data_dir=str(folder / "reg")))
    assert sorted(read.datasets[0].images.is_reg.tolist()) == [False, False, True, True]


def test_the_command_line_counts_before_a_preset(folder):
    read = read_config(preset(folder), {"train_batch_size": 5, "resolution": None})
    assert read.datasets[0].config.batch_size == 5
    assert read.datasets[0].config.resolution == (1024, 1024)


def test_a_preset_of_fine_tuning_always_has_buckets(folder):
    read = read_config(preset(folder, dataset_repeats="2", enable_bucket=False, create_caption=True))
    assert read.datasets[0].config.enable_bucket


def test_a_preset_of_fine_tuning_with_metadata(folder):
    metadata = {str(folder / "img" / "10_cat" / "0.png"): {"caption": "a"}}
    (folder / "meta.json").write_text(json.dumps(metadata), encoding="utf-8")
    more = {"dataset_repeats": "2", "image_folder": str(folder / "img" / "10_cat"), "train_data_dir": ""}
    more |= {"train_dir": str(folder), "caption_metadata_filename": "meta.json", "use_latent_files": "No"}
    read = read_config(preset(folder, **more))
    assert len(read.datasets[0].images) == 1
    assert read.datasets[0].images.repeats.tolist() == [2]


@pytest.mark.parametrize("headings", [False, True])
def test_a_file_for_config_file(folder, headings):
    """sd-scripts takes what stands under a heading as if it stood outside."""
    data = f"train_data_dir = '{folder / 'img'}'\nresolution = '512,768'\nenable_bucket = true\ntrain_batch_size = 2\n"
    data += "caption_extension = '.txt'\nnetwork_module = 'networks.lora_flux'\n"
    file = folder / "config_lora.toml"
    file.write_text(("[training]\n" if headings else "") + data, encoding="utf-8")
    read = read_config(file)
    assert read.programs.family == "flux"
    assert read.datasets[0].config.resolution == (512, 768)
    assert read.datasets[0].config.batch_size == 2
    assert not list(read.findings)


def test_with_a_dataset_config_in_it(folder):
    dataset = f"[[datasets]]\nresolution = 256\n[[datasets.subsets]]\nimage_dir = '{folder / 'img' / '10_cat'}'\n"
    (folder / "dataset.toml").write_text(dataset + "caption_extension = '.txt'\n", encoding="utf-8")
    read = read_config(preset(folder, dataset_config=str(folder / "dataset.toml")))
    assert read.path == folder / "dataset.toml"
    assert read.programs.family == "sdxl"
    assert read.datasets[0].config.resolution == (256, 256)
    assert read.datasets[0].config.batch_size == 3  # where the dataset config is silent
    texts = [finding.text for finding in read.findings]
    assert any("train_data_dir" in text and "is ignored, because dataset_config is" in text for text in texts)


@pytest.mark.parametrize("size", [1024.5, [1024, 768], True, "1024x768"])
def test_a_resolution_that_is_none(folder, size):
    with pytest.raises(ConfigError, match="but must be a size like 512"):
        read_config(preset(folder, max_resolution=size))


def test_a_preset_that_names_no_images(folder):
    file = preset(folder, train_data_dir="")
    with pytest.raises(ConfigError, match="names neither a dataset_config nor a train_data_dir: choose the images"):
        read_config(file)
    assert len(read_config(file, {"train_data_dir": str(folder / "img")}).datasets[0].images) == 2


def test_options_of_the_adapter_are_not_read_there(folder):
    file = folder / "run.toml"
    text = f"train_data_dir = '{folder / 'img'}'\nresolution = '512'\n[kohya_bucket]\norder = 'runs'\n"
    file.write_text(text, encoding="utf-8")
    read = read_config(file)
    assert read.options == AdapterOptions()
    assert "table-not-read" in [f.code for f in read.findings]


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_bucket_reso", "wide"), ("train_batch_size", True), ("bucket_reso_steps", [64]), ("caption_extension", 1),
     ("caption_extension", [".txt"]), ("caption_separator", True), ("enable_bucket", "no"), ("bucket_no_upscale", 2)],
)  # fmt: skip
def test_values_of_another_kind(folder, key, value):
    with pytest.raises(ConfigError, match=f"{key} is"):
        read_config(preset(folder, **{key: value}))


def test_values_are_refused_where_the_trainer_takes_them_as_they_are(folder):
    for line, message in (
        ("max_bucket_reso = '1024'", "max_bucket_reso is '1024', but must be a number like 1024"),
        ("resolution = 1024", "resolution is 1024, but must be a size like '512' or '512,768', in quotes"),
        ("train_batch_size = 4.7", "train_batch_size is 4.7, but must be a whole number like 1"),
        ("max_train_epochs = 2.5", "max_train_epochs is 2.5, but must be a whole number like 0"),
    ):
        (folder / "run.toml").write_text(f"train_data_dir = 'img'\n{line}\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            read_config(folder / "run.toml")


def test_a_share_of_all_steps_is_no_whole_number(folder):
    text = f"train_data_dir = '{folder / 'img'}'\nresolution = '512'\ntoken_warmup_step = 0.5\n"
    (folder / "run.toml").write_text(text, encoding="utf-8")
    assert read_config(folder / "run.toml").datasets[0].config.subsets[0].token_warmup_step == 0.5


def test_what_is_neither_is_told_so(folder):
    (folder / "other.json").write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(ConfigError, match="datasets"):
        read_config(folder / "other.json")
    dataset = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'x'\n"
    (folder / "dataset.toml").write_text(dataset, encoding="utf-8")
    with pytest.raises(ConfigError, match="brings its own images: leave out --train-data-dir"):
        read_config(folder / "dataset.toml", {"train_data_dir": "img"})


@pytest.mark.parametrize(
    ("more", "codes"),
    [
        ("max_data_loader_n_workers = 0\npersistent_data_loader_workers = true", ["loader"]),
        ("max_data_loader_n_workers = 0", []),
        ("persistent_data_loader_workers = true", []),  # by default there are 8 workers
        ("max_data_loader_n_workers = 0\npersistent_data_loader_workers = true\ndeepspeed = true", []),  # makes it 1
        ("[loading]\nmax_data_loader_n_workers = -1", ["loader"]),
        ("gradient_accumulation_steps = 0", ["gradient-accumulation-steps"]),
        ("gradient_accumulation_steps = -1", ["gradient-accumulation-steps"]),
        ('mixed_precision = "fp61"', ["mixed-precision"]),
        ('mixed_precision = "bf16"', []),
    ],
)
def test_settings_at_which_the_loader_or_accelerate_ends_the_run(folder, more, codes):
    file = folder / "run.toml"
    text = (
        f"pretrained_model_name_or_path = 'm'\nresolution = '512'\ntrain_data_dir = {json.dumps(str(folder / 'img'))}"
    )
    file.write_text(f"{text}\n{more}\n", encoding="utf-8")
    found = list(read_config(file).findings)
    assert [one.code for one in found if one.severity is Severity.ERROR] == codes
    assert all(one.where.startswith("line ") for one in found if one.code in codes)


def test_zeros_of_a_preset_are_not_handed_over(folder):
    more = {"max_data_loader_n_workers": 0, "persistent_data_loader_workers": True, "gradient_accumulation_steps": 0}
    assert not list(read_config(preset(folder, **more)).findings)
    wrong = read_config(preset(folder, max_data_loader_n_workers="-1")).findings
    assert [one.code for one in wrong] == ["loader"]
