"""With which models and options a caching program makes what it makes."""

from __future__ import annotations

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kohya_bucket.latents.fingerprint import Reason, Stale

__all__ = ["MadeBy", "made_by", "why_made_otherwise"]

MadeBy = dict[str, str]
"""By option: its value, or the hash of the file or folder that it names."""

# They decide where and how fast something is made, or what is done besides.
_NO_MATTER = {
    "dataset_config", "device", "batch_size", "num_workers", "skip_existing", "skip_broken", "keep_cache", "debug_mode",
    "console_width", "console_back", "console_num_images", "disable_cudnn_backend", "disable_numpy_memmap",
    "vae_cache_cpu", "vae_chunk_size", "warn_on_caption_issues", "validate_caption_structure",
}  # fmt: skip
_VAE, _ENCODERS = "vae", ("text_encoder", "t5", "clip", "byt5")
_SAMPLES, _SAMPLE = 64, 1 << 14


def made_by(arguments: Namespace | None) -> MadeBy:
    """What a program's arguments say of what it makes; empty where nobody knows them.

    A model is known by its content, wherever it lies: its length and samples from all over it.
    """
    given = {} if arguments is None else vars(arguments)
    return {name: _value(value) for name, value in sorted(given.items()) if name not in _NO_MATTER}


def why_made_otherwise(stored: MadeBy, wanted: MadeBy, *, text: bool) -> list[Reason]:
    """Reasons why what was made by `stored` does not serve; what either side does not say is none."""
    reasons = []
    for name in sorted(stored.keys() & wanted.keys()):
        before, now = stored[name], wanted[name]
        if before == now:
            continue
        if name == _VAE:
            reasons.append(Reason(Stale.VAE, before[:8], now[:8]))
        elif text and name.startswith(_ENCODERS) and not name.endswith("dtype"):
            reasons.append(Reason(Stale.ENCODERS))
        else:
            reasons.append(Reason(Stale.OPTION, f"--{name}", before[:40], now[:40]))
    return list(dict.fromkeys(reasons))


def _value(value: object) -> str:
    if isinstance(value, (str, os.PathLike)) and value and os.path.exists(value):
        return _model_hash(os.path.abspath(value))
    return json.dumps(value, default=str, sort_keys=True)


@cache
def _model_hash(path: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in _files(Path(path)):
        size = file.stat().st_size
        digest.update(f"{size}\0".encode())
        with open(file, "rb") as opened:
            for k in range(_SAMPLES):
                opened.seek(k * max(0, size - _SAMPLE) // (_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE))
                if size <= _SAMPLE:
                    break
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    else:
        yield path
