"""Z-Image from pictures to a LoRA: cached and trained through the door, changed, cached and trained again."""

import pytest
from musubi_caching_cases import DOOR, Case, play
from musubi_support import counted, run, train, trains_z_image

pytestmark = pytest.mark.slow
COUNT = 5


@pytest.mark.training_run("zimage_train_network.py, from caches that were made through the door and changed")
def test_cached_trained_changed_and_trained_again(musubi_source, tmp_path):
    if not trains_z_image(musubi_source):
        pytest.skip("this version does not train Z-Image")
    case = Case(tmp_path / "data", "zi")
    for i in range(COUNT):
        case.image(f"a{i}.png", i, (160, 112) if i % 2 else (128, 128))
    case.dataset()
    case.both()

    def cached():
        return play(musubi_source, tmp_path, {"steps": case}, DOOR)["steps"]

    def trained(name):
        steps, log = train(musubi_source, tmp_path, case.config, name, "--max_train_epochs", 1)
        return dict(counted(steps)), {tuple(step[0]["size"]) for step in steps}, log

    assert all("error" not in result and "exit" not in result for result in cached())
    items, sizes, _ = trained("first")
    assert items == dict.fromkeys(range(COUNT), 1)

    case.steps.clear()
    case.image("a1.png", 101, (160, 112))
    case.caption("a2.png", 102)
    case.do("remove", case.folder / "im" / "a4.png")
    cached()
    spec = {"program": "zimage_train_network", "train": training_arguments(tmp_path, case.config)}
    said = run(musubi_source, tmp_path, spec, code=2)
    (line,) = [line for line in said.splitlines() if line.startswith("kohya_bucket: ")]
    assert "2 of 4 items" in line
    assert "a1.png (latents: the image changed" in line
    assert "a2.png (text: the caption changed)" in line
    assert "Traceback" not in said

    case.steps.clear()
    case.both("--keep_cache")
    latents, text = cached()
    assert "4 items: 3 current, 1 made" in latents["log"]
    assert "4 captions: 2 current, 2 made" in text["log"]
    items, same, log = trained("second")
    assert items == dict.fromkeys([0, 2, 3, 101], 1)
    assert same == sizes
    assert "because the config does not ask for it: 2 files (a4_0128x0128_zi.safetensors, a4_zi_te.safetensors)" in log

    case.steps.clear()
    case.dataset((256, 256))
    case.both("--skip_existing")
    cached()
    items, larger, _ = trained("third")
    assert items == dict.fromkeys([0, 2, 3, 101], 1)
    assert (16, 16) in sizes
    assert (32, 32) in larger
    assert not larger & sizes


TRAINERS = {
    "wan": ("wan", ("--task", "t2v-1.3B")),
    "qwen_image": ("qi", ("--mixed_precision", "bf16")),
    "flux_kontext": ("fk", ()),
}
KIND = "{}_train_network.py, cached"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.training_run(KIND.format(name))) for name in TRAINERS]
)
def test_an_epoch_from_caches(musubi_source, tmp_path, name):
    """Every item once, in batches of one size each."""
    family, options = TRAINERS[name]
    case = Case(tmp_path / "data", family)
    for i in range(COUNT):
        size = (160, 112) if i % 2 else (128, 128)
        case.image(f"a{i}.png", i, size)
        case.do("picture", case.folder / "control" / f"a{i}.png", 50 + i, *size)
    case.dataset(**({"control_directory": str(case.folder / "control")} if family == "fk" else {}))
    case.both()
    cached = play(musubi_source, tmp_path, {"steps": case}, DOOR)["steps"]
    assert all("error" not in result and "exit" not in result for result in cached), cached
    steps, log = train(
        musubi_source,
        tmp_path,
        case.config,
        "epoch",
        "--max_train_epochs",
        1,
        *options,
        program=f"{name}_train_network",
    )
    assert counted(steps) == dict.fromkeys(range(COUNT), 1)
    assert {tuple(row["size"]) for step in steps for row in step} == {(16, 16), (14, 18)}
    assert f"epoch 1: {COUNT} images, 0 missed, 0 repeated" in log


def training_arguments(folder, config):
    arguments = ["--dit", folder / "dit.safetensors", "--dataset_config", config, "--output_dir", folder / "none"]
    arguments += ["--output_name", "model", "--network_module", "musubi_tuner.networks.lora_zimage", "--sdpa"]
    arguments += ["--mixed_precision", "no", "--timestep_sampling", "sigmoid", "--max_train_epochs", 1]
    return [str(argument) for argument in arguments]
