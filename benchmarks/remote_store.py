"""A store in object storage, measured beside plain requests for the same bytes, from a server on this machine.

    python benchmarks/remote_store.py [--items 400] [--table-items 1000000] [--rounds 5] [--output FILE]

The server is moto's, a process of its own that speaks S3: it is written in Python and takes most of the time, so the
numbers say what reading through a store adds to requests, not what a network gives. Every round reads the same batches
of 8 SDXL latents (1024x1024, bfloat16, 131 KB each), in random order, once in each way; the ways take turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from origin import commit

from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.storage import storage_of
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest

BUCKET = (1024, 1024)
PRINT = Fingerprint(1, 2, "", "vae", BUCKET, BUCKET, (0, 0), "area/cv2", "bfloat16")
BATCH = 8
FIRST_BATCH = """
import json, sys, time
began = time.perf_counter()
import numpy as np
from kohya_bucket import BucketedLatentDataset
imported = time.perf_counter()
dataset = BucketedLatentDataset(sys.argv[1])
opened = time.perf_counter()
batch = np.random.default_rng(0).integers(0, len(dataset), 8).tolist()
assert len(dataset.__getitems__(batch)) == 8
took = time.perf_counter() - opened
print(json.dumps([imported - began, opened - imported, took, time.process_time(), len(dataset)]))
"""


@contextmanager
def server(folder: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    os.environ.update(
        AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any", AWS_DEFAULT_REGION="us-east-1", AWS_ENDPOINT_URL=address
    )
    with (folder / "server.txt").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
        try:
            while True:
                try:
                    urllib.request.urlopen(address, timeout=60).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            process.wait()


def fill(address: str, n: int, shard_bytes: int, latents: np.ndarray) -> LatentStore:
    with StoreWriter(address, flush_seconds=None, shard_bytes=shard_bytes) as writer:
        for i in range(n):
            name = hashlib.blake2b(str(i).encode(), digest_size=8).hexdigest()
            entry = StoreEntry(f"{name}.png", PRINT, BUCKET, (0, 0, 1024, 1024))
            writer.add(entry, latents[i % len(latents)], space=LatentSpace(0.13025))
    write_manifest(LatentStore(address))
    return LatentStore(address)


def ways(address: str, endpoint: str, store: LatentStore, kept: Path) -> dict[str, object]:
    """What reads the items of a batch, by name."""
    system, _ = storage_of(address)
    row = store.column("row")
    places = []
    for i in range(len(store)):
        info = store.info(i)
        each = info.latents.nbytes // info.latents.shape[0]
        start = info.latents.offset + int(row[i]) * each
        places.append((str(store.layout.shards / info.name).removeprefix("s3://"), start, start + each))

    def requests(batch: list[int]) -> None:
        paths, starts, stops = zip(*(places[i] for i in batch), strict=True)
        assert all(len(data) == 131072 for data in system.cat_ranges(list(paths), list(starts), list(stops)))

    out: dict[str, object] = {
        "s3fs, plain ranged requests": requests,
        "store, nothing kept": store.gather,
    }
    import boto3

    client, pool = boto3.client("s3"), ThreadPoolExecutor(BATCH)

    def one(place):
        bucket, _, key = place[0].partition("/")
        return client.get_object(Bucket=bucket, Key=key, Range=f"bytes={place[1]}-{place[2] - 1}")["Body"].read()

    def boto(batch: list[int]) -> None:
        assert all(len(data) == 131072 for data in pool.map(one, [places[i] for i in batch]))

    out["boto3, 8 threads"] = boto
    try:
        from obstore import get_range
        from obstore.store import S3Store

        rust = S3Store(address.removeprefix("s3://").split("/")[0], endpoint=endpoint, region="us-east-1",
                       client_options={"allow_http": True})  # fmt: skip

        def obstore(batch: list[int]) -> None:
            def get(place):
                return get_range(rust, place[0].partition("/")[2], start=place[1], end=place[2])

            assert all(len(data) == 131072 for data in pool.map(get, [places[i] for i in batch]))

        out["obstore, 8 threads"] = obstore
    except ImportError:
        pass
    os.environ["KOHYA_BUCKET_SHARDS"], os.environ["KOHYA_BUCKET_SHARDS_GB"] = str(kept), "10"
    near = LatentStore(address)
    for i in range(len(near)):
        near.gather([i])
    while len(list(kept.glob("*/*/[0-9]*.safetensors"))) < len(near.shards):
        time.sleep(0.1)
    out["store, shards kept on the node"] = near.gather
    os.environ["KOHYA_BUCKET_SHARDS_GB"] = "0"
    return out


def rates(found: dict[str, object], items: int, rounds: int) -> dict[str, list[float]]:
    random = np.random.default_rng(0)
    measured: dict[str, list[float]] = {name: [] for name in found}
    for k in range(rounds + 1):
        order = random.permutation(items).tolist()
        names = list(found)
        for name in names[k % len(names) :] + names[: k % len(names)]:
            start = time.perf_counter()
            for at in range(0, items, BATCH):
                found[name](order[at : at + BATCH])
            if k:  # the first round opens connections
                measured[name].append(items / (time.perf_counter() - start))
    return measured


def gathers(endpoint: str, folder: Path, items: int, rounds: int) -> str:
    latents = np.random.default_rng(0).integers(0, 1 << 16, (64, 4, 128, 128), dtype=np.uint16)
    store = fill("s3://bench/latents", items, 16 << 20, latents)
    measured = rates(ways("s3://bench/latents", endpoint, store, folder / "kept"), items, rounds)
    plain = measured["s3fs, plain ranged requests"]
    lines = ["| | items/s | of plain ranged requests |", "| --- | ---: | ---: |"]
    for name, found in measured.items():
        shares = [a / b for a, b in zip(found, plain, strict=True)]
        lines.append(f"| {name} | {statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f}) | "
                     f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f}) |")  # fmt: skip
    return (
        "\n".join(lines)
        + f"\n\n{items} latents of 131 KB in {len(store.shards)} shards, batches of {BATCH}; {rounds} rounds.\n\n"
    )


def first_batches(folder: Path, items: int) -> str:
    """A store of tiny latents, each with its own name and checksum, in a folder, and its copy in the bucket."""
    here, there = folder / "many", "s3://bench/many"
    small = np.random.default_rng(0).integers(0, 1 << 16, (items, 4, 1, 1), dtype=np.uint16)
    many = fill(str(here), items, 8 * 25_000, small)
    storage_of(there)[0].put(str(here), there, recursive=True)
    rows: dict[str, list[list[float]]] = {str(here): [], there: []}
    for _ in range(5):
        for place, measured in rows.items():
            environment = os.environ | {"PYTHONPATH": os.getcwd()}
            done = subprocess.run([sys.executable, "-c", FIRST_BATCH, place], env=environment,
                                  capture_output=True, text=True, check=True)  # fmt: skip
            measured.append(json.loads(done.stdout))
    size = sum(path.stat().st_size for path in here.glob("*.parquet"))
    lines = ["| first batch of 8, in a new process | s, all | importing | opening | the batch | s of CPU, all |",
             "| --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for name, measured in zip(("from a folder", "from the bucket"), rows.values(), strict=True):
        columns = [statistics.median(column) for column in zip(*measured, strict=True)]
        whole = [sum(row[:3]) for row in measured]
        lines.append(f"| {name} | {statistics.median(whole):.1f} ({min(whole):.1f} to {max(whole):.1f}) | "
                     + " | ".join(f"{column:.2f}" for column in columns[:4]) + " |")  # fmt: skip
    return "\n".join(lines) + (
        f"\n\n{items:,} entries in {len(many.shards)} shards, a manifest of {size / 1e6:.0f} MB; medians of 5. "
        "Nothing of the copy in the bucket was on the node.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--table-items", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "remote_store.md")
    options = parser.parse_args()
    os.environ["KOHYA_BUCKET_SHARDS_GB"] = "0"
    folder = Path(tempfile.mkdtemp(prefix="remote_store"))
    text = ""
    with server(folder) as endpoint:
        import s3fs

        s3fs.S3FileSystem().mkdir("bench")
        if options.items:
            text += gathers(endpoint, folder, options.items, options.rounds)
        if options.table_items:
            text += first_batches(folder, options.table_items)
    shutil.rmtree(folder)
    text += (
        "\nThe server is written in Python and shares the cores, so a rate says nothing of a network. "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; commit {commit()}.\n"
    )
    print(text)
    options.output.write_text(f"# Stores in object storage\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
