"""Whatever is in a store's files, or in npz, is read as what it is, or refused by this package's own error."""

import io
import json
import os
import random
import shutil
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import MetadataCache
from kohya_bucket.images.metadata_cache import is_metadata_cache
from kohya_bucket.images.tar_index import TarIndex
from kohya_bucket.latents.maintenance import pack, prune, status, verify
from kohya_bucket.latents.store.entries import FORMAT, StoreEntry, arrow, decode
from kohya_bucket.latents.store.exact_arrays import checksum
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout, content_tag
from kohya_bucket.latents.store.shards import read_header
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.trainers.door.sizes import scan_sizes
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz import read_write as npz
from kohya_bucket.trainers.sdscripts.npz.check import ensure_current, holds_npz, npz_entry
from kohya_bucket.trainers.sdscripts.npz.exchange import export_npz, import_npz
from kohya_bucket.trainers.sdscripts.npz.read_write import NOTE, note_of
from tests.hostile import any_bytes, any_json, any_npz, any_table, as_json, npy
from tests.latents.latent_helpers import PRINT, SPACE, bits, entry, fill, stored_fingerprint, why_npz_bad
from tests.latents.text_outputs import fill_texts
from tests.thinned import weekly

FEW, MANY = 5, int(os.environ.get("KOHYA_BUCKET_SEEDS", "30"))
ARCH = replace(ARCHITECTURES["sd"])
BUCKET = (64, 32)


def with_description(table, text: bytes) -> bytes:
    _, _, pq = arrow()
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({FORMAT: text}), out)
    return out.getvalue()


def header_of(shard: bytes) -> tuple[dict, bytes]:
    length = struct.unpack("<Q", shard[:8])[0]
    return json.loads(shard[8 : 8 + length]), shard[8 + length :]


def put_header(header: dict, data: bytes) -> bytes:
    text = as_json(header)
    return struct.pack("<Q", len(text)) + text + data


def put_entries(shard: bytes, entries: bytes) -> bytes:
    """The shard with another description of its rows, whose checksum and place are right."""
    header, data = header_of(shard)
    begin, end = header["entries"]["data_offsets"]
    header["entries"] |= {"shape": [len(entries)], "data_offsets": [begin, begin + len(entries)]}
    header["__metadata__"]["entries_crc32"] = f"{zlib.crc32(entries):08x}"
    return put_header(header, data[:begin] + entries + data[end:])


class Store:
    """A store of three shards, one of which is attacked, with and without an index."""

    open = staticmethod(LatentStore)

    def __init__(self, root: Path) -> None:
        self.good = root / "good"
        self.fill()
        shutil.copytree(self.good, root / "used")
        self.usual = use_store(root / "used", self.open)[1]
        self.shards = sorted(path.name for path in Layout(self.good).shards.iterdir())
        self.root = root / "attacked"

    def fill(self) -> None:
        fill(self.good, ["a", "b", "c"], flip=True)
        with StoreWriter(self.good) as writer:
            mask = np.full((32, 64), 7, np.uint8)
            writer.add(entry("masked", mask=True), bits(9), mask=mask, space=SPACE)
            writer.add(entry("opaque", mask=True), bits(8), space=SPACE)
        fill(self.good, ["d"], dtype="float32")

    def use(self, seed: int) -> str:
        named, refused = use_store(self.attacked(seed), self.open)
        return "named" if named else "as before" if refused == self.usual else "refused"

    def attacked(self, seed: int) -> Path:
        rng = random.Random(seed)
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.good, self.root)
        way = seed % 8
        if way in (5, 6) or rng.random() < 0.4:
            write_manifest(LatentStore(self.root))
        shard = self.root / "shards" / rng.choice(self.shards)
        if way == 0:
            shard.write_bytes(any_bytes(shard.read_bytes(), rng))
        elif way == 1:
            header, data = header_of(shard.read_bytes())
            shard.write_bytes(put_header(any_json(header, rng), data))
        elif way in (2, 3, 4):
            entries = read_header(shard)[1]
            table, description = decode(entries)
            if way == 2:
                made = with_description(any_table(table, rng), json.dumps(description).encode())
            elif way == 3:
                made = with_description(table, as_json(any_json(description, rng)))
            else:
                made = any_bytes(entries, rng)
            shard.write_bytes(put_entries(shard.read_bytes(), made))
        elif way in (5, 6):
            manifest, twin = Layout(self.root).manifests()
            table, description = decode(manifest.read_bytes())
            if way == 5:
                made = with_description(any_table(table, rng), json.dumps(description).encode())
            else:
                made = with_description(table, as_json(any_json(description, rng)))
            if rng.random() < 0.1:
                made = any_bytes(made, rng)
            manifest.unlink()
            twin.unlink()
            manifest.with_name(f"manifest-{9:020d}-{content_tag(made)}.parquet").write_bytes(made)
        else:
            file = self.root / "store.json"
            known = json.loads(file.read_text())
            file.write_bytes(rng.choice([as_json(any_json(known, rng)), any_bytes(file.read_bytes(), rng)]))
        return self.root


