"""Outputs of text encoders: which captions are encoded, once each and one after the other, and what is kept of them."""

import errno
import random
import threading
import time
from _thread import interrupt_main
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kohya_bucket.errors import LatentStoreError, UnreadableError
from kohya_bucket.latents import items
from kohya_bucket.trainers.sdscripts.caching.text import TextSession, cache_text_outputs
from kohya_bucket.trainers.sdscripts.npz.read_write import CAPTION_KEY, text_marks
from tests.faults import PASSING, Faults


class Strategy:
    skip_disk_cache_validity_check = False

    def get_outputs_npz_path(self, image: str) -> str:
        return f"{image}_te.npz"

    def is_disk_cached_outputs_expected(self, path: str) -> bool:
        return True

    def cache_batch_outputs(self, *_: Any) -> None: ...


@pytest.mark.parametrize("unchecked", [False, True])
@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_of_a_folder_that_does_not_answer(tmp_path, monkeypatch, code, unchecked):
    images = {name: SimpleNamespace(absolute_path=str(tmp_path / name), caption="a cat") for name in "ab"}
    strategy = Strategy()
    strategy.skip_disk_cache_validity_check = unchecked
    dataset = cast("Any", SimpleNamespace(image_data=images))
    session = TextSession(dataset, cast("Any", strategy), items.Encoding())
    session._caching = cast("Any", SimpleNamespace(current=0, to_do=0))
    made, missing = session.captions
    np.savez(made, hidden_state1=np.zeros(2), **text_marks("a cat"))
    is_expected = session._is_expected
    assert (is_expected(made), is_expected(missing)) == (True, False)
    assert not session.reasons
    faults = Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code), pytest.raises(UnreadableError, match="cannot be read now"):
        is_expected(made)


class Encoding:
    """Outputs are the numbers of a caption's letters; `on_encode` is called with what is encoded so far."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.inside = threading.Lock()
        self.on_encode: Any = lambda _: None

    def encode_tokens_with_weights(self, tokens: list[str]) -> Any:
        return self.encode_tokens(tokens)

    def encode_tokens(self, tokens: list[str]) -> Any:
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") == (torch.get_autocast_dtype("cpu") is torch.float16)
        assert self.inside.acquire(blocking=False)
        self.encoded += tokens
        self.on_encode(self.encoded)
        self.inside.release()
        return torch.stack([torch.tensor([*text.encode().ljust(40)], dtype=torch.float32) for text in tokens])


class Tokenizing:
    def __init__(self) -> None:
        self.inside = threading.Lock()

    def tokenize(self, captions: list[str]) -> list[str]:
        assert self.inside.acquire(blocking=False)
        time.sleep(0.001)
        self.inside.release()
        return captions


class SavingStrategy(Strategy):
    """As sd-scripts' own; `before_save` is called with the captions of a batch."""

    batch_size, cache_to_disk, asks = 1, True, True

    def __init__(self) -> None:
        self.before_save: Any = lambda _: None

    def get_outputs_npz_path(self, image: str) -> str:
        return f"{image}_te_outputs.npz"

    def is_disk_cached_outputs_expected(self, path: str) -> bool:
        return Path(path).exists()

    def cache_batch_outputs(self, tokenizing: Any, models: Any, encoding: Any, infos: Any) -> None:
        captions = [info.caption for info in infos]
        tokens = tokenizing.tokenize(captions)
        with torch.no_grad():
            outputs = (encoding if self.asks else Encoding()).encode_tokens_with_weights(tokens)
        self.before_save(captions)
        for info, row in zip(infos, outputs, strict=True):
            np.savez(info.text_encoder_outputs_npz, hidden_state1=row.numpy(), pool2=row.numpy()[:3])


