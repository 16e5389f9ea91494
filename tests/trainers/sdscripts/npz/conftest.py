"""The images that these tests share with those of latents."""

from tests.latents.conftest import images  # noqa: F401
