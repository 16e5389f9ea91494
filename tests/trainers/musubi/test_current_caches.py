"""Which of musubi-tuner's caches serve, and what a training does about those that do not."""

import os
import shutil
import struct
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_folder import Folder, tensor_bytes
from PIL import Image

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.trainers.musubi.cache_files import made_by
from kohya_bucket.trainers.musubi.caching import Session, leave_out_not_finite, save_item
from kohya_bucket.trainers.musubi.trained_items import Trained, items_of_config, pick_out_of


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def touch(path: str, seconds: int) -> None:
    now = Path(path).stat()
    os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns + seconds * 10**9))


def test_nothing_is_there(folder: Folder) -> None:
    assert folder.reasons() == [["not encoded yet"] * 2] * 3


def test_what_was_just_made_serves_and_so_it_does_after_its_files_were_copied(folder: Folder) -> None:
    folder.make()
    assert folder.reasons() == [[]] * 3
    for path in folder.paths:
        touch(path, 100)
    assert folder.reasons() == [[]] * 3


def test_each_change_is_noticed_and_named(folder: Folder) -> None:
    folder.make(vae="one", i2v=False)
    assert folder.reasons(vae="one", i2v=False, num_workers=3, other=1) == [[]] * 3
    Image.new("RGB", (64, 64), (0, 0, 9)).save(folder.paths[0])
    touch(folder.paths[0], 100)
    Path(folder.paths[1]).with_suffix(".txt").write_text("another", encoding="utf-8")
    (changed,), (caption,), none = folder.reasons()
    assert changed.startswith("the image changed")
    assert caption == "the caption changed"
    assert none == []
    assert folder.reasons(side=128)[2] == [
        "the bucket changed (64x64 -> 128x128)", "the resized size changed (64x64 -> 128x128)",
        "the interpolation changed (none -> lanczos/pillow)",
    ]  # fmt: skip
    assert any("VAE" in reason for reason in folder.reasons(vae="two")[2])
    assert "--i2v changed (false -> true)" in folder.reasons(i2v=True)[2]
    folder.paths[:] = folder.paths[2:]
    Path(folder.paths[0]).unlink()  # a cache outlives its image
    Path(folder.root / "cache" / "a2_zi_te.safetensors").unlink()
    caches = folder.caches()
    assert caches.latents(caches.table.sources[0]).reasons == ()


def test_files_that_do_not_say_what_they_are_of(folder: Folder) -> None:
    cache = folder.root / "cache"
    cache.mkdir()
    for i in range(3):
        (cache / f"a{i}_0064x0064_zi.safetensors").write_bytes(tensor_bytes({"latents_1x8x8_float32": (16, 8, 8)}, {}))
        (cache / f"a{i}_zi_te.safetensors").write_bytes(tensor_bytes({"t_float32": (4,)}, {"caption1": f"caption {i}"}))
    assert folder.reasons() == [[]] * 3
    assert folder.reasons(side=128) == [["the bucket changed (64x64 -> 128x128)"]] * 3
    touch(folder.paths[0], 100)
    Image.new("RGB", (80, 64)).save(folder.paths[1])
    older, size, none = folder.reasons()
    assert older == ["the image or its name is newer than its cache, which does not say what it was made from"]
    assert size == ["the image changed (64x64 then, 80x64 now)"]
    assert none == []


def exchange_names(one: str, other: str) -> None:
    time.sleep(0.05)  # longer than a tick of the clock of files
    for source, target in ((one, f"{one}.kept"), (other, one), (f"{one}.kept", other)):
        Path(source).rename(target)


@pytest.mark.posix("on Windows a file does not say when it was renamed")
def test_what_does_not_say_what_it_is_of_serves_no_image_that_was_put_there_later(folder: Folder) -> None:
    """Names that are exchanged, and an older image in the place of one."""
    cache = folder.root / "cache"
    cache.mkdir()
    for i in range(3):
        (cache / f"a{i}_0064x0064_zi.safetensors").write_bytes(tensor_bytes({"latents_1x8x8_float32": (16, 8, 8)}, {}))
        (cache / f"a{i}_zi_te.safetensors").write_bytes(tensor_bytes({"t_float32": (4,)}, {"caption1": f"caption {i}"}))
    assert folder.reasons() == [[]] * 3
    exchange_names(*folder.paths[:2])
    assert ["its name is newer" in str(reasons) for reasons in folder.reasons()] == [True, True, False]
    shutil.copyfile(folder.paths[0], folder.paths[2])
    os.utime(folder.paths[2], (1e9, 1e9))
    assert "its name is newer" in str(folder.reasons()[2])