def cache(folder: Path, captions: list[str], strategy: Any = None, encoding: Any = None, size: int = 1) -> Encoding:
    """Cache as sd-scripts' loop does, in batches of `size`."""
    strategy, encoding, tokenizing = strategy or SavingStrategy(), encoding or Encoding(), Tokenizing()
    strategy.batch_size = size
    images = {str(k): SimpleNamespace(absolute_path=str(folder / f"{k}"), caption=c) for k, c in enumerate(captions)}
    dataset = cast("Any", SimpleNamespace(image_data=images, batch_size=1))

    def original(dataset: Any, models: Any, accelerator: Any) -> None:
        to_do = []
        for info in dataset.image_data.values():
            info.text_encoder_outputs_npz = strategy.get_outputs_npz_path(info.absolute_path)
            if not strategy.is_disk_cached_outputs_expected(info.text_encoder_outputs_npz):
                to_do.append(info)
        for start in range(0, len(to_do), size):
            strategy.cache_batch_outputs(tokenizing, models, encoding, to_do[start : start + size])

    accelerator = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    cache_text_outputs(dataset, original, (strategy, None), [], accelerator)
    return encoding


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("seed", range(6))
def test_files_are_the_same_in_whatever_order_they_are_saved(tmp_path, seed):
    rng = random.Random(seed)
    size = rng.choice([1, 1, 2, 3])
    captions = [rng.choice(["", "a cat", f"caption {k}", f"caption {k}"]) for k in range(25)]
    strategy, in_turn = SavingStrategy(), SavingStrategy()
    saved_on = []

    def before_save(_: list[str]) -> None:
        saved_on.append(threading.get_ident())
        time.sleep(rng.random() / 100)

    strategy.before_save = before_save
    in_turn.asks = False  # so that it is not known when it encodes
    for folder in ("threads", "in turn"):
        (tmp_path / folder).mkdir()
    with torch.autocast("cpu", torch.float16, enabled=seed % 2 == 0):
        encoding = cache(tmp_path / "threads", captions, strategy, size=size)
    assert len(set(saved_on)) > 1
    assert sorted(encoding.encoded) == sorted(dict.fromkeys(captions))
    assert "encode_tokens" not in vars(encoding)
    cache(tmp_path / "in turn", captions, in_turn, size=size)
    assert len(contents(tmp_path / "threads")) == len(captions)
    assert contents(tmp_path / "threads") == contents(tmp_path / "in turn")
    for k, caption in enumerate(captions):
        with np.load(tmp_path / "threads" / f"{k}_te_outputs.npz") as file:
            assert bytes(file["hidden_state1"].astype(np.uint8)).decode().rstrip() == caption
            assert file[CAPTION_KEY].tobytes().decode() == caption
    assert cache(tmp_path / "threads", captions, size=size).encoded == []
    captions[rng.randrange(25)] = "edited"
    assert cache(tmp_path / "threads", captions, size=size).encoded == ["edited"]


@pytest.mark.parametrize("at", range(0, 20, 3))
def test_an_error_in_one_save_ends_the_run_with_it(tmp_path, at):
    def before_save(captions: list[str]) -> None:
        if captions == [f"caption {at}"]:
            raise OSError(errno.ENOSPC, "full")

    strategy = SavingStrategy()
    strategy.before_save = before_save
    with pytest.raises(OSError, match="full"):
        cache(tmp_path, [f"caption {k}" for k in range(20)], strategy)
    assert len(cache(tmp_path, [f"caption {k}" for k in range(20)]).encoded) <= 20 - at


def test_outputs_that_are_not_finite_are_refused(tmp_path):
    class Overflowing(Encoding):
        def encode_tokens(self, tokens: list[str]) -> Any:
            return super().encode_tokens(tokens) * (np.inf if tokens == ["caption 7"] else 1)

    with pytest.raises(LatentStoreError, match=r"7_te_outputs\.npz.* is not finite"):
        cache(tmp_path, [f"caption {k}" for k in range(20)], encoding=Overflowing())
    assert not (tmp_path / "7_te_outputs.npz").exists()


@pytest.mark.parametrize("at", [1, 2, 3, 9])
def test_an_interrupt_says_what_is_kept(tmp_path, at):
    def interrupt(encoded: list[str]) -> None:
        if len(encoded) == at:
            interrupt_main()
            time.sleep(0.05)

    encoding, captions = Encoding(), [*(f"caption {k}" for k in range(20)), "caption 0"]
    encoding.on_encode = interrupt
    with pytest.raises(KeyboardInterrupt) as interrupted:
        cache(tmp_path, captions, encoding=encoding)
    kept = len(contents(tmp_path))
    said = int(str(interrupted.value).removesuffix(" of 21 captions kept; the same command goes on"))
    assert kept - 1 <= said <= kept  # Python itself may lose a thread that was just started
    assert at - 1 <= kept < 21
    assert len(cache(tmp_path, captions).encoded) in (21 - kept, 20 - kept)
    assert len(contents(tmp_path)) == 21


def test_how_long_the_encoder_ran_is_said(tmp_path, caplog):
    with caplog.at_level("INFO", logger="kohya_bucket"):
        cache(tmp_path, [f"caption {k}" for k in range(9)] + ["caption 0"])
    assert "10 captions were encoded in" in caplog.text
    assert "the encoder ran" in caplog.text
