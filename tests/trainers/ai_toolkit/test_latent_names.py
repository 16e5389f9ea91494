"""Which file ai-toolkit's latents of an image, and its text embeddings, are taken from."""

import errno
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kohya_bucket.errors import UnreadableError
from kohya_bucket.trainers.ai_toolkit import latents, seams
from kohya_bucket.trainers.ai_toolkit.latents import made_anew, name_to_use, note_made, why_bad
from tests.faults import PASSING, Faults


class Cached:
    """Images of a few bytes in a folder, with latents that hold these bytes, as ai-toolkit makes them."""

    def __init__(self, folder: Path, images: dict[str, bytes]) -> None:
        self.folder = folder
        for name, content in images.items():
            (folder / f"{name}.png").write_bytes(content)

    def start(self, *, noted: bool = True) -> tuple[int, dict[str, bytes]]:
        """How many are encoded by one start, and the pixels that each image then is trained with."""
        encoded, trained = 0, {}
        for image in sorted(self.folder.glob("*.png")):
            item, path = SimpleNamespace(), str(image.with_suffix(".safetensors"))
            name = name_to_use(item, path, [str(image)]) if noted else path
            if not Path(name).exists():
                encoded += 1
                save_file({"latent": np.frombuffer(image.read_bytes(), np.uint8)}, name)
                if noted:
                    note_made(item)
            trained[image.stem] = load_file(name)["latent"].tobytes()
        return encoded, trained

    def exchange(self, one: str, other: str) -> None:
        paths = [self.folder / f"{name}.png" for name in (one, other, "kept")]
        for source, target in ((0, 2), (1, 0), (2, 1)):
            paths[source].rename(paths[target])

    @property
    def pixels(self) -> dict[str, bytes]:
        return {image.stem: image.read_bytes() for image in self.folder.glob("*.png")}


@pytest.mark.parametrize("noted", [True, False], ids=["behind the door", "by ai-toolkit alone"])
@pytest.mark.parametrize("same_stamps", [False, True])
def test_no_image_gets_the_latents_of_another(tmp_path: Path, noted: bool, same_stamps: bool) -> None:
    """Images renumbered after one is deleted, names exchanged, an older file in the place of one."""
    cached = Cached(tmp_path, {str(i): bytes([i] * (8 if same_stamps else i)) for i in range(1, 6)})
    if same_stamps:
        for image in tmp_path.glob("*.png"):
            os.utime(image, (1e9, 1e9))
    assert cached.start(noted=noted) == (5, cached.pixels)
    assert cached.start() == (0 if noted else 5, cached.pixels)
    (tmp_path / "1.png").unlink()
    for i in range(2, 6):
        (tmp_path / f"{i}.png").rename(tmp_path / f"{i - 1}.png")
    assert cached.start() == (4, cached.pixels)
    cached.exchange("1", "3")
    assert cached.start()[1] == cached.pixels
    (tmp_path / "2.png").write_bytes(b"older")
    os.utime(tmp_path / "2.png", (1e8, 1e8))
    assert cached.start() == (1, cached.pixels)
    assert cached.start() == (0, cached.pixels)


