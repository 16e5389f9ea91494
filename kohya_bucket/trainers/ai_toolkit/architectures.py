"""In which steps ai-toolkit makes the buckets of each model: `get_bucket_divisibility` of its classes at 27a03a91."""

from __future__ import annotations

_STEPS = {
    8: "cogview4",
    16: "sd1 sd2 sdxl vega ssd pixart pixart_sigma auraflow lumina2 flex2 flux2 flux2_klein_4b flux2_klein_9b "
        "flux_kontext wan21 wan21_i2v wan22_14b wan22_14b_i2v hidream hidream_e1 omnigen2 f-lite krea2 ideogram4 "
        "boogu_image boogu_image_edit prx_pixel zimage zimage_l2p mageflow mageflow_edit",
    32: "sd3 flux flex1 chroma chroma_radiance hidream_o1 ltx2 ltx2.3 ltx2.5 nucleus_image wan22_5b anima minimax_h3 "
        "minimax_h3_ref2va zeta_chroma ernie_image qwen_image qwen_image_edit qwen_image_edit_plus",
}  # fmt: skip
STEPS = {arch: step for step, names in _STEPS.items() for arch in names.split()}
"""{architecture: what every side of a bucket is a multiple of, in pixels}."""
