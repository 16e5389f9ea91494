"""SD3, Lumina, HunyuanImage and Anima with few random weights, in place of what sd-scripts loads.

Their own classes are built with small numbers. HunyuanImage's transformer has its sizes in its code, so its parts are
put together here; its autoencoder is one convolution. Tokenizers come from the folder that `SMALL_TOKENIZERS` names.
"""

import os
from pathlib import Path

from small_families import WIDTHS, clip, seeded, small_t5

VOCABULARY = 151936  # of the Qwen tokenizer that sd-scripts brings along


def sd3(module):
    from library import sd3_models

    def mmdit(state_dict, dtype, device, *_, **__):
        parameters = sd3_models.SD3Params(
            patch_size=2, depth=2, num_patches=48 * 48, pos_embed_max_size=48, adm_in_channels=sum(WIDTHS),
            qk_norm=None, x_block_self_attn_layers=[], context_embedder_in_features=4096,
            context_embedder_out_features=128, model_type="3-medium",
        )  # fmt: skip
        with seeded():
            model = sd3_models.create_sd3_mmdit(parameters)
            model.pos_embed.zero_()
        return model.to(dtype or next(model.parameters()).dtype)

    def text(width):
        def load(path, dtype, *_, **__):
            with seeded():
                return clip("CLIPTextModelWithProjection", width, 3).to(dtype)

        return load

    def vae(path, dtype, device, *_, **__):
        with seeded():
            model = sd3_models.SDVAE(dtype, device)
            model.encoder = sd3_models.VAEEncoder(ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1, dtype=dtype)
        return model

    module.load_mmdit, module.load_vae = mmdit, vae
    module.load_clip_l, module.load_clip_g = map(text, WIDTHS)
    module.load_t5xxl = lambda _, dtype, *__, **___: small_t5(4096, dtype)  # padded to this width


def lumina(module):
    import small_families
    from library import lumina_models
    from transformers import Gemma2Config, Gemma2Model

    def transformer(path, dtype, *_, **__):
        parameters = lumina_models.LuminaParams(
            in_channels=16, dim=48, n_layers=2, n_heads=2, n_kv_heads=2, axes_dims=[8, 8, 8], axes_lens=[300, 512, 512],
            qk_norm=True, cap_feat_dim=32,
        )  # fmt: skip
        with seeded():
            return lumina_models.NextDiT_2B_GQA_patch2_Adaln_Refiner(parameters).to(dtype)

    def gemma2(path, dtype, *_, **__):
        config = Gemma2Config(
            vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, attn_implementation="eager",
        )  # fmt: skip
        with seeded():
            return Gemma2Model(config).to(dtype)

    module.load_lumina_model, module.load_gemma2 = transformer, gemma2
    module.load_ae = small_families.autoencoder


def gemma_tokenizer(module):
    """The strategy asks the hub by itself: it is given T5's of letters."""
    tokenizers = module.AutoTokenizer

    class Local:
        @staticmethod
        def from_pretrained(*_, **__):
            return tokenizers.from_pretrained(Path(os.environ["SMALL_TOKENIZERS"], "google_t5-v1_1-xxl"))

    module.AutoTokenizer = Local


def tokenizers(module):
    """Trainers that pass no `--tokenizer_cache_dir` on find the tokenizers too."""
    load = module.TokenizeStrategy._load_tokenizer

    def from_here(self, *args, tokenizer_cache_dir=None, **more):
        folder = tokenizer_cache_dir or os.environ.get("SMALL_TOKENIZERS")
        return load(self, *args, tokenizer_cache_dir=folder, **more)

    module.TokenizeStrategy._load_tokenizer = from_here


