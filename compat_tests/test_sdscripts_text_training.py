"""SDXL and FLUX trained by the real trainers, text-encoder outputs in npz, in shards and in memory: the same weights."""

import pytest
from sdscripts_support import random_sizes, write_images
from training_runs import train, write_config

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytestmark = pytest.mark.slow

STEPS = 6
SDXL = ["--network_module", "networks.lora"]
FLUX = ["--network_module", "networks.lora_flux", "--t5xxl_max_token_length", 256, "--guidance_scale", 1.0]
FLUX += ["--timestep_sampling", "shift", "--model_prediction_type", "raw", "--loss_type", "l2"]
FLUX += [part for name in ("clip_l", "t5xxl", "ae") for part in (f"--{name}", f"{name}.safetensors")]
RUNS = {
    "sdxl": ("sdxl_train_network.py", SDXL),
    "flux": ("flux_train_network.py", FLUX),
    "flux, mask": ("flux_train_network.py", [*FLUX, "--apply_t5_attn_mask"]),
}


@pytest.fixture
def data(unpatched, tmp_path):
    if not hasattr(unpatched.train_util.BaseDataset, "new_cache_text_encoder_outputs"):
        pytest.skip("this version has no strategies of caching text-encoder outputs")
    write_images(tmp_path / "images", random_sizes(5, 1, 100, 200))
    return tmp_path / "images"


class Trainings:
    """Runs of one trainer that differ in where text-encoder outputs are kept."""

    def __init__(self, checkout, data, tmp_path, family):
        self.checkout, self.data, self.folder = checkout, data, tmp_path
        self.trainer, self.options = RUNS[family]

    def __call__(self, name, *more, table="", **keywords):
        config = write_config(self.folder, self.data, table, subset="")
        options = ["--network_train_unet_only", "--cache_text_encoder_outputs", "--cache_latents", "--seed", 7]
        options += ["--mixed_precision", "bf16", "--max_train_steps", STEPS, *self.options, *more]
        return train(self.checkout, config, *options, out=self.folder / name, trainer=self.trainer, **keywords)

    def shards(self, name, *more, **keywords):
        table = f"[kohya_bucket]\ntext_cache = 'shards'\nlatent_cache_dir = '{self.folder / 'store'}'"
        return self(name, "--cache_text_encoder_outputs_to_disk", *more, table=table, **keywords)


@pytest.mark.training_run("SDXL and FLUX, text-encoder outputs in npz, in shards and in memory")
@pytest.mark.parametrize("family", RUNS)
def test_the_same_weights_from_npz_from_shards_and_from_memory(sd_scripts_dir, data, tmp_path, family):
    training = Trainings(sd_scripts_dir, data, tmp_path, family)
    memory = training("memory")
    npz = training("npz", "--cache_text_encoder_outputs_to_disk")
    assert len(list(data.glob("*_te*.npz"))) == 5
    stored = training.shards("shards")
    files = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*.safetensors")}
    assert files
    again = training.shards("again")  # encodes nothing
    assert {path: path.read_bytes() for path in (tmp_path / "store").rglob("*.safetensors")} == files
    for run in (memory, npz, stored, again):
        run.assert_trained(STEPS)
        assert run.tensors == memory.tensors
    next(data.glob("*.txt")).write_text("one other caption", encoding="utf-8")
    assert training("other").tensors != memory.tensors
