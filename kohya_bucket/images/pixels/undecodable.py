"""Images whose header is whole and whose pixels are not: found only by decoding them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels.load import NO_IMAGE, load_picture
from kohya_bucket.images.remote import fetched

__all__ = ["undecodable"]


def undecodable(paths: Sequence[str], progress: Progress | None = None) -> list[tuple[str, str]]:
    """(path, reason) of the images that cannot be loaded as training loads them, in the order of `paths`.

    All are decoded, on as many threads as there are processors; only a few at a time are in memory.
    """
    threads = os.cpu_count() or 1
    found = []
    with ThreadPoolExecutor(threads, "kohya-bucket-decode") as pool:
        try:
            rest = iter(paths)
            done = 0
            while some := list(islice(rest, 16 * threads)):
                for path, reason in zip(some, pool.map(_why_not, some), strict=True):
                    if reason:
                        found.append((path, reason))
                done += len(some)
                if progress is not None:
                    progress(done, len(paths))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _why_not(path: str) -> str:
    try:
        load_picture(fetched(path))
    except KohyaBucketError as error:
        return str(error)
    except NO_IMAGE as error:
        return f"cannot be read as an image ({error})"
    return ""
