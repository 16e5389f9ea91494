"""Errors that a user can cause. Each says what was wrong, with the value, why it matters, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class KohyaBucketError(ValueError):
    """Base of every error that is caused by input, not by a defect in this package.

    Examples:
        >>> KohyaBuckets(1024, reso_steps=0)
        Traceback (most recent call last):
        kohya_bucket.errors.BucketSettingsError: reso_steps is 0, but must be 1 or more; 64 is usual
    """


class BucketSettingsError(KohyaBucketError):
    """Settings from which no usable bucket set follows."""


class InvalidBucketError(KohyaBucketError):
    """A bucket or bucket set that cannot be trained: non-positive, duplicate, empty, not a multiple.

    Attributes:
        width, height: sides of the bucket that is meant, as they were given; None where it is a set.
        reason: what is wrong.
        duplicates: (width, height) of the buckets that a set holds more than once.
    """

    def __init__(
        self, reason: str = "", *, width: object = None, height: object = None,
        duplicates: Iterable[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.width, self.height, self.reason = width, height, reason
        self.duplicates = sorted(set(duplicates))
        about = f"bucket {width!r}x{height!r}: " if width is not None else ""
        twice = ", ".join(f"{w}x{h}" for w, h in self.duplicates)
        super().__init__(about + (reason or f"a bucket set that holds {twice or 'no bucket'}"))


class ConfigError(KohyaBucketError):
    """A config file that cannot be read or holds a setting that does not exist there.

    Examples:
        >>> load_preset("sdlx")
        Traceback (most recent call last):
        kohya_bucket.errors.ConfigError: preset is 'sdlx', but must be one of ...; the nearest is 'sdxl'
    """


class PlanError(KohyaBucketError):
    """Settings from which no epoch can be planned: a batch size of 0, a policy without what it needs.

    Examples:
        >>> plan_epoch([0, 0, 1], batch_size=0)
        Traceback (most recent call last):
        kohya_bucket.errors.PlanError: batch_size is 0, but must be a whole number of images, 1 or more
    """


class ResumeError(PlanError):
    """A saved position that belongs to other data or other settings than those at hand.

    Examples:
        >>> sampler = BucketBatchSampler([0, 0, 1, 1], batch_size=1)
        >>> other = BucketBatchSampler([0, 0, 1], batch_size=1)
        >>> try:
        ...     other.load_state_dict(sampler.state_dict())
        ... except ResumeError as error:
        ...     print(str(error).partition(";")[0])
        cannot resume at epoch 0, step 0: 4 images, now 3
    """


class LatentStoreError(KohyaBucketError):
    """A latent store or cache file that cannot be read, written or trusted.

    Examples:
        >>> BucketedLatentDataset("photos")
        Traceback (most recent call last):
        kohya_bucket.errors.LatentStoreError: ...photos is not a latent store: ...
    """


class StorageError(KohyaBucketError):
    """Object storage that does not answer, refuses, or lacks what is needed."""


class UnreadableError(KohyaBucketError):
    """A file that is there and cannot be read now: nothing is known of what is in it, and whatever needs that ends."""


class OddFileError(OSError):
    """Something other than a file in the place of one: `strerror` says what."""


class TooLongError(OddFileError):
    """A file that is longer than one of its kind can be."""


class FileChangedError(KohyaBucketError):
    """A container of images that has changed since it was looked at."""


_LASTING = {
    errno.ELOOP: "is a link that leads in a circle, or through too many others: correct it",
    errno.ENODEV: "cannot be mapped into memory on its file system: copy it to another disk",
}  # all others may pass


def may_pass(error: BaseException) -> bool:
    """Whether what could not be read may be readable later: nothing is known of what is in it."""
    if isinstance(error, (StorageError, UnreadableError)):
        return True
    lasting = FileNotFoundError, NotADirectoryError, OddFileError
    return (
        isinstance(error, OSError)
        and error.errno not in {None, errno.ENAMETOOLONG, *_LASTING}  # errors of parsers have no number
        and not isinstance(error, lasting)
    )


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Around whatever asks the system for a file: its refusals become `UnreadableError`, which says whether they may
    pass.

    `FileNotFoundError` passes as it is, and so do errors of parsers. A name that is longer than the file system takes,
    and a path through a file, are those of a file that is not there.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG or isinstance(error, NotADirectoryError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        if error.errno is None:
            raise
        if error.errno in _LASTING:
            raise UnreadableError(f"{path}: {_LASTING[error.errno]}") from error
        if isinstance(error, OddFileError):
            raise UnreadableError(f"{path}: is {error.strerror}, where a file is needed: move it away") from error
        raise UnreadableError(
            f"{path}: cannot be read now ({error.strerror}); probably temporary, nothing was changed: run again"
        ) from error


@contextmanager
def as_damage(what: str, remedy: str = "", *, error: type[KohyaBucketError] = LatentStoreError) -> Iterator[None]:
    """Around the reading of a file that anybody may have changed: whatever a parser raises at it becomes `error`.

    The message is one line: `what`, why, and `remedy`. Errors of this package and `FileNotFoundError` pass as they are.
    """
    try:
        yield
    except (KohyaBucketError, FileNotFoundError):
        raise
    except Exception as problem:  # parsers of foreign formats have no common one, and some exhaust stack or memory
        why = " ".join(str(problem).split()) or type(problem).__name__
        raise error(f"{what}: {why[:300]}{remedy and '; '}{remedy}") from problem


_ELSEWHERE = "choose another folder"
_REASONS = {
    errno.ENOSPC: "the disk is full; everything finished before is safe: free some space and run again",
    errno.EDQUOT: "the disk quota is used up; everything finished before is safe: free some space and run again",
    errno.EFBIG: "the file is larger than the file system or a limit of this account (ulimit -f) allows",
    errno.EROFS: f"the file system is read-only; {_ELSEWHERE}",
    errno.EACCES: f"it is not writable, or held open by a program; change its permissions or {_ELSEWHERE}",
    errno.EPERM: f"the folder or file is not writable; change its permissions or {_ELSEWHERE}",
    errno.ENOENT: "its folder does not exist",
    errno.ENAMETOOLONG: "its name is longer than the file system allows: shorten it",
    errno.EXDEV: "it lies on another disk",
}


def why_not_written(error: OSError, elsewhere: str = _ELSEWHERE) -> str:
    """What kept a file from being written, and what to do, as the end of a message; `elsewhere`: how to write to
    another place."""
    return _REASONS.get(error.errno or 0, error.strerror or str(error)).replace(_ELSEWHERE, elsewhere)
