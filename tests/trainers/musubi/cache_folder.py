"""A dataset as musubi-tuner's are, its cache folder, and files in it, without musubi-tuner and torch."""

import json
import struct
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.musubi.cache_files import made_by
from kohya_bucket.trainers.musubi.caches import Caches
from kohya_bucket.trainers.musubi.caching import Session, save_item


def tensor_bytes(shapes: dict[str, tuple[int, ...]], texts: dict[str, str], fill: int = 1) -> bytes:
    """A safetensors file of float32 tensors."""
    table: dict[str, Any] = {"__metadata__": texts}
    at = 0
    for name, shape in shapes.items():
        end = at + 4 * int(np.prod(shape))
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + bytes([fill]) * at


class Selector:
    """Of a square dataset: one bucket."""

    no_upscale = False

    def __init__(self, side: int) -> None:
        self.side = side

    def get_bucket_resolution(self, image_size: tuple[int, int]) -> tuple[int, int]:
        return self.side, self.side


class Dataset(SimpleNamespace):
    """Hashable, as torch's are."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class DirectorySource:
    has_control, caption_only, multiple_target = False, False, False
    control_paths: dict[str, list[str]]

    def __init__(self, paths: list[str]) -> None:
        self.image_paths = paths

    def get_caption(self, number: int) -> tuple[str, str]:
        path = self.image_paths[number]
        return path, Path(path).with_suffix(".txt").read_text(encoding="utf-8")

    def get_image_data(self, number: int) -> Any:
        return self.image_paths[number], [Image.open(self.image_paths[number])], self.get_caption(number)[1], None


class Folder:
    """`count` pictures of one size with captions, in `root`; their buckets are square."""

    def __init__(
        self, root: Path, count: int = 3, side: int = 64, size: tuple[int, int] | None = None, family: str = "zi"
    ) -> None:
        self.root, self.side, self.size, self.family = root, side, size or (side, side), family
        self.controls: dict[str, list[str]] = {}
        (root / "im").mkdir(parents=True)
        self.paths = [str(root / "im" / f"a{i}.png") for i in range(count)]
        for i, path in enumerate(self.paths):
            Image.new("RGB", self.size, (i, i, i)).save(path)
            Path(path).with_suffix(".txt").write_text(f"caption {i}", encoding="utf-8")

    def caches(
        self, side: int | None = None, focus: Path | None = None, *, values: bool = False, **arguments: Any
    ) -> Caches:
        """With a focus file, and what a caching program is given."""
        source = DirectorySource(self.paths)
        source.control_paths = self.controls
        dataset: Any = Dataset(
            architecture=self.family, cache_directory=str(self.root / "cache"), resolution=(self.side, self.side),
            enable_bucket=True, bucket_no_upscale=False, datasource=source,
            image_directory=str(self.root / "im"), num_repeats=1, caption_extension=".txt",
        )  # fmt: skip
        made = made_by(Namespace(**arguments)) if arguments else {}
        return Caches(dataset, Selector(side or self.side), made, Path("musubi_tuner"),
                      AdapterOptions(focus=None if focus is None else str(focus)), values=values)  # fmt: skip

    def make(self, **arguments: Any) -> None:
        """All caches, as if they were encoded through the door."""
        caches = self.caches(**arguments)
        for text in (False, True):
            session = Session(caches, text=text)
            for source in caches.table.sources:
                self.save(session, source)

    def save(self, session: Session, source: Any) -> None:
        bucket, cache = session.caches.selector.get_bucket_resolution(self.size), self.root / "cache"
        size = f"{self.size[0]:04d}x{self.size[1]:04d}"
        item = SimpleNamespace(
            item_key=source.key, caption=f"caption {source.number}", frame_count=None,
            original_size=self.size, bucket_size=bucket,
            latent_cache_path=str(cache / f"{source.stem}_{size}_{self.family}.safetensors"),
            text_encoder_output_cache_path=str(cache / f"{source.stem}_{self.family}_te.safetensors"),
        )  # fmt: skip
        session.before(source.number, pictures=not session.text)
        assert session.take(item)
        if session.text:
            content = tensor_bytes({"varlen_t_float32": (4, 8)}, {"caption1": item.caption})
            save_item(item, lambda: Path(item.text_encoder_output_cache_path).write_bytes(content), text=True)
        else:
            width, height = (side // 8 for side in bucket)
            content = tensor_bytes({f"latents_1x{height}x{width}_float32": (16, height, width)}, {})
            save_item(item, lambda: Path(item.latent_cache_path).write_bytes(content), text=False)

    def reasons(self, *, values: bool = False, **arguments: Any) -> list[list[str]]:
        """Per item why its latents, then why its text cannot be trained."""
        caches = self.caches(values=values, **arguments)
        found = []
        for source in caches.table.sources:
            caption = caches.dataset.datasource.get_caption(source.number)[1]
            found.append([str(r) for r in (*caches.latents(source).reasons, *caches.text(source, caption).reasons)])
        return found