def anima(module):
    import torch
    from library import anima_models
    from transformers import Qwen3Config, Qwen3Model

    adapter = anima_models.LLMAdapter
    anima_models.LLMAdapter = lambda **_: adapter(64, 64, 64, num_layers=1, self_attn=True)  # its sizes are in the code

    def transformer(device, path, attn_mode, split_attn, loading_device, dit_weight_dtype=None, *_, **__):
        with seeded():
            return anima_models.Anima(
                max_img_h=512, max_img_w=512, max_frames=8, in_channels=16, out_channels=16, patch_spatial=2,
                patch_temporal=1, model_channels=48, num_blocks=2, num_heads=2, crossattn_emb_channels=64,
                pos_emb_cls="rope3d", pos_emb_learnable=True, use_adaln_lora=True, adaln_lora_dim=8,
                rope_enable_fps_modulation=False, use_llm_adapter=True, attn_mode=attn_mode, split_attn=split_attn,
            ).to(dit_weight_dtype or torch.float32)  # fmt: skip

    def qwen3(path, dtype, device, *_, **__):
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, use_cache=False,
        )  # fmt: skip
        with seeded():
            model = Qwen3Model(config).requires_grad_(False).to(device, dtype=dtype)
        return model, module.load_qwen3_tokenizer(path)

    module.load_anima_model, module.load_qwen3_text_encoder = transformer, qwen3


def qwen_image_vae(module):
    def load(*_, **__):
        with seeded():
            return module.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1)

    module.load_vae = load


def hunyuan_image(module):
    import torch
    from library import hunyuan_image_modules as parts

    class Small(module.HYImageDiffusionTransformer):
        def __init__(self, attn_mode, split_attn):
            torch.nn.Module.__init__(self)
            self.patch_size, self.in_channels, self.out_channels, self.unpatchify_channels = [1, 1], 64, 64, 64
            self.hidden_size, self.heads_num, self.rope_dim_list, self.rope_theta = 64, 2, [16, 16], 256
            self.attn_mode, self.split_attn = attn_mode, split_attn
            self.byt5_in = parts.ByT5Mapper(in_dim=1472, out_dim=32, hidden_dim=32, out_dim1=64, use_residual=False)
            self.img_in = parts.PatchEmbed2D(self.patch_size, 64, 64)
            self.txt_in = parts.SingleTokenRefiner(32, 64, 2, depth=1)
            self.time_in = parts.TimestepEmbedder(64, torch.nn.SiLU)
            kinds = {"mlp_width_ratio": 2, "mlp_act_type": "gelu_tanh", "qk_norm": True, "qk_norm_type": "rms"}
            double = parts.MMDoubleStreamBlock(64, 2, **kinds, qkv_bias=True)
            self.double_blocks = torch.nn.ModuleList([double])
            self.single_blocks = torch.nn.ModuleList([parts.MMSingleStreamBlock(64, 2, **kinds)])
            self.final_layer = parts.FinalLayer(64, self.patch_size, 64, torch.nn.SiLU)
            self.gradient_checkpointing, self.blocks_to_swap = False, None

        def forward(self, latents, timestep, *texts, **more):
            kind = self.img_in.proj.weight.dtype  # on CPUs autocast leaves the norms alone
            texts = [text.to(kind) if text.is_floating_point() else text for text in texts]
            return super().forward(latents, timestep, *texts, **more)

    def load(device, path, attn_mode, split_attn, loading_device, dtype, *_, **__):
        with seeded():
            return Small(attn_mode, split_attn).to(dtype)

    module.load_hunyuan_image_model = load


def hunyuan_text(module):
    import torch
    from transformers import Qwen2Config, Qwen2Model

    def qwen(path, dtype=torch.bfloat16, device="cpu", **_):
        config = Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1,
        )  # fmt: skip
        with seeded():
            return None, Qwen2Model(config).to(dtype)

    module.load_qwen2_5_vl = qwen
    module.load_byt5 = lambda _, dtype, *__, **___: (None, small_t5(1472, dtype))


def hunyuan_vae(module):
    import torch

    class Drawn:
        def __init__(self, values):
            self.sample = lambda: values

    class Vae(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 64, 32, stride=32)

        device = property(lambda self: self.conv.weight.device)
        dtype = property(lambda self: self.conv.weight.dtype)

        def encode(self, images):
            return Drawn(self.conv(images))

    def load(*_, **__):
        with seeded():
            return Vae()

    module.load_vae = load


AFTER_IMPORT = {
    "library.sd3_utils": sd3,
    "library.lumina_util": lumina,
    "library.strategy_lumina": gemma_tokenizer,
    "library.strategy_base": tokenizers,
    "library.anima_utils": anima,
    "library.qwen_image_autoencoder_kl": qwen_image_vae,
    "library.hunyuan_image_models": hunyuan_image,
    "library.hunyuan_image_text_encoder": hunyuan_text,
    "library.hunyuan_image_vae": hunyuan_vae,
}
