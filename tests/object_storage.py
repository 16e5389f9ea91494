"""An S3 server in this process, over its real protocol."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kohya_bucket.images.files import remote
from kohya_bucket.latents.remote import quick_ranges

__all__ = ["s3_server"]


def forget_clients() -> None:
    """Let go of what asks a server at another place."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    remote._system.cache_clear()
    quick_ranges._reader.cache_clear()
    quick_ranges._left_to_fsspec.clear()


@contextmanager
def s3_server() -> Iterator[str]:
    """Its address, which the environment names meanwhile; skips where there is none to start."""
    server_module = pytest.importorskip("moto.server", reason="moto[server] is not installed: no S3 server to ask")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    account = {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    before = dict(os.environ)
    os.environ.update(account)
    forget_clients()
    try:
        yield account["AWS_ENDPOINT_URL"]
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(before)
        forget_clients()
