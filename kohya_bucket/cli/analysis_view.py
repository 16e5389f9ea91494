"""An analysis for a reader in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kohya_bucket.buckets.families import NAME_THE_MODEL
from kohya_bucket.images.listing import from_here
from kohya_bucket.reports.analysis import FEW, Analysis
from kohya_bucket.reports.recommend import Recommendation, most_worth, recommend
from kohya_bucket.texts import counted, one_line, some

_BLOCKS = " ▁▂▃▄▅▆▇█"
_MOST, _MOST_NAMED = 60, 12
_NARROW = 76  # columns that all of a bucket's numbers take


def measured_for(analysis: Analysis) -> str:
    """For what a folder without a config is measured, and how to name something else."""
    subject = analysis.subject
    size = getattr(subject.rule, "max_reso", None)
    at = f" at {size[0]}x{size[1]}" if size else ""
    return (
        f"Measured for {subject.model or 'any model'}{at}, {subject.batches_of}; others: --arch sdxl, "
        "--resolution 1024, --batch-size 4, or --config FILE"
    )


def print_analysis(analysis: Analysis, console: Console, limit: int = 5, *, decoded: bool = False) -> None:
    """Print one dataset; lists of images show the first `limit`. `decoded`: every image was, not its header alone."""
    wrap, narrow = console.is_terminal, console.width < _NARROW
    recommendations = recommend(analysis)
    parts: list[RenderableType] = [_head(analysis, recommendations, decoded)]
    if len(analysis.aspects):
        parts += [_aspects(analysis, 40 if narrow else 64), _buckets(analysis, narrow)]
    parts += _lists(analysis, limit)
    if recommendations:
        model = analysis.subject.model
        valid_for = f", for {model}" if model else f", whatever the model; {NAME_THE_MODEL}"
        parts.append(Text.assemble(("\nWhat to change", "bold"), (valid_for, "dim")))
        texts = [_recommendation(r) for r in recommendations]
        parts += [Padding(text, (0, 0, 0, 2)) if wrap else _indented(text) for text in texts]
    # in a file no path is broken over two lines, and no line is filled up or cut
    console.print(Group(*parts), soft_wrap=not wrap)


def _head(analysis: Analysis, recommendations: Sequence[Recommendation], decoded: bool) -> RenderableType:
    """Three lines: the images, what is lost of them, and what to change first; then the numbers."""
    images, s = analysis.images, analysis.summary
    what = "image" if analysis.subject.clips is None else "clip"
    text = Text.assemble((f"{one_line(analysis.subject.name)}: ", "bold"), counted(len(images), what))
    text.append(f", {s.placed:,} of them in {counted(s.buckets, 'bucket')}; {len(images.failures):,} broken")
    if not decoded and analysis.subject.clips is None:
        text.append(" by their headers")
    if images.unlisted:
        text.append(f", {len(images.unlisted):,} that no trainer lists")
    text.append(f", {len(analysis.unplaced):,} without a bucket\n")
    if s.placed:
        text.append(f"Lost: {s.mean_crop:.2%} of an image is cropped off, {s.worst_crop:.1%} of the worst one; ")
        text.append(f"{s.enlarged:.1%} of the images are enlarged\n")
    first = most_worth(analysis, recommendations)
    line = "nothing; no setting does better" if s.placed else "the images: none can be trained"
    line = f"{first.setting}: {first.current} → {first.proposed}" if first else line
    text.append("Change first: ", style="bold")
    text.append(f"{one_line(line)}\n\n", style="cyan")
    text.append(f"{one_line(repr(analysis.subject.rule))}, {analysis.subject.batches_of}\n", style="dim")
    for line in [] if analysis.subject.clips is None else analysis.subject.clips.lines():
        text.append(f"{line}\n")
    if s.placed:
        few = len(analysis.underfilled)
        never = f" ({counted(few, 'bucket', 'never fills', 'never fill')} one)" if few else ""
        if analysis.subject.clips is None:
            text.append(f"{counted(s.samples, 'sample')}, {counted(s.batches, 'batch')} an epoch, ")
            text.append(f"{s.short_batches:,} of them not full{never}\n")
    if analysis.focus_cuts is not None:
        text.append(f"{str(analysis.focus_cuts).capitalize()}\n")
    return text


def _aspects(analysis: Analysis, width: int) -> RenderableType:
    """Histogram over the logarithm of the aspect, portrait left, landscape right."""
    logs = np.log2(analysis.aspects)
    reach = max(0.5, float(np.abs(logs).max()))
    counts, _ = np.histogram(logs, bins=width, range=(-reach, reach))
    top = max(int(counts.max()), 1)
    bars = "".join(_BLOCKS[-(-int(c) * 8 // top)] for c in counts)
    ends = f"1:{2**reach:.3g}", f"{2**reach:.3g}:1"
    axis = ends[0] + "1:1".center(width - len(ends[0]) - len(ends[1])) + ends[1]
    numbers = f"{analysis.aspects.min():.3f} to {analysis.aspects.max():.3f}"
    return Text(f"Aspects, on a logarithmic scale\n  {bars}\n  {axis}\n  {numbers}\n")


def _buckets(analysis: Analysis, narrow: bool) -> RenderableType:
    used = analysis.used_buckets
    # Where there are more than fit, the fullest are shown, in the set's order.
    shown = sorted(sorted(used, key=lambda b: -b.images)[:_MOST], key=lambda b: (b.bucket.aspect_ratio, b.bucket))
    top = max((b.images for b in used), default=1)
    # All of them fit into 80 columns, and without the bar and the last batch into 60.
    columns: dict[str, list[str]] = {
        "bucket": [str(b.bucket) for b in shown],
        "aspect": [f"{b.bucket.aspect_ratio:.3f}" for b in shown],
        "images": [f"{b.images:,}" for b in shown],
        "": ["█" * max(1, round(8 * b.images / top)) for b in shown],
        "samples": [f"{b.samples:,}" for b in shown],
        "batches": [f"{b.batches:,}" for b in shown],
        "last": [f"{b.last_batch}/{b.full_batch}" if b.last_batch else "full" for b in shown],
        "cut": [f"{b.mean_crop:.1%}" for b in shown],
        "worst": [f"{b.worst_crop:.1%}" for b in shown],
        "enl.": [f"{b.enlarged:.0%}" for b in shown],
    }
    kept = [name for name in columns if not narrow or name not in ("", "last")]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in kept:
        table.add_column(name, justify="left" if name in ("bucket", "") else "right", no_wrap=True)
    for use, *row in zip(shown, *(columns[name] for name in kept), strict=True):
        table.add_row(*row, style="yellow" if use.underfilled else "")
    notes = []
    if len(used) > _MOST:
        notes.append(f"{len(used) - _MOST} smaller buckets are not shown; --html and --json hold all.")
    for what, some_of in (
        (f"fewer than {FEW} images", analysis.rarely_used),
        ("no image", analysis.empty),
    ):
        if some_of:
            many = f"{len(some_of)} bucket{' holds' if len(some_of) == 1 else 's hold'} {what}"
            notes.append(f"{many}: {some([str(b.bucket) for b in some_of], _MOST_NAMED)}")
    return Group(table, *(Text(n, style="dim") for n in notes))


def _lists(analysis: Analysis, limit: int) -> list[RenderableType]:
    images, out = analysis.images, list[RenderableType]()
    for some_of in analysis.lists:
        count = len(some_of.images)
        if not count or some_of.key == "most_cropped":
            continue
        lines = []
        for i in some_of.images[:limit]:
            size = "" if some_of.notes_only else f" ({'x'.join(map(str, images.sizes[i].tolist()))})"
            lines.append(one_line(f"  {from_here(images.paths[i])}{size}: {some_of.text(i)}"))
        rest = f"\n  … and {count - limit:,} more" if count > limit else ""
        body = "\n".join(lines)
        out.append(Text.assemble(("\n" + some_of.title, "bold"), f" ({count:,})\n{body}{rest}"))
    return out


def _recommendation(r: Recommendation) -> Text:
    lines = [(f"{r.setting}: {r.current} → {r.proposed}", "cyan"), *([(f"{r.why}.", "")] if r.why else [])]
    lines += [(f"{what}: {text}", style) for what, text, style in
              (("Gain", r.gain, "green"), ("Cost", r.cost, "yellow")) if text]  # fmt: skip
    return Text.assemble(*((one_line(text) + "\n", style) for text, style in lines))


def _indented(text: Text) -> Text:
    return Text("\n").join(Text.assemble("  ", line) if line else line for line in text.split("\n", allow_blank=True))
