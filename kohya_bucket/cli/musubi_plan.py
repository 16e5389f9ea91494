"""What `plan` and `doctor` say of a config of musubi-tuner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console

from kohya_bucket.adapter.findings import Severity
from kohya_bucket.cli.console import print_fitting, scan_progress, wide_console
from kohya_bucket.cli.plan_tables import bucket_table, findings_table, gpu_table, lost_table
from kohya_bucket.musubi.architectures import architecture_named
from kohya_bucket.musubi.config import ClipKeys, MusubiConfig, read_config
from kohya_bucket.musubi.options import options_of
from kohya_bucket.musubi.plan import Overview, PlacedData, Reading, overview, seconds_lost
from kohya_bucket.musubi.rules import ANY, picture_mode
from kohya_bucket.texts import counted

__all__ = ["clip_rows", "plan_musubi", "read_musubi"]

_LIMIT = 20
_COLUMNS = ("bucket", "aspect", "items", "samples", "batches", "short", "cut off", "worst")


def read_musubi(config: Path, arch: str | None) -> MusubiConfig:
    """The config, and a note where it depends on a model that nobody named."""
    read = read_config(config, None if arch is None else architecture_named(arch))
    if read.architecture is None:
        message = "no model is named, and what is shown holds for every one but HiDream-O1 and MiniMax-H3"
        read.findings.note("no-architecture", "", message, "name it, e.g. --arch wan")
    return read


def plan_musubi(
    config: Path, arch: str | None, gpus: list[int], accumulate: int, images: bool, as_json: bool, strict: bool
) -> None:
    """`plan` for a config of musubi-tuner, with its exit codes."""
    read = read_musubi(config, arch)
    seen = None
    if not read.findings.of(Severity.ERROR):
        with scan_progress("reading images and clips") as progress:
            seen = overview(read, options_of(read), gpus, accumulate, Reading(progress=progress))
    if as_json:
        typer.echo(json.dumps(_as_dict(read, seen, images), indent=2, allow_nan=False))
    else:
        _print(read, seen, accumulate, images)
    warned = bool(read.findings.of(Severity.WARNING))
    raise typer.Exit(1 if read.findings.of(Severity.ERROR) or (strict and warned) else 0)


def _print(read: MusubiConfig, seen: Overview | None, accumulate: int, images: bool) -> None:
    console = wide_console()
    for number, data in enumerate(seen.datasets if seen else (), 1):
        _print_data(console, number, data, read, images)
    if seen and seen.gpus:
        gpu_table(console, seen.gpus, accumulate, "musubi-tuner")
        lost_table(console, seen.gpus, seen.options.model)
    if len(read.findings):
        console.print()
        findings_table(console, read.findings, images)


def _print_data(console: Console, number: int, data: PlacedData, read: MusubiConfig, images: bool) -> None:
    keys, what = data.keys, "clip" if isinstance(data.keys, ClipKeys) else "image"
    width, height = keys.resolution
    in_buckets, no_upscale = picture_mode(keys, read.architecture)
    mode = "no upscaling" if no_upscale else "buckets" if in_buckets else "one size"
    model = (read.architecture or ANY).title
    console.print()
    console.print(
        f"[bold]Dataset {number}[/bold]: {what}s, {width}x{height}, {mode}, for {model}, batch size {keys.batch_size}"
    )
    times = "once" if keys.num_repeats == 1 else f"{keys.num_repeats} times"
    source = keys.directory or keys.jsonl_file
    console.print(f"  {source}: {counted(len(data.paths), what)}, {times} each", markup=False, soft_wrap=True)
    for line in _clip_lines(data):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    _print_buckets(console, data)
    if data.left_out:
        console.print(f"[yellow]not trained: {len(data.left_out):,}[/yellow]")
        for path, reason in data.left_out if images else data.left_out[:_LIMIT]:
            console.print(f"  {path}: {reason}", markup=False, soft_wrap=True)
        if len(data.left_out) > _LIMIT and not images:
            console.print(f"  … and {len(data.left_out) - _LIMIT:,} more (--images lists all)")
    if images:
        _print_each(console, data)


def _clip_lines(data: PlacedData) -> list[str]:
    """How frames are taken from clips, and what is lost."""
    if not isinstance(data.keys, ClipKeys) or data.clips is None or data.scan is None:
        return []
    keys, clips = data.keys, data.clips
    lengths = "" if keys.frame_extraction == "full" else f" of {', '.join(map(str, sorted(set(keys.target_frames))))}"
    rate = "" if keys.source_fps is None else f", {keys.source_fps:g} frames per second taken down to the model's rate"
    total, kept = int(clips.frames.sum()), int(clips.kept.sum())
    seconds = f" ({seconds_lost(data):,.1f} s)" if np.nansum(data.scan.seconds) else ""
    return [
        f"frame_extraction {keys.frame_extraction}{lengths}{rate}",
        f"{counted(len(clips.spans), 'item')} with {kept:,} of {total:,} frames; {total - kept:,} in none{seconds}",
    ]


def _print_buckets(console: Console, data: PlacedData) -> None:
    rows = data.items.rows()
    if not rows:
        console.print("nothing is trained")
        return
    cells = [
        (
            "x".join(map(str, row.bucket)), f"{row.bucket[0] / row.bucket[1]:.3f}", f"{row.items:,}",
            f"{row.samples:,}", f"{row.batches:,}", str(row.short_batches or ""), f"{row.mean_crop_loss:.1%}",
            f"{row.worst_crop_loss:.1%}",
        )
        for row in rows
    ]  # fmt: skip
    loss = data.items.crop_loss
    samples, batches, short = (sum(getattr(r, name) for r in rows) for name in ("samples", "batches", "short_batches"))
    total = (
        counted(len(rows), "bucket"), "", f"{len(data.items.keys):,}", f"{samples:,}", f"{batches:,}",
        str(short or ""), f"{loss.mean():.1%}", f"{loss.max():.1%}",
    )  # fmt: skip
    print_fitting(console, partial(bucket_table, _COLUMNS, cells, total), ("aspect", "short", "samples", "batches"))


def clip_rows(data: PlacedData) -> list[Mapping[str, Any]]:
    """One for each clip or image that can be read: where it goes, and for a clip what is kept of it."""
    out: list[Mapping[str, Any]] = []
    for i, path in enumerate(data.paths):
        bucket = data.picture.bucket_sizes[i].tolist()
        if not min(bucket):
            continue
        row: dict[str, Any] = {"path": path, "bucket": bucket, "crop_loss": float(data.picture.crop_loss[i])}
        if data.clips is not None and data.scan is not None:
            mine = data.clips.spans.clip == i
            seconds, frames = float(data.scan.seconds[i]), int(data.clips.frames[i])
            kept = int(data.clips.kept[i])
            row |= {
                "size": data.scan.sizes[i].tolist(),
                "frames_in_file": int(data.scan.frames[i]),
                "counted": bool(data.scan.counted[i]),
                "fps": float(data.scan.fps[i]) or None,
                "frames": frames,
                "kept": kept,
                "dropped": frames - kept,
                "seconds_lost": None if np.isnan(seconds) else seconds * (1 - kept / max(frames, 1)),
                "items": data.clips.spans.length[mine].tolist(),
            }
        out.append(row)
    return out


def _print_each(console: Console, data: PlacedData) -> None:
    for row in clip_rows(data):
        where = f"{'x'.join(map(str, row['bucket'])):>10} {row['crop_loss']:>6.1%}"
        if "items" in row:
            lost = "" if row["seconds_lost"] is None else f" {row['seconds_lost']:.2f} s"
            where += f" {row['frames']:>5} frames, {row['dropped']:>4} in no item{lost:>9}, "
            where += f"{counted(len(row['items']), 'item'):>9}"
        console.print(f"{where}  {row['path']}", markup=False, soft_wrap=True)


def _as_dict(read: MusubiConfig, seen: Overview | None, images: bool) -> dict[str, Any]:
    """Everything that is known, ready for `json.dumps`; with `images` also each clip and image."""
    datasets = []
    for data in seen.datasets if seen else ():
        entry: dict[str, Any] = {
            "kind": "clips" if isinstance(data.keys, ClipKeys) else "images",
            "keys": asdict(data.keys),
            "files": len(data.paths),
            "items": len(data.items.keys),
            "samples": int(data.items.repeats.sum()),
            "batches": sum(row.batches for row in data.items.rows()),
            "buckets": [asdict(row) for row in data.items.rows()],
            "not_trained": [{"path": path, "reason": reason} for path, reason in data.left_out],
        }
        if data.clips is not None and data.scan is not None:
            entry |= {
                "frames": int(data.clips.frames.sum()),
                "frames_kept": int(data.clips.kept.sum()),
                "seconds": float(np.nansum(data.scan.seconds)),
                "seconds_lost": seconds_lost(data),
            }
        if images:
            entry["rows"] = clip_rows(data)
        datasets.append(entry)
    return {
        "config": str(read.path),
        "architecture": None if read.architecture is None else read.architecture.name,
        "settings": asdict(seen.options) if seen else None,
        "datasets": datasets,
        "gpus": [row.as_dict() for row in seen.gpus] if seen else [],
        "findings": [finding.as_dict() for finding in read.findings],
    }
