"""Draws the figures of docs/rules.md into this folder: python docs/figures/draw.py"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from kohya_bucket.buckets import ExactBuckets, FixedBuckets, KohyaBuckets, load_preset  # noqa: E402
from kohya_bucket.reports.aspect_chart import aspect_chart  # noqa: E402
from kohya_bucket.reports.drawing import Drawing  # noqa: E402
from kohya_bucket.reports.loss_chart import loss_chart  # noqa: E402


def figures() -> dict[str, Drawing]:
    """File name -> drawing."""
    switched = [(method, KohyaBuckets(512, switching=method)) for method in ("midpoint", "geometric", "area")]
    bounded = KohyaBuckets(512, max_crop=0.1)
    sets = [
        ("exact sizes", ExactBuckets(1024)),
        ("sdxl-1024, 41 buckets", FixedBuckets(load_preset("sdxl-1024"))),
        ("sdxl, 9 buckets", FixedBuckets(load_preset("sdxl"))),
    ]
    return {
        "kohya-512.svg": aspect_chart(KohyaBuckets(512).bucket_set, title="sd-scripts at 512x512: 17 buckets"),
        "switching-512.svg": loss_chart(switched, "sd-scripts' buckets at 512x512: what each switching crops off"),
        "max-crop-512.svg": loss_chart(
            [("kohya", KohyaBuckets(512)), ("kohya, max_crop = 0.1", bounded)],
            "512x512 with and without a bound of 10%: gaps are aspects without a bucket",
        ),
        "sets-1024.svg": loss_chart(sets, "1024x1024: what a set crops off"),
    }


if __name__ == "__main__":
    for name, drawing in figures().items():
        (HERE / name).write_text(drawing.to_svg(), encoding="utf-8", newline="\n")
        print(name)
