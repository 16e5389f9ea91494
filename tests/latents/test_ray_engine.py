"""Encoding on a Ray cluster of several nodes: the local engine's shards, whoever is killed."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")
psutil = pytest.importorskip("psutil", reason="psutil is not installed")
if sys.platform == "win32":
    pytest.skip("Ray's clusters of several local nodes are for Linux", allow_module_level=True)

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from kohya_bucket.cli.options import SourceOptions  # noqa: E402
from kohya_bucket.cli.sources import source_in  # noqa: E402
from kohya_bucket.errors import KohyaBucketError  # noqa: E402
from kohya_bucket.latents import LatentStore  # noqa: E402
from kohya_bucket.latents.encode.precompute import StoreOutput, encode_items  # noqa: E402
from kohya_bucket.latents.encode.worker import pieces_of  # noqa: E402
from kohya_bucket.latents.items import EncodeOptions, LatentItems  # noqa: E402
from kohya_bucket.latents.maintenance import verify  # noqa: E402
from kohya_bucket.latents.on_ray import Actors, encode_on_ray  # noqa: E402
from kohya_bucket.latents.store.contents import Assigned  # noqa: E402
from kohya_bucket.latents.store.layout import Layout  # noqa: E402
from kohya_bucket.latents.store.writer import StoreWriter  # noqa: E402
from tests.command_line import encoded_counts  # noqa: E402
from tests.latents import ray_driver  # noqa: E402
from tests.latents.containers import cells, make_table, make_tars, with_captions  # noqa: E402
from tests.latents.latent_helpers import SPACE, bits, entry  # noqa: E402
from tests.latents.ray_encoders import Deadly, Telling, broken, different, told  # noqa: E402
from tests.latents.stub_encoders import SIZES, MeanEncoder, PosteriorStub, dataset_of, make_images  # noqa: E402
from tests.object_storage import s3_server  # noqa: E402

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
BATCH = 2  # and as many images in a piece, of so few


@pytest.fixture(scope="module")
def s3():
    """The address of an S3 server, None where none is installed; whoever starts afterwards asks it."""
    if not all(map(importlib.util.find_spec, ("moto", "flask", "s3fs"))):
        yield None
        return
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def cluster(s3):
    """Three nodes with one processor each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ROOT)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.shutdown()  # of a cluster that a test of another file joined
        made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        for _ in range(2):
            made.add_node(**NODE)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", SIZES * 4, alpha=True)


def items_of(images, rule=None, **encoding):
    data = dataset_of(images, **(rule or {}))
    paths = [str(path) for path in images]
    encoding = EncodeOptions(**{"vae": "mean", "dtype": "float32"} | encoding)
    return LatentItems.from_placement(
        paths, data.sizes, data.placement, encoding, images[0].parent, captions=paths
    )  # fmt: skip


def on_ray(images, output, make, count=2, wanted=None, **options):
    wanted = items_of(images) if wanted is None else wanted
    with Actors(make, count) as crew:
        return encode_on_ray(wanted, crew, output, images[0].parent, **{"batch_size": BATCH} | options)


def rows_of(root):
    """What a store says and holds of each image; everything in it is whole."""
    store = LatentStore(root)
    assert (store.damage, verify(store)) == ([], [])
    return {store.entry(i).source: (store.entry(i), store.read(i).tobytes()) for i in range(len(store))}


@pytest.fixture
def expected(images, tmp_path):
    """The rows that the local engine writes."""
    encode_items(items_of(images), MeanEncoder(), StoreOutput(tmp_path / "local"), images[0].parent, batch_size=BATCH)
    return rows_of(tmp_path / "local")


def when(happened, then):
    """On a thread: wait until something has happened, then do something."""

    def run():
        deadline = time.monotonic() + 120
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.05)
        then()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def same_shards(wanted, root, tmp_path, monkeypatch, encoder=MeanEncoder, **options):
    """Each shard of a store is that of the local engine, byte for byte; gives the sources that it has."""
    store = LatentStore(root / "ray")
    assert store.indexed
    shard_of = dict(zip(store.table["source"].to_pylist(), store.table["shard"].to_pylist(), strict=True))
    compared = set()
    for _, items in pieces_of(wanted, BATCH):
        piece = wanted.subset(items.tolist())
        names = {shard_of[source] for source in piece.sources if source in shard_of}
        if not names:
            continue
        (name,) = names
        with monkeypatch.context() as patch:
            patch.setattr(Layout, "new_shard", lambda self, *_, name=name: self.shards / name)
            encode_items(piece, encoder(), StoreOutput(root / name), tmp_path / "images", batch_size=BATCH, **options)
        assert (root / name / "shards" / name).read_bytes() == (root / "ray" / "shards" / name).read_bytes()
        compared.add(name)
    assert compared == set(Layout(root / "ray").shard_sizes())
    return set(shard_of)


