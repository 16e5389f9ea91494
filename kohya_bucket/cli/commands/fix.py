"""`kohya-bucket fix`: mend the files of a folder of images, or set them aside; nothing is deleted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.console import say, say_first, scan_progress
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import Quiet, Recursive
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.images.mending import Fix


def fix(
    folder: Annotated[str, typer.Argument(help="A folder of images, with the captions beside them.")],
    apply: bool = opt(False, "Do what is shown.", "--apply"),
    undo: bool = opt(False, "Put back what the last --apply changed.", "--undo"),
    least_side: int = opt(64, "Set images aside whose shorter side has fewer pixels.", min=0),
    captions_in: str | None = opt(
        None, "The encoding of captions that are not UTF-8, such as cp932. Default: cp1252 where no other fits."
    ),
    recursive: Recursive = True,
    quiet: Quiet = False,
) -> None:
    """Turns what EXIF asks to turn, converts what trainers do not list or misread, and sets aside what is broken, tiny
    or there twice, with its captions. Without --apply it only shows. What files were stays in the folder's .set-aside.
    """
    from kohya_bucket.images import mend_log, mending
    from kohya_bucket.images.code_pages import WESTERN

    if apply and undo:
        raise KohyaBucketError("--apply and --undo exclude each other: give one of them")
    tell = (lambda _: None) if quiet else say
    if undo:
        outcome = mend_log.undo(folder)
        tell(f"{counted(outcome.done, 'file')} put back as they were, from {outcome.run}")
        _end(outcome.failed, "not put back")
        return
    try:
        b"a".decode(captions_in or WESTERN)
    except UnicodeError:
        pass  # it needs more bytes
    except (LookupError, ValueError):
        raise KohyaBucketError(f"--captions-in is {captions_in!r}, but must be an encoding of text that Python knows: "
                               "cp1252, cp932, gb18030 and so on") from None  # fmt: skip
    with scan_progress("decoding images", quiet=quiet) as progress:
        result = mending.find(
            folder, recursive=recursive, least_side=least_side, encoding=captions_in, progress=progress
        )
    if not quiet:
        say(f"{folder}: {counted(result.images, 'image')} and {counted(result.captions, 'caption')} looked at")
        _show(result.fixes)
        used = captions_in or WESTERN
        if any(one.why.startswith(f"{used}: ") for one in result.fixes):
            say(f"captions that are not UTF-8 are read as {used}; if these look wrong: --captions-in cp932, …")
    left = result.left
    if apply and result.fixes:
        with scan_progress("fixing", quiet=quiet) as progress:
            outcome = mend_log.apply(folder, result.fixes, captions_in or WESTERN, progress)
        tell(f"{counted(outcome.done, 'file')} fixed; what they were is in {outcome.run}, and --undo puts it back")
        left = left + outcome.failed
    elif result.fixes:
        tell(f"nothing is changed yet: --apply does it for {counted(len(result.fixes), 'file')}")
    else:
        tell("nothing to fix")
    _end(left, "left as they are")


def _show(fixes: list[Fix]) -> None:
    counts = Counter(one.mends[0] for one in fixes)
    for mend, count in sorted(counts.items(), key=lambda item: -item[1]):
        say(f"{counted(count, 'file')} {mend.value}")
        say_first([f"{one.path}: {one.why}" for one in fixes if one.mends[0] is mend], 5)


def _end(left: list[tuple[str, str]], what: str) -> None:
    if left:
        say(f"{counted(len(left), 'file')} {what}:", err=True)
        say_first([f"{path}: {why}" for path, why in left], err=True)
        raise typer.Exit(1)
