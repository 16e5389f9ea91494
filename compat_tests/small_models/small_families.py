"""SDXL, FLUX and Chroma with few random weights, in place of what sd-scripts loads; the same in every process.

FLUX's and Chroma's own classes are built with small numbers. SDXL's UNet has its sizes in its code, so its constants
are replaced, and its attention takes narrower captions.
"""

import contextlib

CLIP = {
    "vocab_size": 256, "intermediate_size": 32, "num_attention_heads": 2, "bos_token_id": 254, "eos_token_id": 255,
    "pad_token_id": 255,
}  # fmt: skip
WIDTHS = 32, 16  # of SDXL's two text encoders; FLUX's CLIP has the latter, its T5 the former


@contextlib.contextmanager
def seeded():
    import torch

    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.random.set_rng_state(state)


def clip(kind, width, layers):
    import transformers

    sizes = {"hidden_size": width, "projection_dim": width, "num_hidden_layers": layers}
    return as_sdscripts_has_it(getattr(transformers, kind)(transformers.CLIPTextConfig(**CLIP, **sizes)))


def as_sdscripts_has_it(model):
    """sd-scripts since 0.12 puts newer transformers' CLIP back under the name that it had."""
    try:
        from library.clip_text_model import wrap_clip_text_model
    except ImportError:
        return model
    return wrap_clip_text_model(model)


def sdxl_unet(module):
    module.MODEL_CHANNELS, module.TIME_EMBED_DIM, module.ADM_IN_CHANNELS = 32, 128, WIDTHS[1] + 6 * 256
    attention = module.Transformer2DModel
    build = attention.__init__

    def small(self, *args, num_transformer_layers=1, cross_attention_dim=None, **kwargs):
        build(self, *args, num_transformer_layers=1, cross_attention_dim=sum(WIDTHS), **kwargs)

    attention.__init__ = small


def sdxl_checkpoint(module):
    def load(*_, **__):
        """(text encoders, VAE, UNet, logit scale, epoch and step)."""
        from diffusers import AutoencoderKL
        from library import sdxl_original_unet

        with seeded():
            encoders = clip("CLIPTextModel", WIDTHS[0], 12), clip("CLIPTextModelWithProjection", WIDTHS[1], 2)
            vae = AutoencoderKL(
                down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
                block_out_channels=[8] * 4, norm_num_groups=2, latent_channels=4,
            )  # fmt: skip
            unet = sdxl_original_unet.SdxlUNet2DConditionModel()
        return (*encoders, vae, unet, None, None)

    module.load_models_from_sdxl_checkpoint = load
    module.save_stable_diffusion_checkpoint = lambda *_, **__: 0  # there is no whole checkpoint to put it in


def chroma(dtype):
    from library import chroma_models

    parameters = chroma_models.ChromaParams(
        in_channels=64, context_in_dim=WIDTHS[0], hidden_size=32, mlp_ratio=2.0, num_heads=2, depth=2,
        depth_single_blocks=2, axes_dim=[4, 6, 6], theta=10_000, qkv_bias=True, guidance_embed=True,
        approximator_in_dim=16, approximator_depth=1, approximator_hidden_size=16, _use_compiled=False,
    )  # fmt: skip
    with seeded():
        return chroma_models.Chroma(parameters).to(dtype)


def autoencoder(_, dtype, *__, **___):
    """FLUX's and Lumina's."""
    from library import flux_models

    parameters = flux_models.AutoEncoderParams(
        resolution=256, in_channels=3, ch=32, out_ch=3, ch_mult=[1, 1, 1, 1], num_res_blocks=1, z_channels=16,
        scale_factor=0.3611, shift_factor=0.1159,
    )  # fmt: skip
    with seeded():
        return flux_models.AutoEncoder(parameters).to(dtype)


def small_t5(width, dtype):
    from transformers import T5Config, T5EncoderModel

    with seeded():
        sizes = {"d_model": width, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        return T5EncoderModel(T5Config(vocab_size=512, **sizes)).to(dtype)


def flux(module):
    from library import flux_models

    parameters = flux_models.FluxParams(
        in_channels=64, vec_in_dim=WIDTHS[1], context_in_dim=WIDTHS[0], hidden_size=32, mlp_ratio=2.0, num_heads=2,
        depth=2, depth_single_blocks=2, axes_dim=[4, 6, 6], theta=10_000, qkv_bias=True, guidance_embed=True,
    )  # fmt: skip

    def flow(_, dtype, *__, model_type="flux", **___):
        if model_type == "chroma":
            return False, chroma(dtype)
        with seeded():
            return False, flux_models.Flux(parameters).to(dtype)

    def controlnet(path, is_schnell, dtype, *_, **__):
        with seeded():
            return flux_models.ControlNetFlux(parameters).to(dtype)

    def clip_l(_, dtype, *__, **___):
        with seeded():
            return clip("CLIPTextModel", WIDTHS[1], 2).to(dtype)

    module.analyze_checkpoint_state = lambda path: (False, False, (2, 2), [path])
    module.load_flow_model, module.load_ae, module.load_clip_l = flow, autoencoder, clip_l
    module.load_t5xxl = lambda _, dtype, *__, **___: small_t5(WIDTHS[0], dtype)
    module.load_controlnet = controlnet


AFTER_IMPORT = {
    "library.sdxl_original_unet": sdxl_unet,
    "library.sdxl_model_util": sdxl_checkpoint,
    "library.flux_utils": flux,
}