@pytest.mark.parametrize(("encoder", "encoding"), [
    (MeanEncoder, {"flip": True, "mask": True}),
    (PosteriorStub, {"vae": "posterior", "kind": "posterior", "dtype": "bfloat16"}),
    (PosteriorStub, {"vae": "posterior", "dtype": "float16"}),  # sampled
])  # fmt: skip
def test_a_piece_is_the_same_shard_byte_for_byte(cluster, images, tmp_path, monkeypatch, encoder, encoding):
    wanted = items_of(images, **encoding)
    images[5].write_bytes(b"no image")
    report = on_ray(images, tmp_path / "ray", encoder, wanted=wanted, seed=7)
    assert (report.total, report.encoded, report.current) == (32, 31, 0)
    assert [path for path, _ in report.failed] == [str(images[5])]
    found = same_shards(wanted, tmp_path, tmp_path, monkeypatch, encoder, seed=7)
    assert found == {path.name for path in images} - {images[5].name}


def test_again_only_what_is_missing_or_changed(cluster, images, tmp_path, expected):
    out, log = tmp_path / "out", tmp_path / "log"
    on_ray(images[:20], out, partial(Telling, log))
    shown = []
    report = on_ray(images, out, partial(Telling, log), progress_callback=lambda *numbers: shown.append(numbers))
    assert (report.current, report.encoded) == (20, 12)
    assert report.reasons == {"not encoded yet": 12}
    assert shown[0] == (0, 12)
    assert shown[-1] == (12, 12)
    assert sorted(shown) == shown
    assert rows_of(out) == expected
    assert sum(batch.images for batch in told(log)) == 32
    os.utime(images[3], ns=(1, 1))
    assert on_ray(images, out, MeanEncoder).encoded == 1
    assert on_ray(images, out, MeanEncoder).current == 32
    assert LatentStore(out).indexed


def test_a_killed_encoder_loses_only_what_it_had_in_hand(cluster, images, tmp_path, expected):
    log = tmp_path / "log"
    killed = when(lambda: len(told(log)) > 4, lambda: os.kill(told(log)[-1].pid, signal.SIGKILL))
    report = on_ray(images, tmp_path / "out", partial(Telling, log, 0.2), count=1)
    killed.join()
    assert (report.encoded, report.failed) == (32, [])
    assert rows_of(tmp_path / "out") == expected
    assert len({batch.pid for batch in told(log)}) == 2
    assert sum(batch.images for batch in told(log)) <= 32 + 2 * BATCH


def test_a_killed_node_loses_only_what_it_had_in_hand(cluster, images, tmp_path, expected):
    log = tmp_path / "log"

    def working():
        """A node with an encoder on it that is at work, and that is not the driver's."""
        nodes = {node.node_id: node for node in cluster.worker_nodes}
        return [nodes[batch.node] for batch in told(log) if batch.node in nodes]

    gone = []

    def kill():
        gone.append(working()[0])
        cluster.remove_node(gone[0], allow_graceful=False)

    killed = when(working, kill)
    report = on_ray(images, tmp_path / "out", partial(Telling, log, 0.4), count=3)
    killed.join()
    cluster.add_node(**NODE)
    assert gone[0].node_id in {batch.node for batch in told(log)}
    assert (report.encoded, report.failed) == (32, [])
    assert rows_of(tmp_path / "out") == expected
    assert sum(batch.images for batch in told(log)) <= 32 + 2 * BATCH


def test_after_a_killed_driver_the_next_one_does_the_rest(cluster, images, tmp_path, expected):
    out, log = tmp_path / "out", tmp_path / "log"
    each = "2"  # seconds of a batch: both must have begun before one has done all
    command = [sys.executable, "-m", ray_driver.__name__, str(images[0].parent), str(out), str(log), each]
    driver = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "RAY_ADDRESS": cluster.address})

    def both_work():
        batches = told(log)
        return len(batches) > 6 and len({batch.pid for batch in batches}) == 2

    try:
        when(lambda: both_work() or driver.poll() is not None, driver.kill).join()
    finally:
        driver.kill()
        driver.wait()
    pids = {batch.pid for batch in told(log)}
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))  # Ray ends what belongs to a driver
    finished, begun = len(LatentStore(out)), sum(batch.images for batch in told(log))
    assert 0 < finished < 32
    assert begun <= finished + 2 * 2 * BATCH
    report = on_ray(images, out, partial(Telling, log))
    assert (report.current, report.encoded) == (finished, 32 - finished)
    assert sum(batch.images for batch in told(log)) == begun + 32 - finished
    assert rows_of(out) == expected


