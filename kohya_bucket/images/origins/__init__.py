"""Where the bytes of images are: files, addresses, or containers, which hold many images each."""

from kohya_bucket.images.origins.containers import Container, apart, container_of, in_container
from kohya_bucket.images.origins.origins import Origins

__all__ = ["Container", "Origins", "apart", "container_of", "in_container"]
