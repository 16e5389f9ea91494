"""`precompute --text`: which captions of a store are encoded, when again, and what is refused."""

import zlib
from typing import ClassVar

import numpy as np
import pytest

from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.latents.encode import text_encoder
from kohya_bucket.latents.encode.precompute import precompute_text
from kohya_bucket.latents.items import Caption
from kohya_bucket.latents.store.latent_store import LatentStore
from tests.command_line import encoded_counts
from tests.latents.latent_helpers import fill
from tests.latents.text_outputs import made_outputs, same_outputs

NAMES = [f"{number}.png" for number in range(5)]


def outputs_of(caption):
    return made_outputs(zlib.crc32(caption.encode()))


class Stub:
    """Its outputs are a caption's own."""

    def __init__(self, weights="weights", tokens="tokens", stop_after=99):
        self.weights, self.tokens, self.stop_after = weights, tokens, stop_after
        self.encoded = []

    def encode(self, captions):
        if len(self.encoded) >= self.stop_after:
            raise KeyboardInterrupt
        self.encoded += captions
        return [outputs_of(caption) for caption in captions]


def encoded(root, *, name="text", rank=0, processes=1, **options):
    encoder = Stub(**options)
    report = precompute_text(root, encoder, name=name, batch_size=2, rank=rank, processes=processes)
    assert report.encoded == len(encoder.encoded)
    return encoder.encoded


def assert_stored(root, captions, name="text"):
    store = LatentStore(root / "text")
    for caption in captions:
        (i,) = store.find([Caption(caption).key], name)
        same_outputs(store.arrays(int(i)), outputs_of(caption))


def test_each_caption_once_and_again_only_what_changed(tmp_path):
    fill(tmp_path, NAMES)
    captions = ["", *(f"caption of {name}" for name in NAMES)]
    assert sorted(encoded(tmp_path)) == captions  # the empty one for dropout
    assert_stored(tmp_path, captions)
    assert encoded(tmp_path) == []
    fill(tmp_path, ["more.png"])
    assert encoded(tmp_path) == ["caption of more.png"]
    assert len(encoded(tmp_path, weights="others")) == 7
    assert len(encoded(tmp_path, weights="others", tokens="others")) == 7
    assert len(encoded(tmp_path, name="second", tokens="others")) == 7
    assert encoded(tmp_path, weights="others", tokens="others") == []
    assert len(LatentStore(tmp_path / "text")) == 14


def test_what_is_encoded_before_an_interrupt_stays(tmp_path):
    fill(tmp_path, NAMES)
    with pytest.raises(KeyboardInterrupt):
        encoded(tmp_path, stop_after=2)
    assert len(LatentStore(tmp_path / "text")) == 2
    assert len(encoded(tmp_path)) == 4


def test_processes_share_the_captions(tmp_path):
    fill(tmp_path, NAMES)
    found = []
    for rank in range(2):
        found += encoded(tmp_path, rank=rank, processes=2)
        assert encoded(tmp_path, rank=rank, processes=2) == []
    assert sorted(found) == ["", *(f"caption of {name}" for name in NAMES)]


@pytest.mark.parametrize(("wrong", "said"), [
    ({"batch_size": -1}, "batch_size is -1, but must be a whole number, 1"), ({"batch_size": 0}, "batch_size is 0"),
    ({"rank": 2, "processes": 2}, "rank is 2 of 2"), ({"processes": 0}, "rank is 0 of 0"),
])  # fmt: skip
def test_numbers_with_which_too_little_would_be_encoded_are_refused(tmp_path, wrong, said):
    fill(tmp_path, NAMES)
    with pytest.raises(KohyaBucketError, match=said):
        precompute_text(tmp_path, Stub(), **wrong)


def test_without_latents_there_are_no_captions(tmp_path):
    with pytest.raises(LatentStoreError):
        precompute_text(tmp_path, Stub())
    fill(tmp_path, [])
    with pytest.raises(LatentStoreError, match="holds no latents, so no captions"):
        precompute_text(tmp_path, Stub())


class Asked(Stub):
    """Notes what it was loaded with."""

    loaded: ClassVar[list] = []
    computes = ""

    def __init__(self, names, **options):
        super().__init__()
        self.loaded[:] = [names, options]


def test_the_command(tmp_path, command_line, monkeypatch):
    monkeypatch.setattr(text_encoder, "load_text_encoder", Asked)
    fill(tmp_path / "store", NAMES)
    where = ["precompute", "--text", "-o", tmp_path / "store"]
    more = ["--text-encoder", "a", "--text-encoder", "b", "--max-length", 77, "--max-length", 512, "--layer", -2]
    code, text, _ = command_line(*where, *more, "--dtype", "float16")
    assert (code, encoded_counts(text)) == (0, (6, 0))
    asked = {"lengths": [77, 512], "dtype": "float16", "device": None, "layer": -2, "apply_mask": False}
    assert Asked.loaded == [["a", "b"], asked]
    assert encoded_counts(command_line(*where, "--text-encoder", "a")[1])[:2] == (0, 6)
    assert_stored(tmp_path / "store", ["caption of 3.png"])
    code, text, _ = command_line(*where, "--text-encoder", "a", "--collection", "flux", "--quiet")
    assert (code, text) == (0, "")
    assert LatentStore(tmp_path / "store" / "text").collections() == ["flux", "text"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text"], "precompute --text encodes the captions of a store: --output latents/ --text-encoder"),
        (["--text", "-o", "STORE"], "--output latents/ --text-encoder"),
        (["--text", "-o", "STORE", "--text-encoder", "a", "--vae", "b"], "the captions of STORE: leave out --vae"),
        (["--text", "-o", "STORE", "--text-encoder", "a", "images"], "the captions of STORE: leave out images"),
        (["images", "--layer", "-2", "--resolution", "512"], "--layer are about captions: add --text"),
        (["--text", "--vae", "a", "nobody.py", "--seed", "7"], "leave out --vae"),
        (["--text", "nobody.py", "--seed", "7"], "'nobody.py'"),
    ],
)
def test_what_does_not_belong_together(tmp_path, command_line, arguments, said):
    store = str(tmp_path / "store")
    fill(store, NAMES)
    code, _, error = command_line("precompute", *[part.replace("STORE", store) for part in arguments])
    assert (code, said.replace("STORE", store) in error) == (2, True), error
    assert len(error.splitlines()) <= 2
    assert not (tmp_path / "store" / "text").exists()


def test_numbers_are_kept_to_the_last_bit(tmp_path):
    fill(tmp_path, NAMES[:1])
    odd = {"hidden_states": np.array([[-1e38, -0.0, 1e-45], [1, 2, 3]], np.float32), "pooled": np.arange(3.0)}
    encoder = Stub()
    encoder.encode = lambda captions: [odd for _ in captions]
    precompute_text(tmp_path, encoder)
    same_outputs(LatentStore(tmp_path / "text").arrays(0), odd)