def test_images_of_one_length_and_time_are_told_apart(folder: Folder) -> None:
    for i, path in enumerate(folder.paths):
        Path(path).write_bytes(Path(path).read_bytes().ljust(1000, bytes([i])))
        os.utime(path, (1e9, 1e9))
    folder.make()
    assert folder.reasons() == [[]] * 3
    exchange_names(*folder.paths[:2])
    assert folder.reasons() == [["the image changed (its content hash differs)"]] * 2 + [[]]


def test_a_caption_that_is_edited_while_it_is_encoded_is_encoded_again(folder: Folder) -> None:
    session = Session(folder.caches(), text=True)
    for source in session.caches.table.sources:
        Path(source.files[0]).with_suffix(".txt").write_text("edited", encoding="utf-8")
        folder.save(session, source)
    assert [reasons[-1] for reasons in folder.reasons()] == ["the caption changed"] * 3


def test_an_image_that_is_edited_while_it_is_encoded_is_encoded_again(folder: Folder) -> None:
    session = Session(folder.caches(), text=False)
    for source in session.caches.table.sources:
        session.before(source.number, pictures=True)
        if source.number == 1:
            Image.new("RGB", (64, 64), (200, 0, 0)).save(source.files[0])
            touch(source.files[0], 100)
        folder.save(session, source)
    assert [bool(caches.reasons) for caches in map(folder.caches().latents, session.caches.table.sources)] == [
        False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000], ids=["inf", "-inf", "NaN"])
