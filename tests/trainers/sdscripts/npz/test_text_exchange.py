"""Outputs of text encoders between sd-scripts' npz and a store: every bit, and only where the caption is known."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.items import Caption
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.trainers.sdscripts.npz.exchange import export_text_npz, import_text_npz
from kohya_bucket.trainers.sdscripts.npz.read_write import CAPTION_KEY, ENCODERS_KEY, TEXT_FAMILIES, text_marks
from tests.latents.text_outputs import fill_texts, same_outputs

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

MARKS = (CAPTION_KEY, ENCODERS_KEY)


def arrays_in(path):
    with np.load(path) as file:
        return dict(file)


def outputs_of(family, seed):
    """Arrays of the names that a family's files have: states, masks, choices."""
    rng = np.random.default_rng(seed)
    made = {}
    for name in TEXT_FAMILIES[family].arrays:
        if name.startswith("apply"):
            made[name] = np.array(True)
        elif name == "caption_dropout_rate":
            made[name] = np.array(0, np.float32)
        elif "mask" in name or "ids" in name:
            made[name] = (np.arange(32) < 5 + seed).astype(np.int64)
        else:
            values = rng.standard_normal((32, 24)).astype(np.float32)
            made[name] = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return made


def folder_of(root, family, captions, *, marked=True):
    """Images with captions beside them, and a family's npz; returns the images and what the npz hold."""
    root.mkdir()
    images, want = [], {}
    for number, text in enumerate(captions):
        image = root / f"{number}.png"
        image.write_bytes(b"")
        image.with_suffix(".txt").write_text(f"{text}\nanother line", encoding="utf-8")
        arrays = want[str(image)] = outputs_of(family, len(text))
        marks = text_marks(text, "abc") if marked else {}
        np.savez(root / f"{number}{TEXT_FAMILIES[family].suffix}", **arrays, **marks)
        images.append(str(image))
    return images, want


@pytest.mark.long
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_imported_and_exported_again_every_bit_is_there(tmp_path, family):
    captions = ["one", "two two", "one"]
    images, want = folder_of(tmp_path / "a", family, captions)
    known = TEXT_FAMILIES[family]
    done = import_text_npz(images, [None] * 3, tmp_path / "text", known, images_root=tmp_path / "a")
    assert (done.done, done.skipped) == (3, [])
    store = LatentStore(tmp_path / "text")
    assert len(store) == 2
    assert store.strings("vae") == ["abc"] * 2
    for image in images:
        Path(image[:-4] + known.suffix).unlink()
    done = export_text_npz(store, images, captions, known)
    assert (done.done, done.skipped) == (3, [])
    for image, text in zip(images, captions, strict=True):
        found = arrays_in(tmp_path / "a" / (Path(image).stem + known.suffix))
        assert found[CAPTION_KEY].tobytes().decode() == text
        assert found[ENCODERS_KEY].tobytes() == b"abc"
        same_outputs({name: array for name, array in found.items() if name not in MARKS}, want[image])


def test_what_cannot_be_known_is_skipped_with_its_reason(tmp_path):
    known = TEXT_FAMILIES["sdxl"]
    images, _ = folder_of(tmp_path / "a", "sdxl", ["one", "two", "three"], marked=False)
    broken, foreign = (tmp_path / "a" / f"{n}_te_outputs.npz" for n in (1, 2))
    broken.write_bytes(broken.read_bytes()[:-40])
    np.savez(foreign, hidden_state1=np.zeros(3))
    done = import_text_npz(images, [None] * 3, tmp_path / "text", known, images_root=tmp_path)
    assert done.done == 0
    assert [Path(path).name for path, _ in done.skipped] == [f"{n}_te_outputs.npz" for n in range(3)]
    assert "does not say its caption" in done.skipped[0][1]
    assert "has no hidden_state2" in done.skipped[2][1]
    done = import_text_npz(images, ["one"] * 3, tmp_path / "text", known, images_root=tmp_path)
    assert done.done == 1
    store = LatentStore(tmp_path / "text")
    assert store.strings("source") == [Caption("one").key]
    done = export_text_npz(store, images, ["one", None, "unknown"], known)
    assert done.done == 1
    assert [why for _, why in done.skipped] == ["its caption is not known", "the store has no outputs of its caption"]
    with pytest.raises(LatentStoreError, match=r"no outputs of flux to export: it holds \['sdxl'\]"):
        export_text_npz(store, images, ["one"] * 3, TEXT_FAMILIES["flux"])


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (CAPTION_KEY, np.frombuffer(b"\xff\xfe", np.uint8), "utf-8"),
        (ENCODERS_KEY, np.frombuffer(b"\xff", np.uint8), "ascii"),
        (ENCODERS_KEY, np.frombuffer(b"a\0", np.uint8), "is not a hash"),
        ("caption_dropout_rate", np.zeros((2, 2)), "cannot be read"),
        ("caption_dropout_rate", np.array("x"), "cannot be read"),
        ("prompt_embeds", np.array([1j]), "cannot be stored"),
        ("entries", np.zeros(2), "cannot be stored"),
    ],
)
def test_what_a_file_says_is_looked_at(tmp_path, name, value, why):
    known = TEXT_FAMILIES["anima"]
    images, _ = folder_of(tmp_path / "a", "anima", ["one", "two"])
    arrays = outputs_of("anima", 1) | text_marks("one") | {name: value}
    path = tmp_path / "a" / "0_anima_te.npz"
    np.savez(path, **arrays)
    done = import_text_npz(images, [None] * 2, tmp_path / "text", known, images_root=tmp_path)
    assert done.done == 1
    [(skipped, text)] = done.skipped
    assert skipped == str(path)
    assert why in text
    assert "\n" not in text


