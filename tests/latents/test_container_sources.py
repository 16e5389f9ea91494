"""`precompute` from tars and Parquet files: the latents that the same images give as files."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket import BucketedLatentDataset
from kohya_bucket.latents import LatentStore
from kohya_bucket.latents.vae import diffusers_vae
from tests.command_line import encoded_counts
from tests.latents.containers import cells, make_table, make_tars, with_captions
from tests.latents.stub_encoders import SIZES, MeanEncoder, make_images
from tests.object_storage import Request, s3_server
from tests.thinned import one_in

RULE = ("--vae", "mean", "--dtype", "float32", "--resolution", "64", "--min-bucket-reso", "32", "--max-bucket-reso",
        "128", "--bucket-reso-steps", "16", "--encode-batch-size", "2")  # fmt: skip


@pytest.fixture
def images(tmp_path):
    return with_captions(make_images(tmp_path / "images", SIZES * 2, alpha=True))


@pytest.fixture
def run(monkeypatch, command_line):
    """Runs a command; returns exit code, output and errors. The VAE is a stub."""
    monkeypatch.setattr(diffusers_vae, "load_encoder", lambda *_, **__: MeanEncoder())
    return command_line


def content(store: LatentStore, number: Callable[[str], int]) -> dict[int, tuple]:
    """All that a store has of each image but its name and the time and length of its file, by the image's number."""
    out = {}
    for i in range(len(store)):
        entry = store.entry(i)
        fingerprint = replace(entry.fingerprint, source_bytes=0, source_mtime_ns=0)
        flipped, mask = (fingerprint.flip and store.read(i, flipped=True)), (fingerprint.mask and store.read_mask(i))
        out[number(entry.source)] = (
            replace(entry, source="", fingerprint=fingerprint), store.read(i).tobytes(),
            np.asarray(flipped).tobytes(), np.asarray(mask).tobytes(),
        )  # fmt: skip
    assert len(out) == len(store)
    return out


def row_of(name: str) -> int:
    return int(name.rpartition("#")[2].rpartition("/")[2])


def number_in(name: str) -> int:
    return int(Path(name).stem.rpartition("_")[2])


@pytest.fixture
def sources(tmp_path, images):
    """(arguments, the image's number by its name) of each kind of source."""
    rows = cells(images)
    make_tars(tmp_path / "tars", images, 5)
    (tmp_path / "tables").mkdir()
    for k, start in enumerate((0, 9)):
        part = [row | {"id": k} for row in rows[start : start + 9]]
        make_table(tmp_path / "tables" / f"part-{start}.parquet", part, row_group_size=4, data_page_size=100)
    make_table(tmp_path / "plain.parquet", rows, plain=True, compression="zstd")

    def of_table(name):
        return row_of(name) + (9 if "part-9" in name else 0)

    text = ("--caption-column", "text")
    return {
        "tar": ((tmp_path / "tars" / "*.tar",), number_in),
        "parquet": ((tmp_path / "tables" / "*.parquet", *text), of_table),
        "plain": ((tmp_path / "plain.parquet", *text), of_table),
    }


