"""Why a file has no size."""

from __future__ import annotations

__all__ = ["UnreadableImageError", "explain_os_error", "in_short"]


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


def in_short(error: BaseException) -> str:
    """The text of an error, in one line of at most 120 characters."""
    return " ".join(str(error).split())[:120]
