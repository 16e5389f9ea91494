"""An S3 server in this process, over its real protocol."""

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from kohya_bucket.images import remote
from kohya_bucket.latents.store import storage

__all__ = ["Request", "s3_server"]


class Request(NamedTuple):
    """What a server was asked: by whom (the access key), how, for what, and for which bytes of it."""

    account: str
    method: str
    path: str
    range: str


def forget_clients() -> None:
    """Let go of what asks a server at another place."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    remote._system.cache_clear()
    storage._asking_once.cache_clear()


@contextmanager
def s3_server(asked: list[Request] | None = None) -> Iterator[str]:
    """Its address, which the environment names meanwhile; skips where there is none to start.

    Args:
        asked: every request is added to it.
    """
    server_module = pytest.importorskip("moto.server", reason="moto[server] is not installed: no S3 server to ask")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    importlib.import_module("moto.moto_api._internal").moto_api_backend.reset()  # or the next server has its buckets
    if asked is not None:
        _list_requests(server._server, asked)
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
        server._server.server_close()  # or clients would wait for it
        os.environ.clear()
        os.environ.update(before)
        forget_clients()


def _list_requests(server, asked: list[Request]) -> None:
    answer = server.app

    def listed(environ, start_response):
        account = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
        asked.append(Request(
            account[1] if account else "", environ["REQUEST_METHOD"], environ["PATH_INFO"],
            environ.get("HTTP_RANGE", ""),
        ))  # fmt: skip
        return answer(environ, start_response)

    server.app = listed
