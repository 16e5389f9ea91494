"""npz files, shards, manifests and `store.json`: read, or refused with one clear error."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.mutations import mutated, read_or_refused
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout, content_tag
from kohya_bucket.latents.store.writer import write_manifest
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz import read_write as npz
from tests.latents.latent_helpers import PRINT, fill, why_npz_bad

pytest.importorskip("pyarrow", reason="stores have Parquet manifests")

BUCKET = (64, 32)
SDXL = ARCHITECTURES["sdxl"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """An npz and the files of a store, by what they are."""
    root = tmp_path_factory.mktemp("whole")
    random = np.random.default_rng(0)
    item = npz.NpzLatents(random.random(SDXL.shape(BUCKET), dtype=np.float32), (70, 40), (0.0, 1.5, 64.0, 30.5))
    npz.write_npz(root / "a.npz", item, BUCKET, SDXL, PRINT, source_name="a.png")
    fill(root / "store", ["a", "b"])
    write_manifest(LatentStore(root / "store"))
    layout = Layout(root / "store")
    (shard,) = layout.shards.iterdir()
    return {
        "npz": (root / "a.npz").read_bytes(),
        "shard": shard.read_bytes(),
        "shard name": shard.name.encode(),
        "manifest": layout.manifests()[0].read_bytes(),
        "store.json": layout.store_file.read_bytes(),
    }


@given(data=st.data())
def test_npz(tmp_path_factory: pytest.TempPathFactory, whole: dict[str, bytes], data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.npz"
    path.write_bytes(data.draw(mutated(whole["npz"])))
    read_or_refused(npz.read_npz, path, BUCKET, SDXL)
    read_or_refused(why_npz_bad, path, BUCKET, SDXL)


def look_through(root: Path) -> None:
    store = LatentStore(root)
    for i in range(min(len(store), 4)):
        store.entry(i)
        read_or_refused(store.read, i)
        store.check(i)


FORGED = (
    "a forged manifest (its name fits its content) ends in pyarrow's ArrowIndexError, which LatentStore lets through"
)


@pytest.mark.parametrize(
    "part", ["shard", "store.json", pytest.param("manifest", marks=pytest.mark.skip(reason=FORGED))]
)
@given(data=st.data())
@settings(max_examples=30)
def test_stores(
    tmp_path_factory: pytest.TempPathFactory, whole: dict[str, bytes], part: str, data: st.DataObject
) -> None:
    root = tmp_path_factory.getbasetemp() / "fuzzed"
    shutil.rmtree(root, ignore_errors=True)
    layout = Layout(root)
    layout.shards.mkdir(parents=True)
    damaged = {**whole, part: data.draw(mutated(whole[part], near_start=2000))}
    (layout.shards / whole["shard name"].decode()).write_bytes(damaged["shard"])
    layout.store_file.write_bytes(damaged["store.json"])
    if part != "shard":  # or else the shards' own rows are not looked at
        # A manifest is named by its content, which guards against damage, and not against somebody's will.
        layout.root.joinpath(f"manifest-{1:020d}-{content_tag(damaged['manifest'])}.parquet").write_bytes(
            damaged["manifest"]
        )
    read_or_refused(look_through, root)
