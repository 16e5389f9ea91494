"""Tables of images on a command line: Parquet and Arrow files, saved data sets, and those on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kohya_bucket.cli.tar_sources import matches, refuse_other_kinds
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.image_rows import TABLE_ENDINGS
from kohya_bucket.images.listing import absolute_paths
from kohya_bucket.images.remote import list_remote
from kohya_bucket.texts import parse_json, read_text, some

__all__ = ["tables_in"]

_HUB = "hf://datasets/"
_STATE = "state.json"  # what `Dataset.save_to_disk` writes beside its Arrow files, and this too:
_INFO = "dataset_info.json"
_SPLITS = "dataset_dict.json"  # and `DatasetDict.save_to_disk`


def tables_in(sources: Sequence[str]) -> list[str] | None:
    """The files of the tables that are named, in their order; None where no source is one.

    Raises:
        KohyaBucketError: tables beside something else, several splits at once, or a damaged data set.
    """
    names = list(dict.fromkeys(matches(sources, TABLE_ENDINGS)))
    tables = [name for name in names if name.lower().endswith(TABLE_ENDINGS) or _is_saved(name) or _is_on_hub(name)]
    if not tables:
        return None
    refuse_other_kinds(names, tables, "is a table of images")
    files = [file for name in tables for file in _files_of(name)]
    return list(dict.fromkeys(absolute_paths(files)))


def _is_on_hub(name: str) -> bool:
    return name.startswith(_HUB) and len(name.removeprefix(_HUB).strip("/").split("/")) == 2


def _is_saved(name: str) -> bool:
    folder = Path(name)
    return (folder / _SPLITS).is_file() or all((folder / its).is_file() for its in (_STATE, _INFO))


def _files_of(name: str) -> list[str]:
    if _is_on_hub(name):
        found = list_remote(name, True, [".parquet"])
        if not found:
            raise KohyaBucketError(
                f"{name}: has no Parquet files; the Hub's own copy in Parquet, if it made one, is at "
                f"{name.rstrip('/')}@~parquet"
            )
        return found
    folder = Path(name)
    if (folder / _SPLITS).is_file():
        splits = sorted(state.parent.name for state in folder.glob(f"*/{_STATE}"))
        raise KohyaBucketError(
            f"{name}: holds the splits {some(splits, 10)}: name one, {folder / (splits or ['train'])[0]}"
        )
    return _arrow_files(folder) if folder.is_dir() else [name]


def _arrow_files(folder: Path) -> list[str]:
    """The files of a data set that `save_to_disk` has written."""
    state = folder / _STATE
    try:
        data = parse_json(read_text(state, None))
        names = [entry["filename"] for entry in data["_data_files"]]
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ValueError(f"its files are {names!r}")
        if data.get("_indices_data_files"):
            raise ValueError("it refers to rows of other files; save it again")
    except (KeyError, TypeError, ValueError) as error:
        raise KohyaBucketError(f"{state}: not that of a saved data set ({error}); save it again") from None
    return [str(folder / name) for name in names]
