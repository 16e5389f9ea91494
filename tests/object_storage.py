"""An S3 server in this process, over its real protocol."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["s3_server"]


@contextmanager
def s3_server() -> Iterator[str]:
    """Its address, which the environment names meanwhile; skips where there is none to start."""
    server_module = pytest.importorskip("moto.server", reason="moto[server] is not installed: no S3 server to ask")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
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
    s3fs.S3FileSystem.clear_instance_cache()  # those of another place
    try:
        yield account["AWS_ENDPOINT_URL"]
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(before)
        s3fs.S3FileSystem.clear_instance_cache()
