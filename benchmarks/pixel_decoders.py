"""Decoders of JPEG side by side: what `benchmarks/pixels.py` measures of them."""

from __future__ import annotations

import importlib
import io

import numpy as np
from PIL import Image


def by_pillow(image, _):
    def decode(data):
        with image.open(io.BytesIO(data)) as opened:
            return np.asarray(opened)

    return decode


def by_draft(image, to):
    def decode(data):
        with image.open(io.BytesIO(data)) as opened:
            opened.draft(None, to)
            return np.asarray(opened)

    return decode


def by_opencv(cv2, _):
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), flags)


def by_spdl(spdl, to, scale=False):
    steps = "format=pix_fmts=rgb24"
    steps = f"scale=w={to[0]}:h={to[1]}:flags=area,{steps}" if scale else steps

    def decode(data):
        frames = spdl.decode_packets(spdl.demux_image(data), filter_desc=steps)
        return spdl.to_numpy(spdl.convert_frames(frames))

    return decode


def by_vips(vips, _):
    vips.cache_set_max(0)
    return lambda data: vips.Image.new_from_buffer(data, "", access="sequential").numpy()


DECODERS = {
    "Pillow": ("PIL.Image", by_pillow),
    "Pillow, `draft`": ("PIL.Image", by_draft),
    "OpenCV": ("cv2", by_opencv),
    "simplejpeg": ("simplejpeg", lambda module, _: module.decode_jpeg),
    "simplejpeg, any eighth": (
        "simplejpeg",
        lambda s, to: lambda d: s.decode_jpeg(d, min_width=to[0], min_height=to[1]),
    ),
    "spdl-io": ("spdl.io", by_spdl),
    "spdl-io, and shrunk": ("spdl.io", lambda s, to: by_spdl(s, to, scale=True)),
    "pyvips": ("pyvips", by_vips),
    "pyvips, and shrunk (`thumbnail`)": (
        "pyvips",
        lambda v, to: lambda d: v.Image.thumbnail_buffer(d, to[0], height=to[1], size="force", no_rotate=True).numpy(),
    ),
}


def decoders(cases, in_turn, runs):
    """{case: {decoder: (ms, share of Pillow's, what came)}} of {case: (files, size to shrink to)}; what is missing."""
    missing, found = [], {}
    for case, (data, to) in cases.items():
        want = np.asarray(Image.open(io.BytesIO(data[0])))
        contestants, equal = {}, {}
        for name, (module, make) in DECODERS.items():
            try:
                decode = make(importlib.import_module(module), to)
                first = decode(data[0])
            except (ImportError, OSError, RuntimeError) as error:
                missing.append(f"{name} ({str(error).splitlines()[0][:60]})")
                continue
            equal[name] = "same bits" if np.array_equal(first, want) else f"{first.shape[1]}x{first.shape[0]}"
            contestants[name] = [lambda d=d, decode=decode: decode(d) for d in data]
        times = in_turn(contestants, runs)
        found[case] = {name: (ms, ms / times["Pillow"], equal[name]) for name, ms in times.items()}
    return found, sorted(set(missing))