def test_images_that_end_the_encoder_are_named_and_all_others_encoded(cluster, tmp_path):
    images = make_images(tmp_path / "images", [*SIZES[:1] * 8, (60, 100)])
    wanted = items_of(images)
    deadly = tuple(int(side) for side in wanted.bucket_sizes[8])
    assert (wanted.bucket_sizes[:8] != deadly).any(axis=1).all()
    report = on_ray(images, tmp_path / "out", partial(Telling, tmp_path / "log", 0.0, deadly), count=1)
    assert report.encoded == 8
    assert [path for path, _ in report.failed] == [str(images[8])]
    assert "died every time" in report.failed[0][1]
    assert len(LatentStore(tmp_path / "out")) == 8


def test_an_image_that_ends_who_decodes_it_is_named_and_all_others_encoded(cluster, images, tmp_path):
    wanted = items_of(images)
    wanted = replace(wanted, images=Deadly(**vars(wanted.images), deadly=str(images[9])))
    report = on_ray(images, tmp_path / "out", MeanEncoder, wanted=wanted)
    assert report.encoded == 31
    assert [path for path, _ in report.failed] == [str(images[9])]
    assert "the process that decodes it died repeatedly" in report.failed[0][1]


def test_errors_of_actors_are_raised_as_they_are(cluster, images, tmp_path):
    with pytest.raises(KohyaBucketError, match=r"^vae.safetensors: cannot be read; download it again$"):
        on_ray(images, tmp_path / "out", broken)
    with pytest.raises(KohyaBucketError, match="has other weights than"):
        on_ray(images, tmp_path / "out", different)
    with pytest.raises(KohyaBucketError, match="MeanEncoder has no posterior method"):
        on_ray(images, tmp_path / "out", MeanEncoder, wanted=items_of(images, kind="posterior"))


