"""sd-scripts' real training with its latents in object storage: moto's server stands for S3."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
pytest.importorskip("s3fs", reason="s3fs is not installed in this environment")
pytest.importorskip("moto.server", reason="moto[server] is not installed in this environment: no S3 server to ask")

from sdscripts_support import random_sizes, write_images
from training_runs import HERE, train, write_config

from kohya_bucket.latents.maintenance import verify
from kohya_bucket.latents.store.latent_store import LatentStore
from tests.object_storage import Request, s3_server

pytestmark = pytest.mark.slow
COUNT = 7
ADDRESS = "s3://training/latents"
TABLE = f"[kohya_bucket]\nlatent_cache = 'shards'\nlatent_cache_dir = '{ADDRESS}'"
OPTIONS = ("--cache_latents", "--cache_latents_to_disk", "--seed", 7, "--vae_batch_size", 1)


@pytest.fixture
def config(sd_scripts_dir, unpatched, tmp_path):
    write_images(tmp_path / "images", random_sizes(COUNT, 1, 100, 300))
    return write_config(tmp_path, tmp_path / "images", TABLE)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What the server is asked."""
    requests: list[Request] = []
    with s3_server(requests):
        import s3fs

        s3fs.S3FileSystem().mkdir("training")
        monkeypatch.setenv("KOHYA_BUCKET_SHARDS", str(tmp_path / "kept"))
        yield requests


def written(asked):
    """The shards that were written since this was asked last."""
    found = [one.path for one in asked if one.method == "PUT" and "/latents/shards/" in one.path]
    asked.clear()
    return found


def assert_whole():
    store = LatentStore(ADDRESS)
    assert (store.damage, verify(store), len(store)) == ([], [], COUNT)
    assert store.indexed


@pytest.mark.training_run("cached in shards in object storage")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_run_fills_the_bucket_and_the_second_encodes_nothing(
    sd_scripts_dir, config, asked, tmp_path, ranks
):  # fmt: skip
    first, again = twice(sd_scripts_dir, config, tmp_path, "there", ranks, asked)
    for run, _ in (first, again):
        assert len(run.batches[0]) == ranks
        assert f"latents are kept in {ADDRESS}" in run.log
    assert first[1]
    assert again[1] == []
    assert_whole()
    config.write_text(config.read_text(encoding="utf-8").replace(ADDRESS, (tmp_path / "store").as_posix()), "utf-8")
    # run by run: encoding draws from the trainer's random numbers
    here = twice(sd_scripts_dir, config, tmp_path, "here", ranks, asked)
    assert [run.tensors for run, _ in here] == [run.tensors for run, _ in (first, again)]


def twice(sd_scripts_dir, config, folder, name, ranks, asked):
    """Two runs, each with the shards that it wrote to object storage."""
    runs = []
    for number in range(2):
        run = train(
            sd_scripts_dir, config, "--max_train_steps", 4, *OPTIONS, out=folder / f"{name}{number}", ranks=ranks
        )
        run.assert_trained(4)
        runs.append((run, written(asked)))
    return runs


VAE = """
import sys
from library import model_util
_, vae, _ = model_util.load_models_from_stable_diffusion_checkpoint(False, "")
vae.save_pretrained(sys.argv[1])
"""


def run(*command: str, cwd: Path, path: str) -> str:
    environment = {**os.environ, "PYTHONPATH": path, "SMALL_MODELS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.training_run("from object storage that precompute filled")
def test_what_precompute_put_into_the_bucket_is_trained(sd_scripts_dir, config, asked, tmp_path):
    small = os.pathsep.join([str(HERE / "small_models"), str(HERE.parent), str(HERE), str(sd_scripts_dir)])
    run("-c", VAE, str(tmp_path / "vae"), cwd=sd_scripts_dir, path=small)
    options = ("--vae", str(tmp_path / "vae"), "--arch", "sd", "--dtype", "float32", "--device", "cpu")
    said = run("-m", "kohya_bucket", "precompute", "--config", str(config), *options, "--output", ADDRESS,
               cwd=tmp_path, path=str(HERE.parent))  # fmt: skip
    assert f"{COUNT} encoded, 0 were current, 0 failed" in said
    assert written(asked)
    done = train(sd_scripts_dir, config, "--max_train_steps", 4, *OPTIONS, out=tmp_path / "out")
    done.assert_trained(4)
    assert written(asked) == []
    assert_whole()


def assert_said(done, *words):
    """One line, and no traceback; words that it has."""
    assert done.status not in (0, None)
    assert "Traceback" not in done.log
    (line,) = [part for part in done.log.split("kohya_bucket: ")[1:] if "s3://" in part]
    for word in words:
        assert word in line, line


def test_a_bucket_that_is_not_there_is_said(sd_scripts_dir, config, asked, tmp_path):
    config.write_text(config.read_text(encoding="utf-8").replace("s3://training", "s3://absent"), "utf-8")
    done = train(sd_scripts_dir, config, "--max_train_steps", 1, *OPTIONS, out=tmp_path / "out")
    assert_said(done, "s3://absent/latents", "no such bucket")


def test_without_an_account_that_is_said(sd_scripts_dir, config, asked, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    done = train(sd_scripts_dir, config, "--max_train_steps", 1, *OPTIONS, out=tmp_path / "out")
    assert_said(done, ADDRESS, "check your access to it")


def test_without_s3fs_that_is_said(sd_scripts_dir, config, asked, tmp_path, monkeypatch):
    (tmp_path / "without" / "s3fs").mkdir(parents=True)
    (tmp_path / "without" / "s3fs" / "__init__.py").write_text("raise ImportError('no s3fs')", encoding="utf-8")
    before = os.environ.get("KOHYA_BUCKET_ACCELERATE", "")
    monkeypatch.setenv(
        "KOHYA_BUCKET_ACCELERATE", os.pathsep.join(filter(None, [before, str(tmp_path / "without")]))
    )  # fmt: skip
    done = train(sd_scripts_dir, config, "--max_train_steps", 1, *OPTIONS, out=tmp_path / "out")
    assert_said(done, "s3:// cannot be read here", "pip install s3fs")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_server_that_goes_away_while_a_run_trains_is_said(sd_scripts_dir, config, tmp_path, monkeypatch, workers):
    """Where this node keeps no shards; those that it has are trained without the server."""
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS_GB", "0")
    records = tmp_path / "out-batches" / "rank0.jsonl"
    started, ended = threading.Event(), threading.Event()

    def serve():
        with s3_server():
            import s3fs

            s3fs.S3FileSystem().mkdir("training")
            started.set()
            while not ended.is_set() and not (records.exists() and records.stat().st_size):
                ended.wait(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        while not started.wait(0.05):
            assert thread.is_alive(), "the server did not start"
        done = train(sd_scripts_dir, config, "--max_train_steps", 1000, *OPTIONS,
                     "--max_data_loader_n_workers", workers, out=tmp_path / "out")  # fmt: skip
    finally:
        ended.set()
        thread.join()
    assert json.loads(records.read_text(encoding="utf-8").splitlines()[0])["images"]
    assert_said(done, f"{ADDRESS}/shards/", "cannot be read", "tries in", "or try again later")