def test_a_copied_folder_needs_nothing_encoded(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    cached = Cached(tmp_path / "one", {"1": b"1", "2": b"22"})
    cached.start()
    shutil.copytree(tmp_path / "one", tmp_path / "other", copy_function=shutil.copyfile)
    os.utime(tmp_path / "other" / "1.png", (4e9, 4e9))
    other = Cached(tmp_path / "other", {})
    assert other.start() == (0, cached.pixels)


def test_an_image_that_is_edited_while_it_is_encoded_is_encoded_again(tmp_path: Path) -> None:
    cached, item = Cached(tmp_path, {"1": b"old"}), SimpleNamespace()
    image, path = tmp_path / "1.png", str(tmp_path / "1.safetensors")
    assert name_to_use(item, path, [str(image)]) == path
    read = image.read_bytes()
    image.write_bytes(b"new")
    os.utime(image, (time.time() + 1,) * 2)
    save_file({"latent": np.frombuffer(read, np.uint8)}, path)
    note_made(item)
    assert cached.start() == (1, {"1": b"new"})


def test_latents_of_which_a_byte_changed_are_not_used(tmp_path: Path) -> None:
    rng, item = np.random.default_rng(0), SimpleNamespace()
    image, cache = tmp_path / "a.png", tmp_path / "a.safetensors"
    image.touch()
    assert name_to_use(item, str(cache), [str(image)]) == str(cache)
    tensors = {"latent": rng.random((4, 8, 8), np.float32), "num_frames": np.array(3, np.int32)}
    save_file(tensors, cache, {"latent_version": "1"})
    note_made(item)
    whole = cache.read_bytes()
    assert b"latent_version" in whole
    missed = 0
    for at in (*rng.integers(0, len(whole), 100), *range(len(whole) - 1028, len(whole), 50)):
        changed = bytearray(whole)
        changed[at] ^= 1 << int(rng.integers(8))
        cache.write_bytes(changed)
        if name_to_use(SimpleNamespace(), str(cache), [str(image)]) == str(cache):  # a letter of what is said besides
            missed += 1
            read = load_file(cache)
            assert all(np.array_equal(read[name], tensor) for name, tensor in tensors.items())
    assert missed < 30
    cache.write_bytes(whole)
    again = SimpleNamespace()
    assert name_to_use(again, str(cache), [str(image)]) == str(cache)
    assert not made_anew([again])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_neither_kept_nor_used(tmp_path: Path, value: float) -> None:
    """An embedding without control images, which says nothing of files; then one that is made now."""
    cache, item = tmp_path / "a.safetensors", SimpleNamespace(_encoded_latent=None)
    array = np.zeros((4, 8), np.float16)
    save_file({"text_embed": array}, cache)
    assert name_to_use(item, str(cache), []) == str(cache)
    array[2, 3] = value
    save_file({"text_embed": array}, cache)
    name = name_to_use(item, str(cache), [])
    assert name != str(cache)
    assert made_anew([item]) == 1
    save_file({"text_embed": array}, name)
    note_made(item)
    assert why_bad(item) == "its text_embed is not finite (NaN or infinity)"
    assert not Path(name).exists()
    assert cache.exists()


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_latents_that_cannot_be_read_now_end_the_run_with_one_line(tmp_path, monkeypatch, code):
    image, cache, item = tmp_path / "a.png", tmp_path / "a.safetensors", SimpleNamespace()
    image.write_bytes(b"1")
    name_to_use(item, str(cache), [str(image)])
    save_file({"latent": np.zeros(4, np.float32)}, cache)
    before, faults = cache.read_bytes(), Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code), pytest.raises(UnreadableError, match="cannot be read now"):
        note_made(item)
    with faults.at(range(1, 100), code), pytest.raises(UnreadableError, match="cannot be read now"):
        name_to_use(SimpleNamespace(), str(cache), [str(image)])
    assert cache.read_bytes() == before


def test_files_are_looked_at_once_all_of_their_item_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow that is; a copy of an item takes what was made for it."""
    control, read, made = tmp_path / "control.png", latents._content, []
    control.write_bytes(b"control")
    monkeypatch.setattr(latents, "_content", lambda path: (time.sleep(0.02), read(path))[1])
    image = {"encode_control_in_text_embeddings": True, "control_path": str(control), "is_video": False}
    items = [SimpleNamespace(name=name, **image) for name in "abbc"]
    seam = SimpleNamespace(original=lambda item, caption, _: str(tmp_path / f"{item.name}_{caption}.safetensors"))

    def loop(dataset: SimpleNamespace) -> None:
        for item in dataset.file_list:
            for path in [seams._embedding_path(seam, item, caption) for caption in ("caption", "blank")]:
                if not Path(path).exists():
                    made.append(path)
                    save_file({"embedding": np.ones(1000, np.float32)}, tmp_path / "whole")
                    content = (tmp_path / "whole").read_bytes()
                    with open(path, "wb", buffering=0) as file:
                        file.write(content[:2000])
                        time.sleep(0.03)
                        file.write(content[2000:])

    seams._caching("caption")(SimpleNamespace(original=loop), SimpleNamespace(file_list=items))
    assert len(made) == len(set(made)) == 6
    assert all(latents._serves(path, [str(control)]) for path in made)
    assert made_anew(items) == 0
