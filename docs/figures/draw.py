"""Draws the figures of docs/rules.md and of the README into this folder: python docs/figures/draw.py"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from kohya_bucket.buckets import BucketRule, ExactBuckets, FixedBuckets, KohyaBuckets, load_preset  # noqa: E402
from kohya_bucket.buckets.choices import TRAINERS  # noqa: E402
from kohya_bucket.originals.loaders import LOADERS  # noqa: E402
from kohya_bucket.reports.chart import Drawing, aspect_chart  # noqa: E402
from kohya_bucket.reports.compare import Compared, compare_rules  # noqa: E402

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1180, 420, 64, 24, 96, 44
_COLOURS = ("#1f5fa8", "#d9650b", "#2b8a3e", "#9c36b5", "#c92a2a", "#0b7285", "#5f3dc4", "#846300", "#555555")
_TICKS = (0.25, 0.33, 0.5, 0.67, 0.75, 1, 1.33, 1.5, 2, 3, 4)
_LONG_SIDE = 20_000


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
        "epochs.svg": epochs_chart(),
        "proof-light.svg": proof_chart(("#ffffff", "#1e2126", "#59606a", "#c8452f", "#0b6f6a")),
        "proof-dark.svg": proof_chart(("#0d1117", "#e4e5e3", "#9aa1aa", "#f0836c", "#55c7bd")),
    }


def measured(result: str, row: str, column: int) -> list[float]:
    """The numbers in one cell of a table in benchmarks/results, which begin a row with these cells."""
    text = (HERE.parents[1] / "benchmarks" / "results" / f"{result}.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| {re.escape(row)} \|.*", text, re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+", line.strip("|").split("|")[column])]


def proof_chart(colours: tuple[str, str, str, str, str]) -> Drawing:
    """What sd-scripts misses and how long it waits, alone and with this package, as benchmarks/results has it.

    Args:
        colours: of the ground, of what leads, of what is beside it, of sd-scripts alone, of this package.
    """
    ground, lead, beside, alone, ours = colours
    case = "41 | 1 | 8 | yes"
    panels = [
        ("Images missed in an epoch", "41 images, 8 loader workers", "",
         [measured("epochs", f"{case} | {who}", 5) for who in ("sd-scripts", "kohya_bucket")]),
        ("Waiting for latents", "1,000 images, 256 px, tiny VAE, 2 cores", " s",
         [measured("caching", who, 2) for who in ("sd-scripts alone", "sd-scripts behind the launcher")]),
    ]  # fmt: skip
    drawing = Drawing(840, 132, "sd-scripts alone, and with kohya_bucket", ground)
    for k, (title, about, unit, rows) in enumerate(panels):
        left, scale = 20.0 + 420 * k, 190 / max(max(row) for row in rows)
        drawing.text(left, 20, title, size=16, colour=lead, bold=True)
        drawing.text(left, 42, about, size=12, colour=beside)
        for i, (who, row) in enumerate(zip(("sd-scripts alone", "with kohya_bucket"), rows, strict=True)):
            y, colour = 62 + 34 * i, (alone, ours)[i]
            drawing.text(left, y + 11, who, colour=lead, size=13)
            drawing.box(left + 134, y, max(scale * max(row), 2), 22, colour)
            told = " to ".join(f"{number:.0f}" for number in dict.fromkeys(row)) + unit
            drawing.text(left + 142 + max(scale * max(row), 2), y + 11, told, size=14, colour=lead, bold=True)
    return drawing


def example_runs(gpus: int) -> list[Compared]:
    """What loaders make of the 200 pictures of docs/rules.md."""
    rng = np.random.default_rng(7)
    formats = [(3000, 2000), (2000, 3000), (4000, 3000), (1920, 1080), (1080, 1920), (1024, 1024), (1080, 1350)]
    aspect = np.exp(rng.normal(0, 0.3, 80))[:, None]
    free = 1200 * np.concatenate([aspect**0.5, aspect**-0.5], axis=1)
    sizes = np.concatenate([np.array(formats)[rng.integers(0, 7, 120)], free]).astype(np.int32)
    kohya = KohyaBuckets(1024, 256, 2048)
    rules = [(name, kohya) for name in ("kohya", "sd-scripts", "anima_lora", "NovelAI's program")]
    rules += [(name, TRAINERS[name].load()(1024)) for name in LOADERS if name in TRAINERS]
    return compare_rules(rules, sizes, 4, gpus)


def epochs_chart() -> Drawing:
    """A bar for each trainer: images that an epoch trains and leaves out, and slots that repeat one."""
    runs, row, left, scale = example_runs(1), 34, 190, 3.4
    drawing = Drawing(_WIDTH, _TOP + row * len(runs) + 24, "200 images, batches of 4: what an epoch trains")
    drawing.text(24, 28, drawing.title, size=18, bold=True)
    kinds = (("trained", "#2b8a3e"), ("left out", "#c92a2a"), ("repeated once more", "#d9650b"))
    for k, (kind, colour) in enumerate(kinds):
        drawing.box(left + 200 * k, 48, 14, 14, colour)
        drawing.text(left + 200 * k + 22, 60, kind)
    for k, one in enumerate(runs):
        run, x, y = one.trained, float(left), _TOP + row * k
        assert run is not None
        drawing.text(left - 12, y + 16, "this package" if one.name == "kohya" else one.name, anchor="end")
        for count, (_, colour) in zip((200 - run.left_out, run.left_out, run.repeated), kinds, strict=True):
            drawing.box(x, y, count * scale, 22, colour)
            if count >= 8:
                drawing.text(x + count * scale / 2, y + 16, f"{count:.0f}", colour="#ffffff", anchor="middle")
            x += count * scale
    return drawing


def loss_chart(rules: Sequence[tuple[str, BucketRule]], title: str, reach: float = 4.0, steps: int = 1200) -> Drawing:
    """Crop loss of each rule over aspects from 1/`reach` to `reach`, for images large enough for any bucket.

    Gaps in a curve are aspects for which the rule has no bucket.
    """
    drawing = Drawing(_WIDTH, _HEIGHT, title)
    drawing.text(_LEFT, 24, title, size=18, bold=True)
    drawing.text(_LEFT, 80, "share cropped off", size=12, colour="#555555")
    logs = np.linspace(-np.log(reach), np.log(reach), steps)
    aspects = np.exp(logs)
    sizes = np.rint(np.stack([np.minimum(aspects, 1), np.minimum(1 / aspects, 1)], axis=1) * _LONG_SIDE)
    losses = [rule.place(sizes.astype(np.int32)).crop_loss for _, rule in rules]
    most = max(0.05, float(np.nanmax([np.nanmax(loss) for loss in losses])))
    ceiling = float(np.ceil(most * 20) / 20)

    def across(log_aspect: float) -> float:
        return _LEFT + (log_aspect / math.log(reach) + 1) / 2 * (_WIDTH - _LEFT - _RIGHT)

    def down(loss: float) -> float:
        return _HEIGHT - _BOTTOM - loss / ceiling * (_HEIGHT - _TOP - _BOTTOM)

    for share in np.linspace(0, ceiling, 6):
        drawing.line([(_LEFT, down(share)), (_WIDTH - _RIGHT, down(share))], "#e3e3e3")
        drawing.text(_LEFT - 8, down(share), f"{share:.0%}", size=11, colour="#555555", anchor="end")
    for tick in (t for t in _TICKS if 1 / reach - 1e-9 <= t <= reach):
        x = across(float(np.log(tick)))
        drawing.line([(x, _HEIGHT - _BOTTOM), (x, _HEIGHT - _BOTTOM + 5)], "#8a8a8a")
        drawing.text(x, _HEIGHT - _BOTTOM + 15, f"{tick:g}", size=11, colour="#555555", anchor="middle")
    drawing.text(_WIDTH - _RIGHT, _HEIGHT - 10, "width / height", size=12, colour="#555555", anchor="end")
    x = float(_LEFT)
    for i, ((name, _), loss) in enumerate(zip(rules, losses, strict=True)):
        # Curves coincide over long stretches: each is thinner than those below it, so that all remain visible.
        colour, width = _COLOURS[i % len(_COLOURS)], 1.4 + 2.0 * (len(rules) - 1 - i)
        drawing.line([(x, 52), (x + 22, 52)], colour, max(width, 2.5))
        drawing.text(x + 28, 52, name, size=13)
        x += 52 + 8.0 * len(name)
        run: list[tuple[float, float]] = []
        for log_aspect, value in zip(logs.tolist(), loss.tolist(), strict=True):
            if np.isnan(value):
                _curve(drawing, run, colour, width)
                run = []
            else:
                run.append((across(log_aspect), down(value)))
        _curve(drawing, run, colour, width)
    return drawing


def _curve(drawing: Drawing, run: list[tuple[float, float]], colour: str, width: float) -> None:
    if len(run) > 1:
        drawing.line(run, colour, width)


if __name__ == "__main__":
    for name, drawing in figures().items():
        (HERE / name).write_text(drawing.to_svg(), encoding="utf-8", newline="\n")
        print(name)
