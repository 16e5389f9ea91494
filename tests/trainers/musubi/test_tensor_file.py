"""safetensors files that say more: whole or not at all, their tensors untouched, and never believed beyond that."""

import json
import struct
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cache_folder import tensor_bytes
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.fingerprint import NOTE
from kohya_bucket.trainers.door.tensor_files import not_finite
from kohya_bucket.trainers.musubi.cache_files import (
    BrokenFileError,
    Note,
    TensorFile,
    read_tensor_file,
    write_with_note,
)

SHAPES = {"latents_1x2x3_float32": (4, 2, 3), "empty": (0,), "clip_mask": (5,)}


def write(path: Path, fill: int = 1, note: Note | None = None) -> None:
    content = tensor_bytes(SHAPES, {"architecture": "zi"}, fill)
    write_with_note(path, lambda to: to.write_bytes(content), lambda _: note)


def note_of_text(file: TensorFile) -> Note | None:
    return Note.in_file(file, latents=False)


def test_texts_are_added_and_nothing_else_is_changed(tmp_path: Path) -> None:
    plain, more = tmp_path / "plain.safetensors", tmp_path / "new" / "more.safetensors"
    note = Note([(1, 2, "3")], {"vae": "x"})
    write(plain)
    write(more, note=note)
    assert plain.read_bytes() == tensor_bytes(SHAPES, {"architecture": "zi"})
    file, other = read_tensor_file(more), read_tensor_file(plain)
    assert (file.shapes, file.content) == (SHAPES, other.content)
    assert file.texts["architecture"] == "zi"
    assert note_of_text(file) == note
    assert note_of_text(other) is None
    assert more.read_bytes().endswith(bytes([1]) * 116)
    assert [path.name for path in more.parent.iterdir()] == [more.name]


def test_other_readers_see_the_same_tensors(tmp_path: Path) -> None:
    import safetensors.numpy as safetensors

    write(tmp_path / "plain.safetensors")
    write(tmp_path / "more.safetensors", note=Note())
    plain, more = (safetensors.load_file(tmp_path / f"{name}.safetensors") for name in ("plain", "more"))
    assert plain.keys() == more.keys()
    assert all((plain[name] == more[name]).all() for name in plain)


def test_a_file_that_is_cut_off_anywhere_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write(path, note=Note())
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenFileError):
            read_tensor_file(path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("overlap", {"b": {"data_offsets": [4, 12]}, "a": {"data_offsets": [0, 8]}}),
        ("hole", {"b": {"shape": [1], "data_offsets": [12, 16]}}),
        ("negative", {"a": {"data_offsets": [-8, 0]}}),
        ("negative side", {"a": {"shape": [-2, -1]}}),
        ("unknown type", {"a": {"dtype": "F7"}}),
        ("other shape", {"a": {"shape": [3]}}),
        ("type of another length", {"b": {"dtype": "F16"}}),
        ("a share of a side", {"a": {"shape": [2.0]}}),
        ("no numbers", {"a": {"data_offsets": ["0", "8"]}}),
    ],
)
def test_tensors_that_do_not_lie_in_the_file_as_its_header_says_are_no_file(tmp_path: Path, name: str, changes) -> None:
    table = {key: {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]} for key, at in (("a", 0), ("b", 8))}
    path = tmp_path / "x.safetensors"

    def put() -> None:
        header = json.dumps(table).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))

    put()
    assert read_tensor_file(path).shapes == {"a": (2,), "b": (2,)}
    for key, change in changes.items():
        table[key] |= change
    put()
    with pytest.raises(BrokenFileError):
        read_tensor_file(path)


def test_what_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write(path)
    before = path.read_bytes()

    def half(to: Path) -> None:
        to.write_bytes(before[:20])
        raise OSError(28, "No space left on device")

    with pytest.raises(LatentStoreError, match="disk is"):
        write_with_note(path, half, lambda _: None)
    with pytest.raises(BrokenFileError):
        write_with_note(path, lambda to: to.write_bytes(before[:20]), lambda _: None)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_note_that_somebody_carried_over_to_other_tensors_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write(path, note=Note())
    texts = read_tensor_file(path).texts
    path.write_bytes(tensor_bytes(SHAPES, texts, fill=2))
    assert note_of_text(read_tensor_file(path)) is None
    path.write_bytes(tensor_bytes(SHAPES, texts, fill=1))
    assert note_of_text(read_tensor_file(path)) == Note()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)
)


@given(st.dictionaries(st.sampled_from(["fingerprint", "further", "settings", "clips", "made_by", "seen"]), VALUES))
def test_whatever_a_note_says_it_is_read_or_ignored(said: dict[str, object]) -> None:
    file = read_of(tensor_bytes(SHAPES, {}))
    texts = {NOTE: json.dumps(said | {"content": file.content})}
    file = TensorFile(texts, file.shapes, file.content)
    assert Note.in_file(file, latents=True) is None
    text = note_of_text(file)
    assert text is None or {"seen", "made_by"} <= said.keys()


def read_of(content: bytes) -> TensorFile:
    with TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        return read_tensor_file(path)


@pytest.mark.parametrize(("kind", "torchs"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")])
def test_every_float_of_8_bits(kind: str, torchs: str) -> None:
    torch = pytest.importorskip("torch")
    bits = torch.arange(256, dtype=torch.uint8)
    finite = bits.view(getattr(torch, torchs)).float().isfinite().tolist()
    header = json.dumps({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, 2]}}).encode()
    files = (BytesIO(struct.pack("<Q", len(header)) + header + bytes([0, value])) for value in range(256))
    assert [not_finite(file) for file in files] == ["" if one else "a" for one in finite]
    assert 0 < sum(finite) < 256
