"""SDXL, FLUX and Chroma by the real trainers: the same weights, wherever text-encoder outputs are kept."""

import pytest
from sdscripts_support import random_sizes, write_images
from training_runs import train, write_config

pytestmark = pytest.mark.slow

AHEAD = ("-m", "kohya_bucket.precompute", "--text")
STEPS = 6
SDXL = ["--network_module", "networks.lora"]
FLUX = ["--network_module", "networks.lora_flux", "--t5xxl_max_token_length", 256, "--guidance_scale", 1.0]
FLUX += ["--timestep_sampling", "shift", "--model_prediction_type", "raw", "--loss_type", "l2"]
FLUX += [part for name in ("clip_l", "t5xxl", "ae") for part in (f"--{name}", f"{name}.safetensors")]
RUNS = {
    "sdxl": ("sdxl_train_network.py", SDXL),
    "flux": ("flux_train_network.py", FLUX),
    "flux, mask": ("flux_train_network.py", [*FLUX, "--apply_t5_attn_mask"]),
    "chroma": ("flux_train_network.py", [*FLUX, "--apply_t5_attn_mask", "--model_type", "chroma"]),
}


@pytest.fixture
def data(unpatched, tmp_path):
    write_images(tmp_path / "images", random_sizes(5, 1, 100, 200))
    return tmp_path / "images"


class Trainings:
    """Runs of one trainer that differ in where text-encoder outputs are kept."""

    def __init__(self, checkout, data, tmp_path, family):
        self.checkout, self.data, self.folder = checkout, data, tmp_path
        self.trainer, self.options = RUNS[family]

    def __call__(self, name, *more, **keywords):
        config = write_config(self.folder, self.data, "", subset="")
        options = ["--network_train_unet_only", "--cache_text_encoder_outputs", "--cache_latents", "--seed", 7]
        options += ["--mixed_precision", "bf16", "--max_train_steps", STEPS, *self.options, *more]
        return train(self.checkout, config, *options, out=self.folder / name, trainer=self.trainer, **keywords)

    def npz(self, name, *more, **keywords):
        return self(name, "--cache_text_encoder_outputs_to_disk", *more, **keywords)

    def written(self):
        found = {path: path.stat().st_mtime_ns for path in self.data.glob("*_te*.npz")}
        assert len(found) == 5
        return found


@pytest.mark.training_run("SDXL and FLUX, text-encoder outputs in npz and in memory")
@pytest.mark.parametrize("family", RUNS)
def test_the_same_weights_from_npz_and_from_memory(sd_scripts_dir, data, tmp_path, family):
    training = Trainings(sd_scripts_dir, data, tmp_path, family)
    memory = training("memory")
    npz = training.npz("npz")
    written = training.written()
    again = training.npz("again")  # encodes nothing
    assert training.written() == written
    for run in (memory, npz, again):
        run.assert_trained(STEPS)
        assert run.tensors == memory.tensors
    next(data.glob("*.txt")).write_text("one other caption", encoding="utf-8")
    assert training("other").tensors != memory.tensors


@pytest.mark.training_run("SDXL and FLUX, captions encoded by `precompute --text`")
@pytest.mark.parametrize("family", ["sdxl", "flux, mask"])
def test_precompute_encodes_what_the_training_looks_for(sd_scripts_dir, data, tmp_path, family):
    training = Trainings(sd_scripts_dir, data, tmp_path, family)
    for name, encoded in (("ahead", 5), ("ahead again", 0)):
        run = training.npz(name, door=AHEAD)
        assert run.status == 0, run.log[-3000:]
        assert f"5 captions cached, {encoded} of them encoded by this process" in run.log
        assert run.batches == []
        assert not run.weights.exists()
    written = training.written()
    run = training.npz("npz")
    run.assert_trained(STEPS)
    assert training.written() == written


def test_precompute_of_a_run_that_keeps_nothing_on_disk(sd_scripts_dir, data, tmp_path):
    run = Trainings(sd_scripts_dir, data, tmp_path, "sdxl")("out", door=AHEAD)
    assert run.status == 2
    assert "precompute --text: this run caches no text-encoder outputs on disk" in run.log
    assert "Traceback" not in run.log


@pytest.mark.training_run("SDXL and FLUX, captions encoded by `precompute --text`")
def test_precompute_by_two_processes(sd_scripts_dir, data, tmp_path):
    training = Trainings(sd_scripts_dir, data, tmp_path, "sdxl")
    run = training.npz("ahead", door=AHEAD, ranks=2)
    assert run.status == 0, run.log[-3000:]
    written = training.written()
    training.npz("npz").assert_trained(STEPS)
    assert training.written() == written
