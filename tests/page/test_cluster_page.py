"""The walk in docs/scale.md, as it stands there: encoded on Ray, trained on two nodes, gone on with on one."""

import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import accelerate
import numpy as np
import pytest
import torch

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

from kohya_bucket import BucketBatchSampler, BucketedLatentDataset  # noqa: E402
from kohya_bucket.latents.maintenance import pack, verify  # noqa: E402
from kohya_bucket.latents.store.latent_store import LatentStore  # noqa: E402
from tests.command_line import encoded_counts  # noqa: E402
from tests.latents.latent_helpers import fill  # noqa: E402
from tests.latents.stub_encoders import make_images  # noqa: E402
from tests.object_storage import Request, s3_server  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- (?:commands|file): (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
SHAPES, SHARES = [(100, 60), (60, 100), (64, 64)], [0.5, 0.3, 0.2]
IMAGES, GLOBAL_BATCH, SAVE_EVERY = 72, 8, 4
HOLD_AT = 7  # steps 1 to 6 are trained, and saved after step 4


def commands(block: str, **words: str) -> list[list[str]]:
    """The arguments of each line, without the program; words of the page are replaced."""
    lines = [shlex.split(line)[1:] for line in BLOCKS[block].splitlines()]
    return [[words.get(word, word) for word in line] for line in lines]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return []


@pytest.fixture(scope="module")
def bucket(requests, tmp_path_factory):
    """The page's bucket with images in it; `requests` is what its server is asked."""
    with s3_server(requests):
        import s3fs

        rng = np.random.default_rng(0)
        sizes = [SHAPES[int(shape)] for shape in rng.choice(len(SHAPES), IMAGES, p=SHARES)]
        bucket = s3fs.S3FileSystem()
        bucket.mkdir("training")
        for path in make_images(tmp_path_factory.mktemp("pictures"), sizes):
            bucket.put_file(str(path), f"training/images/{path.name}")
            bucket.pipe_file(f"training/images/{path.stem}.txt", f"caption of {path.name}".encode())
        yield bucket


@contextmanager
def ray_cluster() -> Iterator[dict[str, str]]:
    """Variables that name a cluster of two local nodes."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            yield {"RAY_ADDRESS": cluster.address}
        finally:
            cluster.shutdown()


def run(*command: str, **variables: str) -> str:
    """What a command prints, which ends well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, encoding="utf-8", timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said(bucket, tmp_path_factory):
    """What the page's commands print as they write the store, and on what: without Ray, on this machine."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from tests.latents.test_diffusers_vae import model

    model("sdxl").save_pretrained(vae := tmp_path_factory.mktemp("vae"))
    encode, packed = commands("encode", **{"stabilityai/sdxl-vae": str(vae), "1024": "64"})
    encode += ["--min-bucket-reso", "32", "--max-bucket-reso", "128", "--bucket-reso-steps", "16"]
    encode += ["--dtype", "float32", "--device", "cpu", "--encode-batch-size", "4"]
    program = ["-m", "kohya_bucket"]
    if importlib.util.find_spec("ray") and sys.platform != "win32":
        with ray_cluster() as variables:
            told = "ray", run(*program, *encode, "--concurrency", "2", **variables)
    else:
        at = encode.index("--engine")
        told = "local", run(*program, *encode[:at], *encode[at + 2 :])
    run(*program, *packed)
    return told


@pytest.fixture
def store(said):
    """The page's store, with shards as small as its images."""
    store = LatentStore("s3://training/latents")
    pack(store, shard_bytes=8000)
    return LatentStore("s3://training/latents")


@pytest.mark.slow
def test_images_are_encoded_on_ray(said, store):
    engine, printed = said
    if engine != "ray":
        pytest.skip("Ray is not installed, or does not run here")
    assert encoded_counts(printed) == (IMAGES, 0, 0)
    assert (store.damage, verify(store), len(store)) == ([], [], IMAGES)
    assert store.strings("source") == [f"s3://training/images/img_{i:03d}.png" for i in range(IMAGES)]
    assert store.strings("caption") == [f"caption of img_{i:03d}.png" for i in range(IMAGES)]


class Launch:
    """The ranks of one node as torchrun starts them, and the folder that this node keeps shards in."""

    def __init__(self, node: int, folder: Path, options: list[str], hold_at: int = 0) -> None:
        self.node, self.records = node, folder / "records"
        self.records.mkdir(exist_ok=True)
        at = options.index("train.py")
        program = folder / "train.py"
        program.write_text(BLOCKS["train.py"], encoding="utf-8")
        arguments = [str(Path(__file__).with_name("cluster_rank.py")), str(self.records), str(hold_at), str(program)]
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "", "AWS_ACCESS_KEY_ID": f"node{node}",
            "KOHYA_BUCKET_SHARDS": str(folder / f"kept{node}"),
        }  # fmt: skip
        with open(folder / f"log{node}", "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options[:at], *arguments, *options[at + 1 :]],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self, pids: list[int]) -> None:
        """All at once, as when a machine fails."""
        for pid in (self.process.pid, *pids):
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        self.process.wait()


def lines(records: Path) -> list[list[dict]]:
    """Per rank, what it trained, in order."""
    files = sorted(records.glob("rank*.jsonl"))
    return [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]


def until(happened, processes) -> None:
    deadline = time.monotonic() + 1800
    while not happened():
        assert all(process.poll() is None for process in processes), "a node ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps_of(ranks: list[list[dict]]) -> list[list[str]]:
    """The images of each step; all ranks trained as many steps, and latents of one shape in each."""
    out = []
    for together in zip(*ranks, strict=True):
        assert len({tuple(line["shape"]) for line in together}) == 1
        assert len({line["step"] for line in together}) == 1
        out.append(sorted(image for line in together for image in line["images"]))
    return out


def downloads(requests: list[Request], store: LatentStore) -> Counter[tuple[int, str]]:
    """How often each node asked for each shard as a whole."""
    whole = {(f"/training/latents/shards/{name}", f"bytes=0-{info.nbytes - 1}"): name
             for name, info in store.shards.items()}  # fmt: skip
    return Counter(
        (int(one.account[-1]), whole[one.path, one.range])
        for one in requests if one.account.startswith("node") and (one.path, one.range) in whole
    )  # fmt: skip


def kept(folder: Path, node: int) -> set[str]:
    return {path.name for path in (folder / f"kept{node}").glob("*/*/*.safetensors") if path.name[0] != "."}


def shards_of(store: LatentStore, ranks: list[list[dict]]) -> set[str]:
    """Those that hold what some ranks trained."""
    shard = dict(zip(store.strings("source"), store.strings("shard"), strict=True))
    return {shard[image] for rank in ranks for line in rank for image in line["images"]}


@pytest.mark.slow
def test_a_node_is_killed_and_the_other_one_goes_on_alone(store, bucket, requests, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = commands("train", **{"10.0.0.1": "127.0.0.1", "29500": port})
    both = [Launch(node, tmp_path, options[node], HOLD_AT) for node in (0, 1)]
    records, processes = both[0].records, [launch.process for launch in both]
    try:
        # every rank is done with the step before, and each node has what it reads from
        until(lambda: len(list(records.glob("held*"))) == 2, processes)
        until(lambda: [len(rank) for rank in lines(records)] == [HOLD_AT - 1] * 4, processes)
        ranks = lines(records)
        until(lambda: all(shards_of(store, ranks[2 * n : 2 * n + 2]) <= kept(tmp_path, n) for n in (0, 1)), processes)
        both[1].kill([int(file.read_text(encoding="utf-8")) for file in records.glob("held*")])
        assert processes[0].wait(1800) != 0  # its ranks end too
    finally:
        for process in processes:
            process.kill()
    assert lines(records) == ranks
    first = steps_of(ranks)
    saved = torch.load(io.BytesIO(bucket.cat_file("training/checkpoint.pt")))["position"]
    assert (saved["epoch"], saved["step"]) == (0, SAVE_EVERY)
    before = downloads(requests, store)
    assert set(before.values()) == {1}
    nodes = [shards_of(store, ranks[2 * node : 2 * node + 2]) for node in (0, 1)]
    assert len(nodes[0] & nodes[1]) <= len(SHAPES)  # of each bucket one
    assert all(nodes[node] <= {name for of, name in before if of == node} for node in (0, 1))
    had = kept(tmp_path, 0)

    records.rename(tmp_path / "before")
    (alone,) = commands("again")
    assert Launch(0, tmp_path, alone).process.wait(1800) == 0, (tmp_path / "log0").read_text(encoding="utf-8")
    ranks = lines(records)
    assert len(ranks) == 2
    second = steps_of(ranks)
    whole = plan_of(store, epoch=0)
    assert first == whole[: HOLD_AT - 1]
    assert second == whole[SAVE_EVERY:] + plan_of(store, epoch=1)
    once = Counter(image for step in first[:SAVE_EVERY] + second[: len(whole) - SAVE_EVERY] for image in step)
    again = Counter(image for step in first[SAVE_EVERY:] for image in step)
    assert once == Counter(store.strings("source"))
    assert again == Counter(image for step in whole[SAVE_EVERY : HOLD_AT - 1] for image in step)
    after = downloads(requests, store)
    assert set(after.values()) == {1}  # of both runs, for each node
    assert {name for node, name in (after - before)} & had == set()
    assert kept(tmp_path, 0) <= {name for node, name in after if node == 0}


def plan_of(store: LatentStore, epoch: int) -> list[list[str]]:
    """The images of each step of an epoch."""
    data = BucketedLatentDataset(store.layout.root)
    sampler = BucketBatchSampler(data, GLOBAL_BATCH, order="local", nodes=2)
    sampler.set_epoch(epoch)
    plan, names = sampler.plan(), store.strings("source")
    assert plan.ledger().missed == 0
    return [sorted(names[i] for i in plan.step_indices(step)) for step in range(plan.steps)]


@pytest.mark.long
def test_the_program_goes_on_where_it_was_saved(tmp_path, monkeypatch):
    """In one process, with a store in a folder: it ends, and started again it has nothing to do."""
    fill(tmp_path / "latents", [f"{i:02d}" for i in range(20)], dtype="float32")
    program = tmp_path / "train.py"
    program.write_text(BLOCKS["train.py"], encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(program), str(tmp_path / "latents"), str(tmp_path / "checkpoint.pt")])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    trained = []
    for _ in range(2):
        found = runpy.run_path(str(program), run_name="__main__")
        trained.append((found["sampler"].epoch, "batch" in found))
        accelerate.state.AcceleratorState._reset_state(True)
    assert trained == [(2, True), (2, False)]