def test_a_full_disk_keeps_what_is_finished_and_says_what_to_do(cluster, small_disk, tmp_path):
    images = make_images(tmp_path / "images", [(512, 512)] * 30)
    wanted = items_of(images, {"area": (512, 512), "min_size": 64, "max_size": 512, "reso_steps": 64})
    with pytest.raises(KohyaBucketError, match="the disk is full"):
        on_ray(images, small_disk / "out", MeanEncoder, wanted=wanted)
    kept = rows_of(small_disk / "out")
    assert 0 < len(kept) < 30
    assert not list((small_disk / "out").rglob(".*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    report = on_ray(images, small_disk / "out", MeanEncoder, wanted=wanted)
    assert (report.current, report.encoded) == (len(kept), 30 - len(kept))
    assert rows_of(small_disk / "out").items() >= kept.items()


def test_images_in_s3(cluster, s3, images, tmp_path, expected):
    if s3 is None:
        pytest.skip("moto[server] and s3fs are not installed: no S3 server to ask")
    import s3fs

    bucket = s3fs.S3FileSystem()
    bucket.mkdir("pictures")
    for path in images:
        bucket.put_file(str(path), f"pictures/a/{path.name}")
    urls = [f"s3://pictures/a/{path.name}" for path in images]
    data = dataset_of(images)
    wanted = LatentItems.from_placement(
        urls, data.sizes, data.placement, EncodeOptions("mean", "float32"), images[0].parent
    )
    report = on_ray(images, tmp_path / "out", MeanEncoder, wanted=wanted)
    assert (report.encoded, report.failed) == (32, [])
    far = on_ray(images, "s3://pictures/latents", partial(Telling, tmp_path / "log", 0.2), wanted=wanted, count=1)
    assert (far.encoded, far.failed) == (32, [])
    found = rows_of(tmp_path / "out")
    assert rows_of("s3://pictures/latents") == found
    assert bucket.ls("pictures/latents/shards")
    for _ in range(2):  # the first one ended before it could say that it had written
        writer = StoreWriter("s3://pictures/twice", flush_seconds=None, assigned=Assigned(0, "key"))
        writer.add(entry("a.png"), bits(0), space=SPACE)
        writer.flush()
    assert len(LatentStore("s3://pictures/twice").shards) == 1
    assert sorted(found) == urls
    assert {Path(url).name: bits for url, (_, bits) in found.items()} == {
        source: bits for source, (_, bits) in expected.items()
    }
    assert on_ray(images, tmp_path / "out", MeanEncoder, wanted=wanted).current == 32


def test_images_in_containers(cluster, s3, images, tmp_path, monkeypatch, expected):
    """Headers are read and images decoded on the cluster, from folders and from S3."""
    with_captions(images)
    tars = make_tars(tmp_path / "tars", images, 12)
    table = make_table(tmp_path / "t.parquet", cells(images), row_group_size=20)
    kinds = {
        "tars": [str(tmp_path / "tars" / "*.tar")], "parquet": [str(table)],
    }  # fmt: skip
    if s3 is not None:
        import s3fs

        bucket = s3fs.S3FileSystem()
        bucket.mkdir("containers")
        for path in (*tars, table):
            bucket.put_file(str(path), f"containers/{path.name}")
        kinds |= {"far tars": ["s3://containers/*.tar"], "far parquet": ["s3://containers/t.parquet"]}
    placement = dataset_of(images).placement
    want = {int(Path(source).stem.rpartition("_")[2]): bits for source, (_, bits) in expected.items()}
    for kind, named in kinds.items():
        options = SourceOptions() if "tars" in kind else SourceOptions(caption_column="text")
        source = source_in(named, options, recursive=True)
        found, here = source.read("ray", True), source.read("auto", True)
        assert (found.images.names, found.sizes.tolist()) == (here.images.names, here.sizes.tolist())
        assert found.captions == here.captions == [*(f"caption {k} é" for k in range(31)), None]
        wanted = LatentItems.from_placement(
            found.images, found.sizes, placement, EncodeOptions("mean", "float32"), tmp_path / "images",
            captions=found.captions, content_hash=True,
        )  # fmt: skip
        root = tmp_path / "made" / kind
        report = on_ray(images, root / "ray", MeanEncoder, wanted=wanted)
        assert (report.encoded, report.failed) == (32, []), kind
        assert same_shards(wanted, root, tmp_path, monkeypatch) == set(wanted.sources)
        number = dict(zip(wanted.sources, range(32), strict=True))
        assert {number[source]: bits for source, (_, bits) in rows_of(root / "ray").items()} == want
        assert on_ray(images, root / "ray", MeanEncoder, wanted=wanted).current == 32


def test_the_command_says_and_stores_what_it_does_locally(cluster, tmp_path, command_line):
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from tests.latents.test_diffusers_vae import model

    model().save_pretrained(tmp_path / "vae")
    images = make_images(tmp_path / "images", SIZES)
    images[0].with_suffix(".txt").write_text("a caption", encoding="utf-8")
    images[3].write_bytes(images[3].read_bytes()[:200])  # its header is whole
    common = (
        "--vae", tmp_path / "vae", "--arch", "sd", "--dtype", "float32", "--device", "cpu", "--resolution", "64",
        "--min-bucket-reso", "32", "--max-bucket-reso", "128", "--bucket-reso-steps", "16", "--encode-batch-size", "2",
        "--posterior",  # a sample depends on the image's name
    )  # fmt: skip
    far = f"file://{images[0].parent.as_posix()}"
    said = {}
    for name, source, options in (
        ("local", images[0].parent, ()),
        ("ray", images[0].parent, ("--engine", "ray")),
        ("urls", far, ("--engine", "ray", "--concurrency", "2")),
        ("urls-here", far, ()),
    ):  # fmt: skip
        said[name] = command_line("precompute", source, *common, "-o", tmp_path / name, *options)
    codes = {code for code, _, _ in said.values()}
    assert codes == {2}
    for name, (_, out, err) in said.items():
        assert encoded_counts(out) == (7, 0, 1), name
        assert "img_003.png: " in err, name
        assert "1 image could not be encoded, see above; all others are done" in err, name
    want = {Path(source).name: (entry.caption, bits) for source, (entry, bits) in rows_of(tmp_path / "local").items()}
    assert want["img_000.png"][0] == "a caption"
    for name in ("ray", "urls", "urls-here"):
        found = rows_of(tmp_path / name)
        assert {Path(source).name: (entry.caption, bits) for source, (entry, bits) in found.items()} == want, name
    assert all(source.startswith("file:///") for source in rows_of(tmp_path / "urls"))
    make_tars(tmp_path / "tars", images, 3)
    make_table(tmp_path / "t.parquet", cells(images))
    for kind, source in (("tars", tmp_path / "tars" / "*.tar"), ("parquet", tmp_path / "t.parquet")):
        for name, options in ((kind, ()), (f"{kind} on ray", ("--engine", "ray"))):
            code, out, err = command_line("precompute", source, *common, "-o", tmp_path / name, *options)
            assert (code, encoded_counts(out)) == (2, (7, 0, 1)), name
            assert "3: cannot be read" in err, name
        assert rows_of(tmp_path / kind) == rows_of(tmp_path / f"{kind} on ray")
    code, out, _ = command_line("precompute", images[0].parent, *common, "-o", tmp_path / "ray", "--engine", "ray")
    assert (code, encoded_counts(out)) == (2, (0, 7, 1))
    assert command_line("cache", "status", tmp_path / "urls")[0] == 0
