"""The autoencoders of Anima (Qwen-Image's) and HunyuanImage, with small random models, in both kinds of names."""

import re
from types import SimpleNamespace

import pytest
import safetensors.torch as safetensors
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
if not hasattr(diffusers, "AutoencoderKLQwenImage") or not hasattr(diffusers, "AutoencoderKLHunyuanImage"):
    pytest.skip(f"diffusers {diffusers.__version__} has not these autoencoders", allow_module_level=True)

from kohya_bucket.errors import KohyaBucketError  # noqa: E402
from kohya_bucket.latents.encode.precompute import precompute_latents  # noqa: E402
from kohya_bucket.latents.vae.diffusers_vae import (  # noqa: E402
    QwenImageEncoder,
    load_encoder,
    vae_from_single_file,
)
from kohya_bucket.latents.vae.encoder import PosteriorEncoder, VAEEncoder, encoder_hash, encoder_space  # noqa: E402
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES  # noqa: E402
from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles  # noqa: E402
from kohya_bucket.trainers.sdscripts.npz.names import npz_path  # noqa: E402
from kohya_bucket.trainers.sdscripts.npz.read_write import read_npz  # noqa: E402
from tests.latents.stub_encoders import dataset_of, make_images  # noqa: E402

pytestmark = pytest.mark.further

torch.set_num_threads(1)


def qwen():
    torch.manual_seed(0)
    return diffusers.AutoencoderKLQwenImage(base_dim=8).eval()


def hunyuan():
    torch.manual_seed(0)
    return diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=64, block_out_channels=(32, 32, 64, 64, 128, 128),
        layers_per_block=2, spatial_compression_ratio=32, sample_size=384, scaling_factor=0.75289,
    ).eval()  # fmt: skip


MODELS = {"anima": qwen, "hunyuan_image": hunyuan}


def pixels(width=128, height=64):
    return torch.rand((2, 3, height, width), generator=torch.Generator().manual_seed(1)) * 2 - 1


def original_name(family, name):
    """A weight's name in files that other programs read."""
    if family == "hunyuan_image":
        for side, way, layers in (("encoder", "down", 2), ("decoder", "up", 3)):
            if found := re.match(rf"{side}\.{way}_blocks\.(\d+)\.(.*)", name):
                level, place = divmod(int(found[1]), layers + 1)
                rest = found[2].replace("conv_shortcut", "nin_shortcut")
                inner = f"block.{place}" if place < layers else f"{way}sample"
                return f"{side}.{way}.{level}.{inner}.{rest}"
        for ours, theirs in (("resnets.0", "block_1"), ("resnets.1", "block_2"), ("attentions.0", "attn_1"),
                             ("mid_block", "mid"), ("to_", ""), ("1.proj.", "1.proj_out.")):  # fmt: skip
            name = name.replace(ours, theirs)
        return name
    if found := re.match(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.*)", name):
        place = int(found[3]) + (3 if found[2] == "upsamplers" else 0)
        name = f"decoder.upsamples.{4 * int(found[1]) + place}.{found[4]}"
    name = name.replace("down_blocks", "downsamples").replace("mid_block.attentions.0", "middle.1")
    name = name.replace("mid_block.resnets.0", "middle.0").replace("mid_block.resnets.1", "middle.2")
    for ours, theirs in (("post_quant_conv", "conv2"), ("quant_conv", "conv1")):
        name = name.replace(ours, theirs)
    for ours, theirs in (("norm1", "residual.0"), ("conv1", "residual.2"), ("norm2", "residual.3"),
                         ("conv2", "residual.6")):  # fmt: skip
        name = re.sub(rf"((?:samples|middle)\.\d+)\.{ours}\.", rf"\1.{theirs}.", name)
    return (
        name.replace("conv_shortcut", "shortcut").replace("conv_in", "conv1").replace("norm_out", "head.0")
        .replace("conv_out", "head.2")
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("family", MODELS)
def test_a_folder_and_files_with_both_kinds_of_names_hold_the_same(tmp_path, family):
    vae = MODELS[family]()
    vae.save_pretrained(tmp_path / "folder")
    state = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    safetensors.save_file(state, tmp_path / "plain.safetensors")
    other = {original_name(family, name): tensor for name, tensor in state.items()}
    assert len(other) == len(state)
    assert not other.keys() & {name for name in state if "_blocks" in name}
    safetensors.save_file(other, tmp_path / "original.safetensors")
    settings = {"device": "cpu", "dtype": "float32"}
    encoders = [load_encoder(tmp_path / n, **settings) for n in ("folder", "plain.safetensors", "original.safetensors")]
    for encoder in encoders:
        assert encoder.architecture == family
        assert isinstance(encoder, VAEEncoder)
        assert torch.equal(encoder.encode(pixels()), encoders[0].encode(pixels()))
        assert encoder_hash(encoder) == encoder_hash(encoders[0])
        arch = ARCHITECTURES[family]
        assert (encoder.latent_channels, encoder.downsample_factor) == (arch.channels, arch.stride)
        assert encoder_space(encoder).scale_factor == arch.scale_factor


def test_animas_latents_are_normalized_by_channel():
    vae, encoder = qwen(), QwenImageEncoder(qwen(), architecture="anima")
    assert not isinstance(encoder, PosteriorEncoder)
    assert encoder_space(encoder).values == "scaled"
    with torch.no_grad():
        mean = vae.encode(pixels()[:, :, None]).latent_dist.mean[:, :, 0]
    by_channel = [torch.tensor(v).view(1, 16, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)]
    torch.testing.assert_close(encoder.encode(pixels()), (mean - by_channel[0]) / by_channel[1])


@pytest.mark.long
@pytest.mark.parametrize("family", MODELS)
def test_they_are_precomputed_as_npz(tmp_path, family):
    images = make_images(tmp_path / "images", [(128, 64), (64, 128), (96, 96)])
    dataset = dataset_of(images, area=(96, 96), reso_steps=32)
    MODELS[family]().save_pretrained(tmp_path / "vae")
    encoder = load_encoder(tmp_path / "vae", device="cpu", dtype="float32")
    report = precompute_latents(dataset, encoder, NpzFiles(), flip=True)
    assert (report.encoded, report.failed) == (3, [])
    arch = ARCHITECTURES[family]
    for i, image in enumerate(images):
        size, bucket = (tuple(map(int, a[i])) for a in (dataset.sizes, dataset.placement.bucket_sizes))
        found = read_npz(npz_path(image, size, arch), bucket, arch)
        assert found.latents.shape == found.flipped.shape == arch.shape(bucket)
        assert abs(found.latents).max() > 0
    assert precompute_latents(dataset, encoder, NpzFiles(), flip=True).current == 3


def test_another_family_and_an_older_diffusers_are_said(tmp_path):
    safetensors.save_file(qwen().state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(KohyaBucketError, match=r"is the VAE of anima \(AutoencoderKLQwenImage\), not of sdxl"):
        load_encoder(tmp_path / "a.safetensors", architecture="sdxl")
    with pytest.raises(KohyaBucketError, match=r"diffusers 0\.30 has no AutoencoderKLQwenImage: install a newer one"):
        vae_from_single_file(SimpleNamespace(__version__="0.30"), tmp_path / "a.safetensors", "")
