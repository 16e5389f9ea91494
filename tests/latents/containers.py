"""The same images in files that hold many: tars, and Parquet files."""

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["cells", "make_table", "make_tar", "make_tars", "with_captions"]


def with_captions(images: Sequence[Path]) -> list[Path]:
    """The images, with the file of a caption beside each but the last."""
    for k, path in enumerate(images[:-1]):
        path.with_suffix(".txt").write_text(f" caption {k} é\n", encoding="utf-8")
    return list(images)


def make_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def make_tars(folder: Path, images: Sequence[Path], each: int, prefix: str = "./part/") -> list[Path]:
    """Tars of `each` images with their captions, in a folder of the tar."""
    folder.mkdir()
    tars = []
    for start in range(0, len(images), each):
        members = []
        for path in images[start : start + each]:
            text = path.with_suffix(".txt")
            members += [(f"{prefix}{one.name}", one.read_bytes()) for one in (path, text) if one.is_file()]
        tars.append(make_tar(folder / f"shard-{start:04d}.tar", members))
    return tars


def cells(images: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows of a table, as Hugging Face has them; without a caption where no file has one."""
    texts = [path.with_suffix(".txt") for path in images]
    return [
        {
            "id": k,
            "image": {"bytes": path.read_bytes(), "path": path.name},
            "text": text.read_text(encoding="utf-8") if text.is_file() else None,
        }
        for k, (path, text) in enumerate(zip(images, texts, strict=True))
    ]


def make_table(path: Path, rows: Sequence[dict[str, Any]], plain: bool = False, **options: Any) -> Path:
    """A Parquet file; `plain`: its column of images holds bytes, and no structs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = [row["image"] for row in rows]
    if plain:
        kind, images = pa.binary(), [None if image is None else image["bytes"] for image in images]
    table = pa.table({
        "id": pa.array([row["id"] for row in rows], pa.int64()),
        "image": pa.array(images, kind),
        "text": pa.array([row["text"] for row in rows], pa.string()),
    })  # fmt: skip
    pq.write_table(table, path, **options)
    return path
