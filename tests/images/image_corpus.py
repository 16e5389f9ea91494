"""Images of every kind, made with Pillow: the more a header is able to hold, the better."""

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin, features

from kohya_bucket.images import ImageFormat
from kohya_bucket.images.by_pillow import load_plugin

SIZE = (67, 45)


def exif(orientation: int, padding: int = 0) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    tags[0x010F] = "m" * padding
    return tags.tobytes()


def picture(mode: str = "RGB", size: tuple[int, int] = SIZE, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = Image.fromarray(pixels, "RGBA") if mode in ("RGBA", "LA") else Image.fromarray(pixels[..., :3].copy())
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65536, (size[1], size[0]), dtype=np.uint16))
    return image if image.mode == mode else image.convert(mode)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def jpegs() -> Iterator[tuple[str, bytes]]:
    icc = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    yield "baseline.jpg", encode(picture(), "JPEG")
    yield "progressive.jpg", encode(picture(), "JPEG", progressive=True)
    yield "gray.jpg", encode(picture("L"), "JPEG")
    yield "cmyk.jpg", encode(picture("CMYK"), "JPEG")
    yield "optimized.jpg", encode(picture(), "JPEG", optimize=True, restart_marker_rows=1)
    yield "icc.jpg", encode(picture(), "JPEG", icc_profile=icc)
    yield "big_icc.jpg", encode(picture(), "JPEG", icc_profile=icc + bytes(300_000))
    for turn in range(1, 9):
        yield f"exif{turn}.jpg", encode(picture(), "JPEG", exif=exif(turn))
    yield "big_exif.jpg", encode(picture(), "JPEG", exif=exif(6, 60_000), progressive=True)
    yield "comment.jpg", encode(picture(), "JPEG", comment=b"c" * 9000)
    frames = [picture(seed=s) for s in range(3)]
    yield "mpo.jpg", encode(frames[0], "MPO", save_all=True, append_images=frames[1:])
    yield "one_pixel.jpg", encode(picture(size=(1, 1)), "JPEG")


def pngs() -> Iterator[tuple[str, bytes]]:
    icc = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"):
        yield f"{mode.replace(';', '')}.png", encode(picture(mode), "PNG")
    yield "icc.png", encode(picture(), "PNG", icc_profile=icc)
    yield "exif6.png", encode(picture(), "PNG", exif=exif(6))
    yield "exif8_big.png", encode(picture(), "PNG", exif=exif(8, 50_000))
    text = PngImagePlugin.PngInfo()
    text.add_text("parameters", "p" * 30_000)
    text.add_text("IDAT", "a name inside a text", zip=True)
    yield "text.png", encode(picture(), "PNG", pnginfo=text)
    frames = [picture("RGBA", seed=s) for s in range(3)]
    yield "animated.png", encode(frames[0], "PNG", save_all=True, append_images=frames[1:])
    yield "one_pixel.png", encode(picture(size=(1, 1)), "PNG")
    yield "wide.png", encode(picture(size=(3001, 1)), "PNG")


def webps() -> Iterator[tuple[str, bytes]]:
    icc = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    yield "lossy.webp", encode(picture(), "WEBP")
    yield "lossless.webp", encode(picture(), "WEBP", lossless=True)
    yield "alpha.webp", encode(picture("RGBA"), "WEBP")
    yield "alpha_lossless.webp", encode(picture("RGBA"), "WEBP", lossless=True)
    yield "icc.webp", encode(picture(), "WEBP", icc_profile=icc)
    yield "exif6.webp", encode(picture(), "WEBP", exif=exif(6))
    yield "exif3_alpha.webp", encode(picture("RGBA"), "WEBP", exif=exif(3), lossless=True)
    frames = [picture(seed=s) for s in range(3)]
    yield "animated.webp", encode(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    yield "one_pixel.webp", encode(picture(size=(1, 1)), "WEBP")
    yield "long.webp", encode(picture(size=(1, 16383)), "WEBP", lossless=True)


def others() -> Iterator[tuple[str, bytes]]:
    frames = [picture(seed=s) for s in range(3)]
    yield "still.gif", encode(picture("P"), "GIF")
    yield "animated.gif", encode(frames[0], "GIF", save_all=True, append_images=frames[1:], loop=0, comment=b"c" * 300)
    for mode in ("RGB", "RGBA", "L", "P", "1"):
        yield f"{mode}.bmp", encode(picture(mode), "BMP")
    upside_down = bytearray(encode(picture(), "BMP"))
    upside_down[22:26] = (-SIZE[1]).to_bytes(4, "little", signed=True)
    yield "top_down.bmp", bytes(upside_down)
    for name, options in (
        ("raw", {}),
        ("lzw", {"compression": "tiff_lzw"}),
        ("deflate", {"compression": "tiff_deflate"}),
    ):
        yield f"{name}.tif", encode(picture(), "TIFF", **options)
    yield "cmyk.tiff", encode(picture("CMYK"), "TIFF")
    yield "sixteen.tiff", encode(picture("I;16"), "TIFF")
    yield "rotated.tif", encode(picture(), "TIFF", exif=exif(6))
    yield "netpbm.ppm", encode(picture(), "PPM")
    yield "jpeg2000.jp2", encode(picture(), "JPEG2000")
    if features.check("avif"):
        yield "plain.avif", encode(picture(), "AVIF")
        yield "alpha.avif", encode(picture("RGBA"), "AVIF")
    if load_plugin(ImageFormat.HEIC):
        yield "plain.heic", encode(picture(size=(70, 46)), "HEIF")
        yield "rotated.heic", encode(picture(size=(70, 46)), "HEIF", exif=exif(6))
    if load_plugin(ImageFormat.JXL):
        yield "plain.jxl", encode(picture(), "JXL")
        yield "alpha.jxl", encode(picture("RGBA"), "JXL")


def corpus() -> list[tuple[str, bytes]]:
    """(file name, bytes) of every sound image."""
    return [*jpegs(), *pngs(), *webps(), *others()]
