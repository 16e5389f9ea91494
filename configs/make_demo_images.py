"""Draws the demo images beside this file: one per shape that people's folders hold. The same files every time."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).parent / "demo_images"
ROTATED = 0x0112  # EXIF tag "orientation"

# name, (width, height): cameras, phones, posters, banners, icons
IMAGES = [
    ("camera_3x2.jpg", (720, 480)),
    ("camera_2x3.jpg", (480, 720)),
    ("camera_4x3.jpg", (640, 480)),
    ("camera_3x4.jpg", (480, 640)),
    ("phone_9x16.jpg", (405, 720)),
    ("phone_9x19.jpg", (360, 760)),
    ("screen_16x9.png", (768, 432)),
    ("screen_21x9.png", (840, 360)),
    ("square.png", (512, 512)),
    ("square_small.png", (300, 300)),
    ("square_large.jpg", (1024, 1024)),
    ("nearly_square.jpg", (700, 660)),
    ("poster_5x7.webp", (500, 700)),
    ("banner_4x1.png", (960, 240)),
    ("scroll_1x4.png", (200, 800)),
    ("exact_bucket.png", (576, 448)),
    ("cutout_with_alpha.webp", (512, 512)),
    ("rotated_by_exif.jpg", (640, 427)),
    ("ribbon_too_narrow.png", (900, 40)),
    ("icon_tiny.png", (48, 48)),
]


def draw(name: str, size: tuple[int, int], number: int) -> Image.Image:
    """Bands and a circle in the middle, so that one sees what a crop takes."""
    width, height = size
    hue = (37 * number) % 360
    image = Image.new("RGB", size, f"hsl({hue}, 45%, 72%)")
    pen = ImageDraw.Draw(image)
    for k in range(8):
        if k % 2:
            pen.rectangle((width * k // 8, 0, width * (k + 1) // 8, height), fill=f"hsl({hue}, 45%, 66%)")
    radius = min(size) * 2 // 5
    middle = (width // 2, height // 2)
    box = (middle[0] - radius, middle[1] - radius, middle[0] + radius, middle[1] + radius)
    pen.ellipse(box, fill=f"hsl({(hue + 180) % 360}, 55%, 50%)")
    pen.rectangle((0, 0, width - 1, height - 1), outline=f"hsl({hue}, 60%, 30%)", width=max(min(size) // 60, 1))
    if "alpha" in name:
        mask = Image.new("L", size, 0)
        ImageDraw.Draw(mask).ellipse(box, fill=255)
        image.putalpha(mask)
    return image


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for number, (name, size) in enumerate(IMAGES):
        image = draw(name, size, number)
        options: dict[str, object] = {"quality": 60} if not name.endswith(".png") else {"optimize": True}
        if "exif" in name:
            exif = Image.Exif()
            exif[ROTATED] = 6
            options["exif"] = exif
        image.save(FOLDER / name, **options)
        caption = f"{Path(name).stem.replace('_', ' ')}, {size[0]} by {size[1]}"
        (FOLDER / name).with_suffix(".txt").write_text(caption + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
