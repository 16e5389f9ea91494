"""Qwen-Image's VAE with 2D convolutions for single frames computes what it computes with its own."""

import copy

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from kohya_bucket.latents.fingerprint import module_hash  # noqa: E402
from kohya_bucket.latents.vae.diffusers_vae import QwenImageEncoder  # noqa: E402
from kohya_bucket.latents.vae.single_frames import fold_single_frames  # noqa: E402
from kohya_bucket.trainers.ai_toolkit.seams import fold_vae_of_images  # noqa: E402

if not hasattr(diffusers, "AutoencoderKLQwenImage"):
    pytest.skip("this diffusers has no AutoencoderKLQwenImage", allow_module_level=True)


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=16, num_res_blocks=1).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn(parameter.shape)
    return model


def encoded(model, pixels):
    with torch.inference_mode():
        return model.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0].float()


def distance(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_it_computes_what_the_3d_convolutions_do(vae, dtype, rounding):
    """In bfloat16 it is no further from float32 than they are."""
    model = copy.deepcopy(vae).to(getattr(torch, dtype))
    pixels = torch.rand(2, 3, 64, 48) * 2 - 1
    exact, before = encoded(vae, pixels), encoded(model, pixels.to(model.dtype))
    hashed = module_hash(model)
    assert fold_single_frames(model) > 10
    folded = encoded(model, pixels.to(model.dtype))
    assert module_hash(model) == hashed
    assert distance(folded, before) < rounding
    assert distance(folded, exact) < 1.2 * distance(before, exact) + 1e-5


def test_several_frames_are_computed_as_before(vae):
    model = copy.deepcopy(vae)
    clip = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    with torch.inference_mode():
        before = model.encode(clip).latent_dist.mode()
        fold_single_frames(model)
        after = model.encode(clip).latent_dist.mode()
    assert distance(after, before) < 1e-5  # the first frame is alone


def test_folding_again_changes_nothing(vae):
    model = copy.deepcopy(vae)
    found = fold_single_frames(model)
    forwards = [module.forward for module in model.modules() if "forward" in vars(module)]
    assert fold_single_frames(model) == found == len(forwards)
    assert [module.forward for module in model.modules() if "forward" in vars(module)] == forwards


def test_behind_ai_toolkit_images_are_encoded_in_2d_by_this_class_alone(vae):
    model, pixels = copy.deepcopy(vae), torch.rand(2, 3, 64, 48) * 2 - 1

    class Other(type(vae)):
        pass

    other = copy.deepcopy(vae)
    other.__class__ = Other
    for one in (model, other, None, torch.nn.Linear(1, 1)):
        fold_vae_of_images(one)
    assert any("forward" in vars(module) for module in model.modules())
    assert distance(encoded(model, pixels), encoded(vae, pixels)) < 1e-5
    assert not any("forward" in vars(module) for module in other.modules())


def test_the_encoder_is_folded_and_follows_its_weights(vae):
    encoder = QwenImageEncoder(copy.deepcopy(vae), dtype="bfloat16", architecture="anima")
    pixels = torch.rand(2, 3, 64, 48) * 2 - 1
    mean, std = (torch.tensor(values)[:, None, None] for values in (vae.config.latents_mean, vae.config.latents_std))
    exact = (encoded(vae, pixels) - mean) / std
    assert distance(encoder.encode(pixels).float(), exact) < 2e-2
    with encoder.in_float32():
        rounded = copy.deepcopy(vae).bfloat16().float()
        assert distance(encoder.encode(pixels), (encoded(rounded, pixels) - mean) / std) < 1e-5
