"""`cache import --text` and `cache export --text`: outputs of text encoders between sd-scripts' npz and a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kohya_bucket.cli.cache_console import print_exchange
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import MAX_CONFIG_BYTES, read_regular

if TYPE_CHECKING:
    from kohya_bucket.latents.text.npz_files import TextFamily

__all__ = ["export_texts", "import_texts"]


def import_texts(folders: list[str], output: Path, arch: str, ending: str, *, quiet: bool) -> None:
    """The npz beside the images of `folders` into the captions of the store in `output`."""
    from kohya_bucket.images import list_images
    from kohya_bucket.latents.store.layout import common_root
    from kohya_bucket.latents.text.npz_files import import_text_npz
    from kohya_bucket.latents.text.text_store import TEXT_FOLDER

    family = _family(arch)
    images = list_images(folders)
    folder = output / TEXT_FOLDER
    captions = [_older_caption(image, family, ending) for image in images] if ending else [None] * len(images)
    with scan_progress("importing", quiet=quiet) as progress:
        done = import_text_npz(
            images, captions, folder, family, images_root=common_root(images, folder), progress=progress
        )
    print_exchange(done, "imported", "outputs")


def export_texts(store: Path, images_root: Path | None, arch: str, ending: str, *, quiet: bool) -> None:
    """The captions of a store as npz beside the images that have these captions."""
    from kohya_bucket.images import list_images
    from kohya_bucket.latents.text.npz_files import export_text_npz
    from kohya_bucket.latents.text.text_store import TEXT_FOLDER, TextStore

    family = _family(arch)
    if images_root is None:
        raise ConfigError("--text: a store does not know which images have its captions: name their folder by --images")
    folder = store / TEXT_FOLDER
    opened = TextStore(folder if folder.is_dir() else store)
    images = list_images([str(images_root)])
    with scan_progress("exporting", quiet=quiet) as progress:
        done = export_text_npz(opened, images, _captions(images, ending), family, progress=progress)
    print_exchange(done, "exported", "outputs")


def _family(name: str) -> TextFamily:
    from kohya_bucket.latents.text.npz_files import TEXT_FAMILIES

    if name not in TEXT_FAMILIES:
        raise ConfigError(f"--arch {name!r} with --text: use one of {', '.join(TEXT_FAMILIES)}")
    return TEXT_FAMILIES[name]


def _older_caption(image: str, family: TextFamily, ending: str) -> str | None:
    """The caption in the file beside an image, if its npz was made from that and not from what stood there before."""
    file = Path(image)
    try:
        npz = file.with_name(file.stem + family.suffix).stat()
        if file.with_name(file.stem + ending).stat().st_mtime_ns > npz.st_mtime_ns:
            return None
    except OSError:
        return None
    return _captions([image], ending)[0]


def _captions(images: Sequence[str], ending: str) -> list[str | None]:
    """The first line of each image's file of this ending, as sd-scripts takes it; None where there is none."""
    found: list[str | None] = []
    for image in images:
        path = Path(image).with_name(Path(image).stem + ending)
        try:
            text = read_regular(path, MAX_CONFIG_BYTES, "a caption is read here").decode("utf-8")
            found.append(text.replace("\r", "\n").partition("\n")[0].strip())
        except FileNotFoundError:
            found.append(None)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the caption cannot be read ({error}); it must be UTF-8 text") from error
    return found
