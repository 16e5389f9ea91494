"""Status, verify, prune and pack: nothing whole is lost, nothing broken is kept."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents import LatentStore, precompute_latents
from kohya_bucket.latents.maintenance import pack, prune, status, verify
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.writer import StoreWriter
from tests.latents.latent_helpers import SPACE, bits, entry, fill, same
from tests.latents.stub_encoders import MeanEncoder, dataset_of
from tests.thinned import one_in


@pytest.fixture
def root(tmp_path, images):
    run(tmp_path, images)
    return tmp_path / "out"


def run(tmp_path, images, **settings):
    return precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "out", flip=True, **settings)


def everything(root):
    store = LatentStore(root)
    return {store.entry(i).source: (store.entry(i), store.read(i).tobytes(), store.read(i, flipped=True).tobytes())
            for i in range(len(store))}  # fmt: skip


def flip_byte(root, source):
    store = LatentStore(root)
    (i,) = store.find([source])
    info = store.info(i)
    path = store.layout.shards / info.name
    data = bytearray(path.read_bytes())
    data[info.tensors["latents"].offset + store.read(i).nbytes * int(store.column("row")[i]) + 3] ^= 8
    store.release()
    path.write_bytes(data)
    return path


def test_a_healthy_store(root, images):
    state = status(LatentStore(root))
    assert state.healthy
    assert (state.items, state.superseded, state.unindexed) == (len(images), 0, 0)
    assert sum(state.groups.values()) == len(images)
    assert verify(LatentStore(root)) == []


def test_status_names_what_changed_and_what_is_gone(root, images):
    os.utime(images[0], ns=(1, 1))
    images[1].unlink()
    state = status(LatentStore(root))
    assert not state.healthy
    assert (state.changed, state.absent) == ([str(images[0])], [str(images[1])])


def test_an_edit_that_kept_length_and_time_shows_with_content(tmp_path, images):
    run(tmp_path, images, content_hash=True)
    before = images[0].stat()
    data = bytearray(images[0].read_bytes())
    data[-20] ^= 1
    images[0].write_bytes(data)
    os.utime(images[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    store = LatentStore(tmp_path / "out")
    assert status(store).changed == []
    assert status(store, content=True).changed == [str(images[0])]
    assert run(tmp_path, images).encoded == 0
    assert run(tmp_path, images, content_hash=True).reasons == {"the image changed": 1}


def test_a_carried_store_is_healthy_without_its_images(tmp_path, root, images):
    want = everything(root)
    moved = tmp_path / "elsewhere" / "latents"
    moved.parent.mkdir()
    shutil.move(root, moved)
    state = status(LatentStore(moved))
    assert state.no_images
    assert state.healthy
    assert everything(moved) == want
    assert not status(LatentStore(moved), images_root=tmp_path / "images").absent


def test_a_moved_pair_of_store_and_images_stays_current(tmp_path, root, images):
    new = tmp_path / "new"
    new.mkdir()
    shutil.move(root, new / "out")
    shutil.move(tmp_path / "images", new / "images")
    moved = [new / "images" / path.name for path in images]
    assert precompute_latents(dataset_of(moved), MeanEncoder(), new / "out", flip=True).encoded == 0


def assert_mended(tmp_path, root, images, want, lost):
    """What is damaged is taken out and encoded again; the store is as it was."""
    done = prune(LatentStore(root), damaged=True)
    assert len(done.damaged) == 1
    assert set(everything(root).items()) == {item for item in want.items() if item[0] not in lost}
    assert run(tmp_path, images).encoded == len(lost)
    assert everything(root) == want
    assert (verify(LatentStore(root)), status(LatentStore(root)).healthy) == ([], True)
    assert prune(LatentStore(root), damaged=True).damaged == []


@pytest.mark.long
@pytest.mark.parametrize("indexed", [True, False])
def test_a_damaged_item_is_taken_out_and_the_rest_of_its_shard_is_kept(tmp_path, root, images, indexed):
    want = everything(root)
    shard = flip_byte(root, images[3].name)
    if not indexed:
        for manifest in Layout(root).manifests():
            manifest.unlink()
    assert prune(LatentStore(root)).removed == []
    assert_mended(tmp_path, root, images, want, {images[3].name})
    assert not shard.exists()


def test_what_a_truncated_shard_held_is_missing(tmp_path, root, images):
    want = everything(root)
    store = LatentStore(root)
    name = store.info(0).name
    concerned = {store.entry(i).source for i in range(len(store)) if store.info(i).name == name}
    path = store.layout.shards / name
    path.write_bytes(path.read_bytes()[:-50])
    state = status(LatentStore(root))
    assert (state.healthy, state.items) == (False, len(images) - len(concerned))
    assert "truncated" in state.damage[0][1]
    with pytest.raises(LatentStoreError, match=r"prune .* --damaged"):
        pack(LatentStore(root), root / "packed")
    assert_mended(tmp_path, root, images, want, concerned)
    assert not path.exists()


def test_a_shard_that_is_gone_is_encoded_again(tmp_path, root, images):
    want = everything(root)
    flip_byte(root, images[3].name).unlink()
    assert images[3].name in status(LatentStore(root)).damage[0][1]
    assert run(tmp_path, images).encoded > 0
    assert status(LatentStore(root)).healthy
    assert everything(root) == want


def test_files_that_are_not_ours_stay_whatever_is_in_them(root, images):
    shard = sorted(Layout(root).shards.iterdir())[0]
    theirs = [shard.with_name("mine.safetensors"), root / "manifest-of-mine.parquet", root / "quarantine" / shard.name]
    theirs[2].parent.mkdir()
    for path in theirs:
        path.write_bytes(b"theirs")
    prune(LatentStore(root), damaged=True)
    assert [path.read_bytes() for path in theirs] == [b"theirs"] * 3
    assert len(everything(root)) == len(images)


def test_prune_takes_out_replaced_rows_and_leftovers(tmp_path, root, images):
    run(tmp_path, images, dtype="bfloat16")
    want = everything(root)
    shard = next(Layout(root).shards.iterdir()).name
    old, new = (Layout(root).shards / f".{shard}.{k * 12}.tmp" for k in "01")
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    state = status(LatentStore(root))
    assert state.superseded == len(images)
    prune(LatentStore(root))
    assert everything(root) == want
    assert status(LatentStore(root)).superseded == 0
    assert (old.exists(), new.exists()) == (False, True)


def test_prune_takes_out_what_it_is_told(root, images):
    want = everything(root)
    store = LatentStore(root)
    drop = store.find([images[0].name, images[5].name])
    done = prune(store, drop.tolist())
    assert done.dropped == 2
    del want[images[0].name], want[images[5].name]
    assert everything(root) == want


@pytest.mark.long
def test_pack_brings_many_small_shards_into_few(tmp_path):
    names = [f"{i:02d}" for i in range(30)]
    want = {}
    for k in range(0, 30, 3):
        want |= fill(tmp_path, names[k : k + 3])
    want |= fill(tmp_path, names[:2], dtype="float32")
    done = pack(LatentStore(tmp_path))
    store = LatentStore(tmp_path)
    assert done.copied == 30
    assert len(store.shards) == 2
    assert store.strings("source") == names
    assert all(same(store.read(i), want[name]) for i, name in enumerate(names))
    assert status(store).superseded == 0
    assert pack(LatentStore(tmp_path)).copied == 0


@pytest.mark.parametrize(("upkeep", "copied"), [(pack, 24), (lambda store, _: prune(store, range(3)), 9)])
def test_upkeep_holds_the_latents_of_one_shard_at_a_time(tmp_path, monkeypatch, upkeep, copied):
    want, held, add = {}, [], StoreWriter.add
    with StoreWriter(tmp_path / "store") as writer:
        for i in range(24):
            bucket, name = [(64, 32), (32, 64), (64, 64)][i % 3], f"{i:02d}"
            want[name] = bits(i, bucket=bucket)
            flipped = None if i % 2 else bits(i + 24, bucket=bucket)
            made = entry(name, bucket_size=bucket, flip=flipped is not None)
            writer.add(made, want[name], flipped=flipped, space=SPACE)

    def watched(self, *args, **options):
        add(self, *args, **options)
        held.append(len(self._pending))

    monkeypatch.setattr(StoreWriter, "add", watched)
    upkeep(LatentStore(tmp_path / "store"), tmp_path / "copy")
    assert held == [1] * copied
    store = LatentStore(tmp_path / ("copy" if upkeep is pack else "store"))
    assert store.strings("source") == sorted(want)[-len(store) :]
    assert all(same(store.read(i), want[name]) for i, name in enumerate(store.strings("source")))


def test_shards_of_several_stores_are_one_store_side_by_side(tmp_path):
    parts = [tmp_path / "part-1", tmp_path / "part-2"]
    want = {}
    for k, part in enumerate(parts):
        want |= fill(part, [f"s3://bucket/{k}/{i}.jpg" for i in range(5)])
        pack(LatentStore(part))
    for file in (parts[1] / "shards").iterdir():
        shutil.copy(file, parts[0] / "shards")
    for indexed in (False, True):
        store = LatentStore(parts[0])
        assert bool(store.indexed) == indexed
        assert sorted(store.strings("source")) == sorted(want)
        assert all(same(store.read(i), want[name]) for i, name in enumerate(store.strings("source")))
        before = sorted((parts[0] / "shards").iterdir())
        pack(store, shard_bytes=1)
        assert sorted((parts[0] / "shards").iterdir()) == before


def test_a_copy_that_was_interrupted_is_continued(tmp_path, monkeypatch):
    want, add = fill(tmp_path / "store", "abcdef", shard_bytes=1), StoreWriter.add
    added = []

    def full(self, entry, *args, **options):
        if len(added) == 4:
            raise LatentStoreError("the disk is full")
        added.append(entry.source)
        add(self, entry, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "add", full)
        with pytest.raises(LatentStoreError, match="full"):
            pack(LatentStore(tmp_path / "store"), tmp_path / "copy")
    fill(tmp_path / "other", "ab")
    with pytest.raises(LatentStoreError, match="already holds"):
        pack(LatentStore(tmp_path / "other"), tmp_path / "copy")
    pack(LatentStore(tmp_path / "store"), tmp_path / "copy")
    copy = LatentStore(tmp_path / "copy")
    assert all(same(copy.read(i), want[name]) for i, name in enumerate(copy.strings("source")))
    assert (len(copy), copy.replaced_rows(), copy.indexed) == (6, 0, True)
    assert pack(LatentStore(tmp_path / "store"), tmp_path / "copy").copied == 6  # it is whole
    for manifest in copy.layout.manifests()[:1]:  # stopped between its two
        manifest.unlink()
    assert pack(LatentStore(tmp_path / "store"), tmp_path / "copy").copied == 6
    assert len(copy.layout.manifests()) == 2
    fill(tmp_path / "store", "g")
    with pytest.raises(LatentStoreError, match="already holds another"):
        pack(LatentStore(tmp_path / "store"), tmp_path / "copy")


def test_a_damaged_item_is_not_packed(tmp_path, root, images):
    flip_byte(root, images[3].name)
    with pytest.raises(LatentStoreError, match=r"prune .* --damaged"):
        pack(LatentStore(root), tmp_path / "packed")
    assert len(LatentStore(root)) == len(images)


def test_captions_survive_upkeep(tmp_path, root, images):
    precompute_latents(dataset_of(images, ["new"] * len(images)), MeanEncoder(), root, flip=True)
    flip_byte(root, images[3].name)
    prune(LatentStore(root), damaged=True)
    precompute_latents(dataset_of(images, ["new"] * len(images)), MeanEncoder(), root, flip=True)
    pack(LatentStore(root))
    assert LatentStore(root).strings("caption") == ["new"] * len(images)
    assert np.array_equal(LatentStore(root).find([path.name for path in images]), range(len(images)))


def test_prune_writes_where_the_images_are_if_that_was_lost(root, images):
    Layout(root).store_file.unlink()
    prune(LatentStore(root), damaged=True, images_root=images[0].parent)
    assert Layout(root).images_root() == images[0].parent
    assert status(LatentStore(root)).healthy


@pytest.mark.long
@pytest.mark.parametrize("victim", one_in(3, ["header", "entries", "store.json", "manifest", "older manifest"]))
def test_what_an_index_spares_to_read_is_verified_and_taken_out(root, images, command_line, victim):
    """A store with an index is opened without looking into its shards, whose own words are all that is left without."""
    want = everything(root)
    layout = Layout(root)
    store = LatentStore(root)
    assert store.indexed
    manifest = layout.manifests()[0]
    shard = layout.shards / store.info(0).name
    data = bytearray(shard.read_bytes())
    damaged = shard
    if victim == "header":
        data[20] ^= 1
        shard.write_bytes(data)
    elif victim == "entries":
        data[-100] ^= 1
        shard.write_bytes(data)
    elif victim == "store.json":
        damaged = layout.store_file
        damaged.write_text('{"format": "kohya_bucket.latents", "version": 1}')
    else:
        damaged = manifest if victim == "manifest" else manifest.with_name(f"manifest-{0:020d}-0123.parquet")
        damaged.write_bytes(manifest.read_bytes()[:-9])
    code, out, err = command_line("cache", "verify", root)
    assert (code, damaged.name in out) == (1, True)
    assert "Traceback" not in err
    assert command_line("cache", "prune", root, "--damaged", "--image-dir", images[0].parent)[0] == 0
    assert command_line("cache", "verify", root)[0] == 0
    assert everything(root) == want
    assert layout.images_root() == images[0].parent


@pytest.mark.long
@pytest.mark.parametrize("content", ['{"name": "my shop", "version": 3}', "", '{"version": 1, "images": "."}'])
def test_a_store_json_of_somebody_else_is_refused_and_never_replaced(tmp_path, root, images, command_line, content):
    want, layout = everything(root), Layout(root)
    layout.store_file.write_text(content, encoding="utf-8")
    folder = images[0].parent
    code, _, errors = command_line("cache", "prune", root, "--damaged", "--image-dir", folder)
    assert (code, "is not made by kohya-bucket" in errors) == (2, True)
    assert "prune" not in errors  # which would not help
    with pytest.raises(LatentStoreError, match="is not made by kohya-bucket"):
        run(tmp_path, images)
    assert layout.store_file.read_text(encoding="utf-8") == content
    layout.store_file.unlink()
    assert command_line("cache", "prune", root, "--damaged", "--image-dir", folder)[0] == 0
    assert (everything(root), layout.images_root()) == (want, folder)


def test_nothing_is_written_through_a_link_in_a_store(tmp_path, root):
    if os.name == "nt":
        pytest.skip("links need a privilege there")
    elsewhere = tmp_path / "elsewhere"
    layout = Layout(root)
    layout.store_file.unlink()
    layout.store_file.symlink_to(elsewhere)
    with pytest.raises(LatentStoreError, match="is a link to what is not there: remove it"):
        layout.create()
    assert not elsewhere.exists()


def test_a_file_that_cannot_be_removed_is_named_with_the_reason_and_exit_code_1(root, command_line, monkeypatch):
    shard = next((root / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:100])
    unlink = Path.unlink

    def refuse(path, **options):
        if path.name == shard.name:
            raise PermissionError(13, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    code, _, errors = command_line("cache", "prune", root, "--damaged")
    assert (code, f"1 file is not removed: {shard.name} (Permission denied)" in errors) == (1, True)
    assert shard.exists()


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "darwin", reason="files in use can be removed there")
def test_what_is_in_use_is_named_and_nothing_is_copied_twice(root, images, command_line):
    training = LatentStore(root)
    for i in range(len(training)):
        training.read(i)
    images[0].unlink()
    shards = Layout(root).shards
    before = {path.name for path in shards.iterdir()}
    code, out, errors = command_line("cache", "prune", root, "--gone")
    assert (code, "1 item dropped, 0 files removed" in out, "MB more than before" in out) == (1, True, True)
    assert "1 file is not removed" in errors
    assert "close what has it open" in errors
    assert len(LatentStore(root)) == len(images) - 1  # it is dropped all the same
    after = {path.name for path in shards.iterdir()}
    assert len(after - before) == 1
    code, out, _ = command_line("cache", "prune", root, "--gone")
    assert (code, "0 items dropped, 0 files removed" in out) == (1, True)
    assert {path.name for path in shards.iterdir()} == after
    codes = [command_line("cache", "pack", root)[0] for _ in range(3)]
    assert codes[1:] == [1, 1]
    packed = [path.name for path in shards.iterdir()]
    assert command_line("cache", "pack", root)[1].startswith(f"0 items copied; {len(packed)} shards before")
    assert sorted(path.name for path in shards.iterdir()) == sorted(packed)
    training.release()
    code, out, _ = command_line("cache", "prune", root)
    assert (code, "MB freed" in out) == (0, True)
    assert not before & {path.name for path in shards.iterdir()} - after
    assert command_line("cache", "verify", root)[0] == 0
    assert len(LatentStore(root)) == len(images) - 1
