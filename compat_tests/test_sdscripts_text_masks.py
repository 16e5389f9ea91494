"""What is stored of FLUX's outputs where its mask is applied: what its models read, and all where they read all."""

import importlib
import shutil

import pytest
from small_text_encoders import make_family
from test_sdscripts_caching import strategies  # noqa: F401
from test_sdscripts_text_shards import Run, adapter, bases, same_bits, shards, write  # noqa: F401

from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.sdscripts.caching import behind_mask


def test_of_512_positions_less_than_a_tenth_is_stored_with_77_tokens(unpatched, bases, tmp_path):  # noqa: F811
    captions = [" ".join(f"word{number}x{k}" for k in range(75)) for number in range(12)]
    write(tmp_path / "a", 12, captions)
    with adapter():
        Run(unpatched, bases, make_family("flux", length=512), [tmp_path / "a"], shards(tmp_path))
        store = LatentStore(tmp_path / "store" / "text")
        rows = {(len(packed.bits), packed.length) for i in range(12) for packed in [store.packed(i)["t5_out"]]}
        assert rows == {(77 + 2, 512)}
        Run(unpatched, bases, make_family("flux", length=512), [tmp_path / "a"])
    npz = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.npz"))
    assert sum(path.stat().st_size for path in (store.layout.root / "shards").iterdir()) < npz / 10


@pytest.fixture
def reading_flux(bases, monkeypatch):  # noqa: F811
    """A version whose FLUX attends to everything."""
    models = importlib.import_module("library.flux_models")
    attention = models.attention
    monkeypatch.setattr(models, "attention", lambda q, k, v, pe, **_: attention(q, k, v, pe))
    behind_mask._is_unread.cache_clear()
    yield
    behind_mask._is_unread.cache_clear()


def test_where_models_read_behind_the_mask_all_is_stored(unpatched, bases, tmp_path, request, caplog):  # noqa: F811
    write(tmp_path / "a", 3)
    shutil.copytree(tmp_path / "a", tmp_path / "alone")
    alone = Run(unpatched, bases, make_family("flux"), [tmp_path / "alone"]).read()
    with adapter():
        assert len(Run(unpatched, bases, make_family("flux"), [tmp_path / "a"], shards(tmp_path)).encoded) == 3
        request.getfixturevalue("reading_flux")
        caplog.set_level("INFO", logger="kohya_bucket")
        run = Run(unpatched, bases, make_family("flux"), [tmp_path / "a"], shards(tmp_path)).read()
    assert len(run.encoded) == 3
    assert "this sd-scripts may read them" in caplog.text
    same_bits(run.outputs, alone.outputs)
    packed = LatentStore(tmp_path / "store" / "text").packed(0)["t5_out"]
    assert 9 + 2 < len(packed.bits) < 9 + 128  # and as far as T5's relative positions reach