def test_what_is_not_finite_is_made_again(folder: Folder, bits: int) -> None:
    """Which a caching program looks for in what musubi-tuner made alone; a training does, where it reads values."""
    folder.make()
    for name, content, at in (
        ("a0_0064x0064_zi", tensor_bytes({"latents_1x8x8_float32": (16, 8, 8)}, {}), -400),
        ("a1_zi_te", tensor_bytes({"varlen_t_float32": (4, 8)}, {"caption1": "caption 1"}), -8),
    ):
        wrong = content[:at] + struct.pack("<I", bits) + content[at:][4:]
        (folder.root / "cache" / f"{name}.safetensors").write_bytes(wrong)
    assert folder.reasons() == [[], [], []]
    assert folder.reasons(values=True) == [
        ["its latents_1x8x8_float32 is not finite (NaN or infinity)"],
        ["its varlen_t_float32 is not finite (NaN or infinity)"], [],
    ]  # fmt: skip


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_written_and_its_item_is_left_out(
    folder: Folder, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    torch = pytest.importorskip("torch")
    session = Session(folder.caches(), text=False)
    items = [SimpleNamespace(item_key=source.key, frame_count=None) for source in session.caches.table.sources]
    assert all(map(session.take, items))
    latents = torch.zeros(16, 8, 8, dtype=torch.bfloat16)
    with session.picking(session.caches.dataset):
        assert not leave_out_not_finite(items[0], {"latents_1x8x8_bfloat16": latents})
        latents[3, 4, 5] = value
        assert leave_out_not_finite(items[1], {"mask_int64": torch.ones(3).long(), "latents_1x8x8_bfloat16": latents})
        assert not leave_out_not_finite(SimpleNamespace(), {"latents": latents})  # of a family that is not known
    assert "1 item left out: a1.png: its latents_1x8x8_bfloat16 is not finite (NaN or infinity)" in caplog.text


def test_floats_of_8_bits_are_looked_at_too(folder: Folder) -> None:
    torch = pytest.importorskip("torch")
    caches = folder.caches()
    item = SimpleNamespace(_kohya_bucket_origin=(Session(caches, text=True), caches.table.sources[0]))
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        for value, left_out in ((1.0, False), (float("nan"), True)):
            outputs = torch.full((4, 8), value).to(kind)
            assert leave_out_not_finite(item, {"mask_bool": torch.ones(3).bool(), "t": outputs}) == left_out


def test_an_item_of_a_family_that_is_not_known_is_written_whole_and_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x_0064x0064_new.safetensors"
    item = SimpleNamespace(latent_cache_path=str(path))
    content = tensor_bytes({"latents_1x8x8_float32": (16, 8, 8)}, {})
    save_item(item, lambda: Path(item.latent_cache_path).write_bytes(content), text=False)
    assert path.read_bytes() == content
    with pytest.raises(LatentStoreError, match="gone"):
        save_item(item, lambda: (_ for _ in ()).throw(OSError("gone")), text=False)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_models_are_known_by_their_content(tmp_path: Path) -> None:
    for name, content in (("a", b"x" * 10**6), ("b", b"x" * 10**6), ("c", b"x" * (10**6 - 1) + b"y")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (made_by(Namespace(vae=str(tmp_path / name), device="cuda")) for name in "abc")
    assert a == b != c
    assert a.keys() == {"vae"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "x.safetensors").write_bytes(b"1")
    assert len(made_by(Namespace(text_encoder=str(tmp_path / "model")))["text_encoder"]) == 32
    assert made_by(None) == {}


def train(folder: Folder) -> Trained:
    return items_of_config(folder.caches(), "my.toml")


def test_a_training_begins_only_with_all_that_the_config_names(
    folder: Folder, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder.make()
    (folder.root / "cache" / "other_0064x0064_zi.safetensors").write_bytes(tensor_bytes({}, {}))
    assert len(train(folder)) == 3
    assert "does not ask for it: 1 file (other_0064x0064_zi.safetensors)" in caplog.text
    (folder.root / "cache" / "a1_zi_te.safetensors").unlink()
    with pytest.raises(SystemExit) as ended:
        train(folder)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "1 of 3 items" in said
    assert "a1.png (text: not encoded yet)" in said
    assert f"{Path('musubi_tuner', 'zimage_cache_text_encoder_outputs.py')} --dataset_config my.toml" in said
    assert len(said.splitlines()) == 1


def test_what_cannot_be_read_is_left_out_of_a_training(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    folder.make()
    with open(folder.paths[0], "rb+") as file:
        file.truncate(60)
    assert len(train(folder)) == 2
    assert "1 item left out: a0.png: " in caplog.text


def test_a_broken_picture_that_is_mended_leaves_the_other_broken_one_what_it_is(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.make()
    whole = Path(folder.paths[0]).read_bytes()
    for path in folder.paths[:2]:
        Path(path).write_bytes(whole[:60])
    assert len(train(folder)) == 1
    Path(folder.paths[0]).write_bytes(whole + b"edited")
    with pytest.raises(SystemExit):
        train(folder)
    said = capsys.readouterr().err
    assert "1 of 3 items" in said
    assert "a0.png" in said
    assert "a1.png" not in said


def test_items_of_two_models_are_not_trained_together(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.make(vae="one")
    caches = folder.caches(vae="two")
    folder.save(Session(caches, text=False), caches.table.sources[1])
    with pytest.raises(SystemExit):
        train(folder)
    assert "a1.png (latents: the VAE's weights changed" in capsys.readouterr().err


def test_only_these_go_into_buckets_each_with_its_own_shape(folder: Folder) -> None:
    folder.make()
    items = train(folder)
    paths = sorted(items)
    records: list[Any] = [SimpleNamespace(latent_cache_path=path) for path in (*paths, str(folder.root / "x"))]
    name, header = items[paths[0]]
    items[paths[0]] = name, type(header)(header.texts, {"latents_1x9x9_float32": (16, 9, 9)}, header.content)
    buckets: dict[Any, list[Any]] = {(64, 64): [*records, records[1]]}
    pick_out_of(buckets, items)
    assert sorted(len(found) for found in buckets.values()) == [1, 3]
    assert all(key[:2] == (64, 64) for key in buckets)
    with pytest.raises(SystemExit):
        pick_out_of({(64, 64): records[1:]}, items)
