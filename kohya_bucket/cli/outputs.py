"""What a command must not write over."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import IMAGE_EXTENSIONS

__all__ = ["check_output", "refuse_address"]


def check_output(option: str, output: Path | None, what: str, inputs: Iterable[str | Path | None]) -> None:
    """Before anything is read: an output that is a folder, an image, or one of the inputs of the command.

    Args:
        option: as the command line names it.
        output: the file to write, or None.
        what: what is written, e.g. "a Parquet file"; a name ending in "picture" may have an image's ending.
        inputs: files and folders that the command reads.

    Raises:
        KohyaBucketError: `output` is one of them, is a folder, or is named as an image and will hold none.
    """
    if output is None:
        return
    refuse_address(option, output)
    if output.is_dir():
        raise KohyaBucketError(f"{option} is {output}, a folder: name a file in it")
    if output.suffix.lower() in IMAGE_EXTENSIONS and not what.endswith("picture"):
        raise KohyaBucketError(f"{option} is {output}, named as an image, but {what} is written: give another name")
    for given in inputs:
        if given is not None and Path(given).is_file() and output.exists() and output.samefile(given):
            raise KohyaBucketError(
                f"{option} is {output}, which is also an input and would be overwritten: give another name"
            )


def refuse_address(option: str, output: Path) -> None:
    """Before anything is made at "s3:/bucket", which is what a `Path` makes of an address.

    Raises:
        KohyaBucketError: `output` is one, and no folder here has such a name.
    """
    first = output.parts[0] if output.parts else ""
    if first.endswith(":") and len(first) > 2 and not Path(first).exists():
        address = f"{first}//{'/'.join(output.parts[1:])}"
        raise KohyaBucketError(f"{option} is {address}, but is written to this machine only: give a local path")
