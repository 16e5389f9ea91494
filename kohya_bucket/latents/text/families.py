"""The model families whose text-encoder outputs sd-scripts caches, and the files that it keeps them in.

Source: the `TextEncoderOutputsCachingStrategy` classes of kohya-ss/sd-scripts 0.10 to 0.11.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TEXT_FAMILIES", "TextFamily", "collection_of_file"]


@dataclass(frozen=True)
class TextFamily:
    """How sd-scripts caches one family's outputs.

    Attributes:
        name: its name here and in `--arch`.
        suffix: what stands in place of an image's ending.
        arrays: names of the arrays that its files must have.
    """

    name: str
    suffix: str
    arrays: tuple[str, ...]


TEXT_FAMILIES = {
    family.name: family
    for family in (
        TextFamily("sdxl", "_te_outputs.npz", ("hidden_state1", "hidden_state2", "pool2")),
        TextFamily("sd3", "_sd3_te.npz", ("lg_out", "lg_pooled", "t5_out", "clip_l_attn_mask", "clip_g_attn_mask",
                                          "t5_attn_mask", "apply_lg_attn_mask", "apply_t5_attn_mask")),
        TextFamily("flux", "_flux_te.npz", ("l_pooled", "t5_out", "txt_ids", "t5_attn_mask", "apply_t5_attn_mask")),
        TextFamily("lumina", "_lumina_te.npz", ("hidden_state", "attention_mask", "input_ids")),
        TextFamily("hunyuan_image", "_hi_te.npz", ("vlm_embed", "vlm_mask", "byt5_embed", "byt5_mask", "ocr_mask")),
        TextFamily("anima", "_anima_te.npz", ("prompt_embeds", "attn_mask", "t5_input_ids", "t5_attn_mask",
                                              "caption_dropout_rate")),
    )
}  # fmt: skip


def collection_of_file(suffix: str) -> str:
    """The family whose files end so; of one that is not known, the ending itself."""
    return next((family.name for family in TEXT_FAMILIES.values() if family.suffix == suffix), suffix)
