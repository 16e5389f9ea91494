"""Encoders over diffusers, with small random models."""

import json

import numpy as np
import pytest
import safetensors.torch as safetensors
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from kohya_bucket.errors import KohyaBucketError  # noqa: E402
from kohya_bucket.latents.vae.diffusers_vae import DiffusersEncoder, fitting_dtype, load_encoder  # noqa: E402
from kohya_bucket.latents.vae.encoder import PosteriorEncoder, VAEEncoder, encoder_hash, encoder_space  # noqa: E402
from tests.thinned import one_in  # noqa: E402

pytestmark = pytest.mark.further

torch.set_num_threads(1)
FAMILIES = {"sd": (4, 0.18215, None), "sdxl": (4, 0.13025, None), "sd3": (16, 1.5305, 0.0609),
            "flux": (16, 0.3611, 0.1159)}  # fmt: skip


def model(family="sd", quant=None, **changes):
    channels, scale, shift = FAMILIES[family]
    quant = channels == 4 if quant is None else quant
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(**{
        "block_out_channels": (32, 32, 64, 64), "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4, "norm_num_groups": 32, "layers_per_block": 1,
        "latent_channels": channels, "scaling_factor": scale, "shift_factor": shift,
        "use_quant_conv": quant, "use_post_quant_conv": quant, **changes,
    }).eval()  # fmt: skip


