"""Why a file has no size."""

from __future__ import annotations

__all__ = ["UnreadableImageError", "explain_os_error", "in_short", "not_decoded", "not_loaded"]


class UnreadableImageError(Exception):
    """A file whose size cannot be told; the text says why."""


def explain_os_error(error: Exception) -> str:
    """One phrase for what the operating system said, or Python of a path that it does not take."""
    if not isinstance(error, OSError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "a folder, not a file"
    if isinstance(error, PermissionError):
        return "permission denied"
    return error.strerror or in_short(error) or type(error).__name__


def not_decoded(error: BaseException) -> str:
    """What Pillow said of an image that cannot be loaded, in the words that every command and log has for it."""
    return f"cannot be read as an image ({in_short(error)})"


def not_loaded(error: BaseException) -> str:
    """The same of whatever was to be loaded: of anything but an image the kind of error and the first line of it."""
    if isinstance(error, OSError) and error.errno is None:  # Pillow's own, not the system's
        return not_decoded(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def in_short(error: BaseException) -> str:
    """The text of an error, in one line of at most 120 characters."""
    return " ".join(str(error).split())[:120]