class Texts(Store):
    """The same of captions, beside which somebody put latents."""

    open = staticmethod(LatentStore)

    def fill(self) -> None:
        fill_texts(self.good, 3)
        fill_texts(self.good, 1, seed=1)
        fill(self.good, ["a"])

    def attacked(self, seed: int) -> Path:
        if seed % 5 != 4:
            return super().attacked(seed)
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.good, self.root)
        rng = random.Random(seed)
        shards = [self.root / "shards" / name for name in self.shards]
        texts = [shard for shard in shards if "spans" in read_header(shard)[0]]
        put_span(rng.choice(texts), rng, with_checksum=rng.random() < 0.5)
        return self.root


def put_span(shard: Path, rng: random.Random, *, with_checksum: bool) -> None:
    """Change one number of one span; with the checksum that then is right, if asked for."""
    specs, entries, _ = read_header(shard)
    data, at = bytearray(shard.read_bytes()), specs["spans"].offset
    spans = np.frombuffer(data, "<i8", specs["spans"].nbytes // 8, at).reshape(specs["spans"].shape)
    item, array, which = (rng.randrange(side) for side in spans.shape)
    values = [-1, 0, 1, 2, 17, 1000, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1, int(spans[item, array, which]) + 1]
    spans[item, array, which] = rng.choice(values)
    if with_checksum:
        table, description = decode(entries)
        sums = table["crc_plain"].to_pylist()
        parts = []
        for name, (start, rows, _) in zip(description["arrays"], spans[item].tolist(), strict=True):
            tensor = specs[name]
            width = tensor.nbytes // tensor.shape[0]
            first = min(max(start, 0), tensor.shape[0])
            last = min(max(first + rows, first), tensor.shape[0])
            parts.append(np.frombuffer(data, np.uint8, (last - first) * width, tensor.offset + first * width))
        sums[item] = checksum(spans[item], parts)
        pa = arrow()[0]
        column = table.schema.get_field_index("crc_plain")
        table = table.set_column(column, "crc_plain", pa.array(sums, pa.uint32()))
        made = with_description(table, json.dumps(description).encode())
        del spans, parts
        shard.write_bytes(put_entries(bytes(data), made))
    else:
        shard.write_bytes(data)


def use_store(root: Path, opened=LatentStore) -> tuple[bool, int]:
    """Everything that a store is used for: whether damage is named, and how often something was refused.

    A foreign exception is not caught here.
    """
    refused = []

    def allowed(use):
        try:
            return use()
        except KohyaBucketError as error:
            refused.append(str(error))

    store = allowed(lambda: opened(root))
    if store is None:
        return False, 0
    texts = isinstance(store, LatentStore)
    named = bool(store.damage)
    for i in range(len(store)):
        for use in (
            lambda i=i: store.entry(i), lambda i=i: store.read(i), lambda i=i: store.read(i, flipped=True),
            lambda i=i: store.read_mask(i), lambda i=i: store.info(i).latents.dtype, lambda i=i: store.check(i),
        ):  # fmt: skip
            allowed(use)
        if texts:
            for use in (store.arrays, store.packed):
                allowed(lambda i=i, use=use: use(i))
    named |= bool(allowed(lambda: verify(store)))
    allowed(lambda: status(store))
    allowed(lambda: export_npz(store, ARCHITECTURES["sd"], root / "npz"))
    allowed(lambda: pack(store, root / "copy"))
    allowed(lambda: fill_texts(root, 1, seed=7) if texts else fill(root, ["new"]))
    allowed(store.refresh)
    allowed(lambda: write_manifest(opened(root)))
    if texts:
        allowed(lambda: prune(opened(root), damaged=True))
    assert not any("\n" in line for line in refused)
    return named, len(refused)


class Npz:
    """The npz of one image, attacked."""

    def __init__(self, root: Path) -> None:
        self.image = root / "a.png"
        Image.new("RGB", (140, 64)).save(self.image)
        os.utime(self.image, (1, 1))
        latents = np.zeros(ARCH.shape(BUCKET), np.float32)
        self.print = replace(PRINT, mask=True, flip=True)
        keys = ARCH.key_suffix(BUCKET)
        self.note = NOTE + keys
        self.arrays = {
            f"latents{keys}": latents, f"original_size{keys}": np.array((140, 64)),
            f"crop_ltrb{keys}": np.array((0.0, 0.0, 64.0, 32.0)), f"latents_flipped{keys}": latents,
            f"alpha_mask{keys}": np.ones(BUCKET[::-1], np.float32),
            self.note: note_of(self.print, "a.png", latents),
        }  # fmt: skip
        self.path = root / "a_0140x0064_sd.npz"

    def attacked(self, seed: int) -> Path:
        rng = random.Random(seed)
        if seed % 6 == 0:
            np.savez(self.path, **self.arrays)
            self.path.write_bytes(any_bytes(self.path.read_bytes(), rng))
        else:
            self.path.write_bytes(any_npz(self.arrays, self.note, rng))
        return self.path

    def use(self, seed: int) -> str:
        path, store, said = self.attacked(seed), self.image.parent / "store", []

        def allowed(use):
            try:
                return use()
            except KohyaBucketError as error:
                said.append(str(error))

        wanted = StoreEntry("a.png", self.print, (140, 64), (0.0, 0.0, 64.0, 32.0))
        bad = why_npz_bad(path, BUCKET, ARCH, original_size=(140, 64), flip=True, mask=True, content=True)
        found = npz_entry(path, wanted, ARCH, self.image)
        holds_npz(path, BUCKET, ARCH)
        stored_fingerprint(path, BUCKET, ARCH)
        allowed(lambda: npz.read_npz(path, BUCKET, ARCH))
        with suppress(FileNotFoundError):
            shutil.rmtree(store)
        done = import_npz([str(self.image)], store, ARCH, images_root=self.image.parent)
        assert (done.done > 0) == (len(LatentStore(store)) > 0)
        allowed(lambda: ensure_current(path, wanted, ARCH.read_by("0.10.1"), self.image))
        made, before = npz.NpzLatents(self.arrays["latents_4x8"], (140, 64), (0, 0, 64, 32)), path.read_bytes()
        try:
            npz.write_npz(path, made, BUCKET, ARCH)
        except KohyaBucketError:  # it may be somebody's own
            assert path.read_bytes() == before
        else:
            assert why_npz_bad(path, BUCKET, ARCH, original_size=(140, 64), content=True) is None
        return "refused" if said else "named" if bad or found.reasons or done.skipped else "as before"


class Cache:
    """A metadata cache, attacked."""

    def __init__(self, root: Path) -> None:
        self.images = [root / f"{k}.png" for k in range(4)]
        for k, path in enumerate(self.images):
            Image.new("RGB", (20 + k, 30)).save(path)
        self.images[3].write_bytes(b"no image")
        self.file = root / "cache.parquet"
        MetadataCache.build(self.images, hash=True).save(self.file)
        self.good = self.file.read_bytes()

    def attacked(self, seed: int) -> None:
        _, _, pq = arrow()
        rng, out = random.Random(seed), io.BytesIO()
        table = pq.read_table(io.BytesIO(self.good))
        if seed % 4:
            for _ in range(seed % 2 + 1):
                table = any_table(table, rng)
            if seed % 16 == 2:
                table = table.replace_schema_metadata(
                    {k: any_bytes(v, rng) for k, v in (table.schema.metadata or {}).items()}
                )
            pq.write_table(table, out)
        self.file.write_bytes(out.getvalue() if seed % 4 else any_bytes(self.good, rng))

    def use(self, seed: int) -> str:
        self.attacked(seed)
        is_metadata_cache(str(self.file))
        assert len(scan_sizes([str(path) for path in self.images], str(self.file))) == 4
        self.attacked(seed)
        try:
            cache = MetadataCache.load(self.file)
        except KohyaBucketError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return "refused"
        for path in cache.paths:
            cache.get(path), cache.get_dim(path), cache.is_stale(path)
        cache.scan()
        assert (cache.sizes >= 0).all()
        cache.refresh(self.images, hash=True)
        cache.save(self.file)
        return "as before"


class Tars(Cache):
    """The index of a shard of images, attacked."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.shard = root / "0.tar"
        with tarfile.open(self.shard, "w") as tar:
            for path in self.images:
                tar.add(path, path.name)
        TarIndex.build([str(self.shard)]).save(self.file)
        self.good = self.file.read_bytes()

    def use(self, seed: int) -> str:
        self.attacked(seed)
        try:
            index = TarIndex.load(self.file)
        except KohyaBucketError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return "refused"
        index.is_current()
        TarIndex.build([str(self.shard)], before=index).save(self.file)
        return "as before"


ATTACKED = {
    "stores": Store,
    "stores of captions": Texts,
    "npz": Npz,
    "metadata caches": Cache,
    "indexes of tar shards": Tars,
}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.long
@pytest.mark.parametrize("kind", ATTACKED)
@pytest.mark.parametrize("seeds", [range(FEW), weekly(range(FEW, MANY))], ids=["few", "many"])
def test_changed_files_end_in_this_packages_error_or_in_none(tmp_path, kind, seeds):
    attacked = ATTACKED[kind](tmp_path)
    counts = Counter(attacked.use(seed) for seed in seeds)
    assert counts["refused"] + counts["named"] > 0  # how many are as before depends on pyarrow's version


def peak_of(use) -> int:
    """Bytes that Python and numpy held at most meanwhile."""
    tracemalloc.start()
    try:
        use()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.long
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("name", ["kohya_bucket_fingerprint_4x8", "original_size_4x8", "latents_4x8"])
def test_nothing_is_unpacked_that_is_no_part_of_such_a_file(tmp_path, name, method):
    """12 MB in a few kB, in place of an array of known length."""
    attacked = Npz(tmp_path)
    with zipfile.ZipFile(attacked.path, "w", method) as file:
        for other, array in attacked.arrays.items():
            out = io.BytesIO()
            np.save(out, array)
            file.writestr(f"{other}.npy", out.getvalue() if other != name else BOMB)
    assert attacked.path.stat().st_size < 100_000
    wanted = StoreEntry("a.png", attacked.print, (140, 64), (0.0, 0.0, 64.0, 32.0))
    reasons = []
    assert peak_of(lambda: reasons.extend(npz_entry(attacked.path, wanted, ARCH, attacked.image).reasons)) < 4_000_000
    assert reasons or name == attacked.note  # without its note a file counts as made by sd-scripts


BOMB = npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': (12000000,), }\n", bytes(12_000_000))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rows", "header"])
def test_nothing_is_read_that_a_shard_has_no_room_for(tmp_path, kind):
    fill(tmp_path, ["a"])
    (shard,) = Layout(tmp_path).shards.iterdir()
    if kind == "rows":  # two million in a few kB
        pa = arrow()[0]
        table, description = decode(read_header(shard)[1])
        many = table.take(pa.array(np.zeros(2_000_000, np.int64)))
        shard.write_bytes(put_entries(shard.read_bytes(), with_description(many, json.dumps(description).encode())))
    else:
        header, data = header_of(shard.read_bytes())
        text = as_json(header) + b" " * 12_000_000
        shard.write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert peak_of(lambda: LatentStore(tmp_path)) < 4_000_000
    store = LatentStore(tmp_path)
    assert (len(store), [name for name, _ in store.damage]) == (0, [shard.name])