def pixels(n=2, width=64, height=48):
    return torch.rand((n, 3, height, width), generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_is_what_the_model_is(family):
    channels, scale, shift = FAMILIES[family]
    vae = model(family)
    encoder = DiffusersEncoder(model(family))
    assert isinstance(encoder, VAEEncoder)
    assert isinstance(encoder, PosteriorEncoder)
    assert (encoder.downsample_factor, encoder.latent_channels, encoder.scale_factor) == (8, channels, scale)
    with torch.no_grad():
        want = vae.encode(pixels()).latent_dist
    mean, std = encoder.posterior(pixels())
    assert torch.equal(mean, want.mean)
    assert torch.equal(std, want.std)
    assert torch.equal(encoder.encode(pixels()), (want.mean - (shift or 0)) * scale)
    assert encoder_space(encoder).values == "raw"


@pytest.mark.parametrize(
    ("device", "capability", "within_float16", "dtype"),
    [("cpu", None, True, "float32"), ("cuda", (8, 0), False, "bfloat16"), ("cuda:1", (9, 0), True, "bfloat16"),
     ("cuda", (7, 5), True, "float16"), ("cuda", (7, 5), False, "float32"), ("mps", None, False, "bfloat16")],
)  # fmt: skip
def test_the_type_fits_the_device_and_the_model(device, capability, within_float16, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert fitting_dtype(device, within_float16)[0] == dtype


@pytest.mark.parametrize("asked", ["auto", "bfloat16", "float32"])
def test_on_a_cpu_a_vae_computes_in_float32(asked, tmp_path):
    model().save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, device="cpu", dtype=asked)
    assert encoder.dtype == torch.float32
    assert encoder.computes.startswith("float32 (")


@pytest.mark.long
@pytest.mark.parametrize("family", one_in(3, FAMILIES))
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_vae_of_another_family_than_is_named_is_refused(family, architecture, tmp_path):
    model(family).save_pretrained(tmp_path)
    if family == architecture:
        load_encoder(tmp_path, device="cpu", architecture=architecture)
        return
    with pytest.raises(KohyaBucketError, match=rf"is a VAE of {family} .*, or --arch {family}$"):
        load_encoder(tmp_path, device="cpu", architecture=architecture)


def test_a_vae_of_lumina_is_that_of_flux_and_unknown_scales_are_anybodys(tmp_path):
    model("flux").save_pretrained(tmp_path / "flux")
    assert load_encoder(tmp_path / "flux", device="cpu", architecture="lumina").architecture == "lumina"
    model("sd", scaling_factor=0.7).save_pretrained(tmp_path / "own")
    assert load_encoder(tmp_path / "own", device="cpu", architecture="sdxl").scale_factor == 0.7


def test_the_hash_is_of_the_weights_and_not_of_device_or_type():
    assert encoder_hash(DiffusersEncoder(model())) == encoder_hash(DiffusersEncoder(model(), dtype="bfloat16"))
    other = model()
    with torch.no_grad():
        other.encoder.conv_in.bias[0] += 1
    assert encoder_hash(DiffusersEncoder(other)) != encoder_hash(DiffusersEncoder(model()))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types(dtype):
    encoder = DiffusersEncoder(model(), dtype=dtype)
    mean, _ = encoder.posterior(pixels())
    assert mean.dtype == getattr(torch, dtype)
    exact, _ = DiffusersEncoder(model()).posterior(pixels())
    assert (mean.float() - exact).abs().max() < 0.1
    with encoder.in_float32():
        wide, _ = encoder.posterior(pixels())
        assert wide.dtype == torch.float32
    assert encoder.posterior(pixels())[0].dtype == getattr(torch, dtype)


def test_a_folder_a_subfolder_and_a_file_hold_the_same(tmp_path):
    vae = model()
    vae.save_pretrained(tmp_path / "plain")
    vae.save_pretrained(tmp_path / "whole" / "vae")
    state = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    safetensors.save_file(state, tmp_path / "file.safetensors")
    want, _ = DiffusersEncoder(model()).posterior(pixels())
    for name in ("plain", "whole", "file.safetensors"):
        encoder = load_encoder(tmp_path / name, device="cpu", dtype="float32", architecture="sd")
        assert torch.equal(encoder.posterior(pixels())[0], want)
        assert encoder.scale_factor == 0.18215
    assert load_encoder(tmp_path / "plain", device="cpu").architecture == "sd"


def original_naming(vae):
    """The weights as the original checkpoints name them: what diffusers' own conversion reads."""
    names = {}
    for name in vae.state_dict():
        new = name.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
        new = new.replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm").replace("conv_norm_out", "norm_out")
        for theirs, ours in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")):
            new = new.replace(f"mid_block.attentions.0.{ours}.", f"mid.attn_1.{theirs}.")
        new = new.replace("conv_shortcut", "nin_shortcut")
        for i in range(4):
            new = new.replace(f"encoder.down_blocks.{i}.resnets.", f"encoder.down.{i}.block.")
            new = new.replace(f"encoder.down_blocks.{i}.downsamplers.0.", f"encoder.down.{i}.downsample.")
            new = new.replace(f"decoder.up_blocks.{i}.resnets.", f"decoder.up.{3 - i}.block.")
            new = new.replace(f"decoder.up_blocks.{i}.upsamplers.0.", f"decoder.up.{3 - i}.upsample.")
        names[name] = new
    out = {}
    for name, tensor in vae.state_dict().items():
        conv = "attn_1" in names[name] and tensor.ndim == 2
        out[names[name]] = (tensor[:, :, None, None] if conv else tensor).clone().contiguous()
    return out


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_files_in_the_original_naming(tmp_path, family, prefix):
    state = {f"{prefix}{name}": tensor for name, tensor in original_naming(model(family)).items()}
    marks = {"sd": "cond_stage_model.x", "sdxl": "conditioner.embedders.1.x",
             "sd3": "model.diffusion_model.joint_blocks.x",
             "flux": "model.diffusion_model.double_blocks.x"}  # fmt: skip
    if prefix:
        state[marks[family]] = torch.zeros(1)
    safetensors.save_file(state, tmp_path / "a.safetensors")
    encoder = load_encoder(
        tmp_path / "a.safetensors", device="cpu", dtype="float32", architecture="" if prefix else family
    )
    assert encoder.architecture == family
    assert encoder.scale_factor == FAMILIES[family][1]
    want, _ = DiffusersEncoder(model(family)).posterior(pixels())
    torch.testing.assert_close(encoder.posterior(pixels())[0], want)


def test_what_cannot_be_loaded_is_said(tmp_path):
    safetensors.save_file({"x": torch.zeros(1)}, tmp_path / "no.safetensors")
    model().save_pretrained(tmp_path / "plain")
    bare = tmp_path / "plain" / "diffusion_pytorch_model.safetensors"
    (tmp_path / "cut.safetensors").write_bytes(bare.read_bytes()[:1000])
    for name, settings, message in [
        (tmp_path / "nothing.safetensors", {}, "does not exist"),
        (tmp_path / "no.safetensors", {}, "holds no VAE"),
        (tmp_path / "cut.safetensors", {}, "cannot be read"),
        (bare, {}, "add --arch sd or --arch sdxl"),
        (bare, {"architecture": "flux"}, "4 latent channels, but flux has 16"),
        (bare, {"architecture": "sd9"}, "must be one of"),
        (tmp_path / "empty", {}, "no VAE at"),
    ]:
        with pytest.raises(KohyaBucketError, match=message):
            load_encoder(name, device="cpu", **settings)


def nested(folder):
    (folder / "config.json").write_text('{"_class_name": "AutoencoderKL", "x": ' + "[" * 10_000 + "]" * 10_000 + "}")


def configured(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")

    return change


def pickled(folder):
    torch.save(model().state_dict(), folder / "diffusion_pytorch_model.bin")
    (folder / "diffusion_pytorch_model.safetensors").unlink()


def weighted(change):
    def rewrite(folder):
        state = original_naming(model())
        change(state)
        safetensors.save_file(state, folder / "a.safetensors")

    return rewrite


def widened(state):
    for part in ("conv1", "conv2"):
        state[f"encoder.down.0.block.0.{part}.weight"] = torch.zeros(10**9, 0, 3, 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "file", "message"),
    [
        (nested, "", "recursion"),
        (configured(block_out_channels=["a"] * 4), "", "no VAE at"),
        (configured(down_block_types=None), "", "no VAE at"),
        (pickled, "", "safetensors"),
        (pickled, "diffusion_pytorch_model.bin", "can run code when they are read: give it as .safetensors"),
        (weighted(lambda state: state.pop("decoder.conv_out.weight")), "a.safetensors", "no decoder.conv_out.weight"),
        (weighted(lambda state: state.update({"decoder.conv_in.weight": torch.zeros(3)})), "a.safetensors",
         r"its decoder.conv_in.weight has shape \[3\]"),
        (weighted(lambda state: state.update({"encoder.down.0.downsample.conv.weight": torch.zeros(3)})),
         "a.safetensors", "cannot be read as a VAE"),
        (weighted(lambda state: state.update({"encoder.conv_in.weight": torch.zeros(3, dtype=torch.int32)})),
         "a.safetensors", "its encoder.conv_in.weight has shape"),
        (weighted(widened), "a.safetensors", "cannot be read as a VAE"),
    ],
)  # fmt: skip
def test_a_vae_that_cannot_be_is_one_clear_error(tmp_path, make, file, message):
    model().save_pretrained(tmp_path)
    make(tmp_path)
    with pytest.raises(KohyaBucketError, match=message) as raised:
        load_encoder(tmp_path / file, device="cpu", architecture="sd")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1200


@pytest.mark.slow
def test_overflow_in_float16_is_encoded_again(tmp_path):
    from kohya_bucket.latents.vae.encoder import BatchEncoder

    vae = model()
    with torch.no_grad():
        vae.encoder.conv_in.weight *= 3e5
    said = []
    encode = BatchEncoder(DiffusersEncoder(vae, dtype="float16"), "latents", True, said.append)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8))
    done = encode.finish(encode.begin(images, [1, 2, 3], ["a", "b", "c"]))
    assert done.bad == [None] * 3
    assert torch.isfinite(done.plain).all()
    assert len(said) == 3
    assert "a: not finite in float16, encoded again in float32" in said