def test_further_captions_of_an_image_have_files_and_rates_of_their_own(tmp_path):
    images, _ = folder_of(tmp_path / "a", "anima", ["one"])
    for number, rate in ((2, 0.1), (3, 0.1)):
        arrays = outputs_of("anima", number) | {"caption_dropout_rate": np.array(rate, np.float32)}
        np.savez(tmp_path / "a" / f"0_anima_te_{number}.npz", **arrays, **text_marks("one"))
    import_text_npz(images, [None], tmp_path / "text", TEXT_FAMILIES["anima"], images_root=tmp_path)
    store = LatentStore(tmp_path / "text")
    assert set(store.strings("source")) == {Caption("one").key, Caption("one", 0.1).key}


def test_images_that_share_a_file_cannot_both_be_exported(tmp_path):
    images, _ = folder_of(tmp_path / "a", "sdxl", ["one", "two"])
    import_text_npz(images, [None] * 2, tmp_path / "text", TEXT_FAMILIES["sdxl"], images_root=tmp_path)
    twin = images[0].replace(".png", ".webp")
    done = export_text_npz(
        LatentStore(tmp_path / "text"), [images[0], twin, images[0]], ["one", "two", "one"], TEXT_FAMILIES["sdxl"]
    )
    assert (done.done, [path for path, _ in done.skipped]) == (2, [twin])


def test_the_commands(tmp_path, command_line):
    images, want = folder_of(tmp_path / "a", "flux", ["one", "two"], marked=False)
    (tmp_path / "a" / "1.txt").write_text("a later one", encoding="utf-8")
    later = Path(images[1][:-4] + "_flux_te.npz").stat().st_mtime + 10
    os.utime(tmp_path / "a" / "1.txt", (later, later))

    def run(*arguments, ended=0):
        code, said, errors = command_line("cache", *arguments)
        assert code == ended, errors
        return said

    out = tmp_path / "store"
    said = run("import", tmp_path / "a", "-o", out, "--arch", "flux", "--text", "--caption-extension", ".txt", ended=1)
    assert "1 outputs imported, 1 skipped" in said
    said = run("status", out / "text")
    assert "1 item" in said
    assert "flux captions, text encoders unknown: 1" in said
    assert "1 item read, 0 damaged" in run("verify", out / "text")
    run("pack", out / "text")
    run("prune", out / "text")
    path = tmp_path / "a" / "0_flux_te.npz"
    path.unlink()
    said = run("export", out, "--arch", "flux", "--text", "--images", tmp_path / "a", ended=1)
    assert "1 outputs exported, 1 skipped" in said
    same_outputs({k: v for k, v in arrays_in(path).items() if k not in MARKS}, want[images[0]])
    for arguments, why in (
        (["export", out, "--arch", "flux", "--text"], "name their folder by --images"),
        (["export", out, "--arch", "sd", "--text", "--images", tmp_path / "a"], "must be one of sdxl, sd3, flux"),
        (["prune", out / "text", "--gone"], "holds captions, not images"),
    ):
        code, _, errors = command_line("cache", *arguments)
        assert code == 2
        assert why in errors


def test_damage_is_found_and_put_right_by_the_commands(tmp_path, command_line):
    fill_texts(tmp_path, 3)
    [shard] = (tmp_path / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[LatentStore(tmp_path).info(0).tensors["pooled"].offset] ^= 1
    shard.write_bytes(data)
    code, said, errors = command_line("cache", "verify", tmp_path)
    assert (code, "its checksum is wrong" in said, "3 items read, 1 damaged" in said) == (1, True, True)
    assert "--damaged takes that out, and training encodes these captions again" in errors
    code, said, _ = command_line("cache", "prune", tmp_path, "--damaged")
    assert (code, "1 item dropped" in said) == (0, True)
    code, said, _ = command_line("cache", "verify", tmp_path)
    assert (code, "2 items read, 0 damaged" in said) == (0, True)
    fill_texts(tmp_path, 3)
    code, said, _ = command_line("cache", "verify", tmp_path)
    assert (code, "3 items read, 0 damaged" in said) == (0, True)
