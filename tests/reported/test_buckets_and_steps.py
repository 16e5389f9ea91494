"""Buckets, batches and steps"""

import json
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.buckets.placement import Reason
from tests.command_line import Command
from tests.reported.case import reported


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(sizes: list[tuple[int, int]], dataset: str = "", more: str = "") -> str:
    Path("img").mkdir()
    for i, size in enumerate(sizes):
        Image.new("RGB", size).save(f"img/{i}.png")
        Path(f"img/{i}.txt").write_text("a cat", encoding="utf-8")
    text = f"[[datasets]]\nresolution = 512\nenable_bucket = true\nbatch_size = 4\n{dataset}\n[[datasets.subsets]]\n"
    Path("d.toml").write_text(f"{text}image_dir = 'img'\ncaption_extension = '.txt'\n{more}\n", encoding="utf-8")
    return "d.toml"


def planned(run: Command, *arguments: object) -> dict:
    code, out, err = run("plan", *arguments, "--json")
    assert code == 0, out + err
    return json.loads(out)


SEVEN = [(512, 512)] * 5 + [(512, 768)] * 2
"""Two buckets, of which none is a multiple of the batch size 4."""


@reported(
    "`ZeroDivisionError: division by zero` in `select_bucket`",
    "kohya-ss/sd-scripts#1365",
    "bmaltais/kohya_ss#1491",
    "bmaltais/kohya_ss#3240",
    trainer="with bucket_no_upscale, a side shorter than one step becomes 0, and it stops",
    here="the image is named and left out, and the others are trained",
    command="kohya-bucket plan my.toml",
    origin="a few lines of the rule: 50 pixels are not a whole step of 64",
)
def test_a_side_below_one_step(command_line: Command) -> None:
    found = planned(command_line, config([(2000, 50), (500, 400)], "bucket_no_upscale = true"))
    assert [one["image"] for one in found["datasets"][0]["not_trained"]] == [str(Path("img/0.png"))]
    assert found["datasets"][0]["not_trained"][0]["reason"] == f"2000x50: {Reason.TOO_SMALL.text}"
    assert found["gpus"][0]["samples"] == 1


@reported(
    "with bucket_no_upscale, 1050x1080 is trained at 960x960 and not at 1024x1024",
    "kohya-ss/sd-scripts#731",
    "kohya-ss/sd-scripts#2352",
    trainer="reduces the image to the area of the resolution, and rounds both sides down",
    here='the same by default; `no_upscale_fit = "largest"` takes the largest bucket that the image fills',
    command="kohya-bucket simulate 1050x1080 --resolution 1024 --bucket-no-upscale --no-upscale-fit largest",
    origin="the sizes in the reports",
)
@pytest.mark.parametrize("size", ["1050x1080", "3072x3000"])
def test_sizes_that_are_rounded_down(command_line: Command, size: str) -> None:
    given = ("simulate", size, "--resolution", 1024, "--max-bucket-reso", 2048, "--bucket-no-upscale")
    assert "bucket    960x960" in command_line(*given)[1]
    assert "bucket    1024x1024" in command_line(*given, "--no-upscale-fit", "largest")[1]


@reported(
    "which images are dropped because their bucket does not fill a batch?",
    "Nerogar/OneTrainer#573",
    "kohya-ss/sd-scripts#2141",
    "bghira/SimpleTuner#44",
    "kohya-ss/sd-scripts#473",
    trainer="OneTrainer and SimpleTuner leave them out; sd-scripts trains a smaller batch",
    here="each image is trained once; whatever is missed or repeated on request is counted and named",
    command='kohya-bucket plan my.toml, with remainder = "keep", "pad" or "drop"',
    origin="5 and 2 images in batches of 4",
)
@pytest.mark.parametrize(
    ("remainder", "steps", "missed", "repeated"), [("keep", 3, 0, 0), ("pad", 3, 0, 5), ("drop", 2, 1, 0)]
)
def test_images_that_fill_no_batch(
    command_line: Command, remainder: str, steps: int, missed: int, repeated: int
) -> None:
    row = planned(command_line, config(SEVEN, more=f"[kohya_bucket]\nremainder = '{remainder}'"))["gpus"][0]
    assert [row[key] for key in ("steps", "missed", "repeated")] == [steps, missed, repeated]


@reported(
    "more steps than images x repeats / batch size, and max_train_steps of the GUI ends too early",
    "bmaltais/kohya_ss#2965",
    "kohya-ss/musubi-tuner#446",
    "Nerogar/OneTrainer#97",
    "derrian-distro/LoRA_Easy_Training_Scripts#8",
    trainer="each bucket ends in a batch of its own, and the GUI divides all images by the batch size",
    here="the true steps of an epoch and of the whole training, and the epoch in which a limit ends it",
    command="kohya-bucket plan preset.json",
    origin="2 + 1 batches of 5 and 2 images; 7 / 4 x 10 = 17.5",
)
def test_steps_of_a_training(command_line: Command) -> None:
    preset = {"dataset_config": config(SEVEN), "train_batch_size": 4, "epoch": 10, "max_train_steps": 18}
    Path("preset.json").write_text(json.dumps({**preset, "LoRA_type": "Standard"}), encoding="utf-8")
    out = command_line("plan", "preset.json")[1]
    assert "10 epochs = 30 steps; max_train_steps 18 ends with epoch 6" in out


@reported(
    "most regularization images are never used",
    "kohya-ss/sd-scripts#2096",
    trainer="takes as many as there are training samples, from the start of its list, the same in every epoch",
    here="a note with both numbers, and what to raise",
    command="kohya-bucket plan my.toml",
    origin="2 training samples and 5 regularization images",
)
def test_regularization_images(command_line: Command) -> None:
    Path("reg").mkdir()
    for i in range(5):
        Image.new("RGB", (512, 512)).save(f"reg/{i}.png")
    subset = "[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true\nclass_tokens = 'cat'"
    found = planned(command_line, config([(512, 512)] * 2, more=subset))["findings"]
    assert any("the last 3 of 5 regularization images in no epoch" in one["message"] for one in found), found


@reported(
    "several resolutions of one folder make an epoch several times as long",
    "kohya-ss/sd-scripts#2124",
    "ostris/ai-toolkit#247",
    trainer="trains each image at each resolution in every epoch",
    here='`resolution_mode = "rotate"` trains each image at one of them in an epoch, and at another in the next',
    command="kohya-bucket plan my.toml",
    origin="7 images, and not 14 samples",
)
def test_several_resolutions_in_one_epoch(command_line: Command) -> None:
    file = config(SEVEN, more="[kohya_bucket]\nresolutions = [512, 768]\nresolution_mode = 'rotate'")
    assert planned(command_line, file)["gpus"][0]["samples"] == 7
    Path(file).write_text(Path(file).read_text(encoding="utf-8").replace("rotate", "all"), encoding="utf-8")
    assert planned(command_line, file)["gpus"][0]["samples"] == 14
