"""The version: the one place where it stands. Imports nothing, so that any module and the build may read it."""

__version__ = "0.1.0"