@pytest.mark.long
def test_the_same_images_give_the_same_latents(run, tmp_path, images, sources) -> None:
    options = (*RULE, "--flip", "--mask", "--hash")
    assert run("precompute", tmp_path / "images", *options, "-o", tmp_path / "of-files")[0] == 0
    want = content(LatentStore(tmp_path / "of-files"), number_in)
    assert len(want) == 16
    assert want[2][0].caption == "caption 2 é"
    assert want[15][0].caption is None
    for name, (arguments, number) in sources.items():
        code, out, err = run("precompute", *arguments, *options, "-o", tmp_path / name)
        assert (code, encoded_counts(out)) == (0, (16, 0, 0)), (name, out, err)
        assert content(LatentStore(tmp_path / name), number) == want, name
        assert encoded_counts(run("precompute", *arguments, *options, "-o", tmp_path / name)[1])[:2] == (0, 16)
    named = {kind: sorted(LatentStore(tmp_path / kind).strings("source"))[0] for kind in sources}
    assert named == {
        "tar": "shard-0000.tar#./part/img_000", "parquet": "part-0.parquet#0", "plain": "plain.parquet#0",
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_commands_and_data_sets_know_images_in_containers(run, tmp_path, images, sources, kind) -> None:
    (arguments, number), out = sources[kind], tmp_path / "out"
    assert run("precompute", *arguments, *RULE, "--hash", "-o", out)[0] == 0
    assert run("cache", "status", out, "--hash")[0] == 0
    assert run("cache", "verify", out)[:2] == (0, "16 items read, 0 damaged, 0 files unusable\n")
    dataset = BucketedLatentDataset(out)
    seen = set()
    for i in range(16):
        item = dataset[i]
        k = number(item["path"])
        assert tuple(item["original_size"].tolist()) == (SIZES * 2)[k]
        assert item.get("caption", "") == (f"caption {k} é" if k < 15 else "")
        seen.add(k)
    assert len(seen) == 16
    code, _, err = run("cache", "export", out, "--arch", "sd", "-o", tmp_path / "npz")
    assert (code, err.count("\n"), "in a file with others, where no npz can lie beside it" in err) == (2, 1, True)
    before = content(LatentStore(out), number)
    del dataset, item  # which map the shards
    shard = sorted((out / "shards").iterdir())[0]
    shard.write_bytes(shard.read_bytes()[:-9])
    assert run("cache", "prune", out, "--damaged")[0] == 0
    assert len(LatentStore(out)) < 16
    assert run("precompute", *arguments, *RULE, "--hash", "-o", out)[0] == 0
    assert content(LatentStore(out), number) == before
    assert "0 items dropped" in run("cache", "prune", out, "--gone")[1]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize("hashes", one_in(2, [True, False]))
def test_a_changed_container_makes_exactly_its_images_stale(run, tmp_path, images, sources, kind, hashes) -> None:
    (arguments, number), out = sources[kind], tmp_path / "out"
    command = ("precompute", *arguments, *RULE, "-o", out, *(["--hash"] * hashes))
    assert run(*command)[0] == 0
    folder = tmp_path / {"tar": "tars", "parquet": "tables"}[kind]
    changed = sorted(path for path in folder.iterdir() if path.suffix in (".tar", ".parquet"))[1]
    its = {s for s in LatentStore(out).strings("source") if s.startswith(changed.name)}
    assert 0 < len(its) < 16
    os.utime(changed, ns=(1, 1))
    code, text, _ = run("cache", "status", out)
    assert hashes or (code, f"its image changed: {len(its)}; what to do:" in text) == (1, True)
    encoded = 0 if hashes else len(its)  # with hashes it is seen that all images are the same
    assert encoded_counts(run(*command)[1])[:2] == (encoded, 16 - encoded)
    if kind != "tar":
        return
    new = make_images(tmp_path / "new", [(64, 64)] * 16, seed=9)[7]
    shutil.copy(new, images[7])
    shutil.rmtree(folder)
    make_tars(folder, images, 5)
    for path in folder.iterdir():
        if path != changed:
            os.utime(path, ns=(2, 2))
    encoded = 1 if hashes else 16
    assert encoded_counts(run(*command)[1])[:2] == (encoded, 16 - encoded)
    assert content(LatentStore(out), number)[7][0].original_size == (64, 64)
    assert encoded_counts(run(*command)[1])[:2] == (0, 16)


@pytest.mark.long
def test_after_a_kill_only_the_rest_is_encoded(run, tmp_path, images, sources, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    class Dying(MeanEncoder):
        def encode(self, pixels):
            if sum(self.batches) >= 7:
                raise Killed
            return super().encode(pixels)

    for kind in ("tar", "parquet"):
        arguments, _ = sources[kind]
        command = ("precompute", *arguments, *RULE, "-o", tmp_path / kind)
        first, rest = Dying(), MeanEncoder()
        monkeypatch.setattr(diffusers_vae, "load_encoder", lambda *_, one=first, **__: one)
        with pytest.raises(Killed):
            run(*command)
        monkeypatch.setattr(diffusers_vae, "load_encoder", lambda *_, one=rest, **__: one)
        code, out, _ = run(*command)
        assert code == 0
        done = len(LatentStore(tmp_path / kind)) - sum(rest.batches)
        assert 0 < done <= sum(first.batches)
        assert encoded_counts(out)[:2] == (16 - done, done)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_container_that_changes_while_it_is_read_gives_no_image(run, tmp_path, images, sources, monkeypatch, kind):
    arguments, number = sources[kind]
    folder = tmp_path / {"tar": "tars", "parquet": "tables"}[kind]

    class Changing(MeanEncoder):
        """Another program writes what has the same length, once the headers are known."""

        def encode(self, pixels):
            if not self.batches:
                for path in sorted(folder.iterdir()):
                    data = path.read_bytes()
                    status = path.stat()
                    path.write_bytes(data[:600] + data[600:][::-1])
                    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
            return super().encode(pixels)

    monkeypatch.setattr(diffusers_vae, "load_encoder", lambda *_, **__: Changing())
    command = ("precompute", *arguments, *RULE, "-o", tmp_path / "out", "--workers", "1")
    code, _, err = run(*command)
    assert (code, "changed since" in err or "as a table" in err) == (2, True)
    stored = content(LatentStore(tmp_path / "out"), number)
    assert 0 < len(stored) < 16
    want_out = tmp_path / "of-files"
    monkeypatch.setattr(diffusers_vae, "load_encoder", lambda *_, **__: MeanEncoder())
    run("precompute", tmp_path / "images", *RULE, "-o", want_out)
    want = {k: row[1] for k, row in content(LatentStore(want_out), number_in).items()}
    got = {k: row[1] for k, row in stored.items()}
    assert got.items() <= want.items()


def test_containers_in_s3_are_read_by_ranges(run, tmp_path, images) -> None:
    assert run("precompute", tmp_path / "images", *RULE, "-o", tmp_path / "of-files")[0] == 0
    want = content(LatentStore(tmp_path / "of-files"), number_in)
    tars = make_tars(tmp_path / "tars", images, 5)
    table = make_table(tmp_path / "t.parquet", cells(images), row_group_size=7)
    asked: list[Request] = []
    with s3_server(asked):
        import s3fs

        bucket = s3fs.S3FileSystem()
        bucket.mkdir("there")
        for path in (*tars, table):
            bucket.put_file(str(path), f"there/{path.name}")
        for name, source, number, options in (
            ("tars", "s3://there/*.tar", number_in, ()),
            ("table", "s3://there/t.parquet", row_of, ("--caption-column", "text")),
        ):
            out = tmp_path / name
            asked.clear()
            code, text, _ = run("precompute", source, *RULE, *options, "-o", out)
            assert (code, encoded_counts(text)) == (0, (16, 0, 0))
            gets = [one for one in asked if one.method == "GET" and one.path.startswith("/there/")]
            assert gets
            assert all(one.range for one in gets)
            assert len(asked) < 150  # of 16 images with captions, in 4 tars
            assert content(LatentStore(out), number) == want
            assert all(name.startswith("s3://there/") for name in LatentStore(out).strings("source"))
            assert encoded_counts(run("precompute", source, *RULE, *options, "-o", out)[1])[:2] == (0, 16)
            assert run("cache", "status", out)[0] == 0
        make_tars(tmp_path / "others", images, 5, prefix="other/")
        bucket.put_file(str(tmp_path / "others" / tars[2].name), f"there/{tars[2].name}")
        code, text, _ = run("cache", "status", tmp_path / "tars")
        assert (code, "its image changed: 5; what to do:" in text) == (1, True)
        assert encoded_counts(run("precompute", "s3://there/*.tar", *RULE, "-o", tmp_path / "tars")[1])[:2] == (5, 11)
