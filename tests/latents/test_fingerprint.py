"""One factor at a time: each change is noticed, and nothing else is."""

import os
from contextlib import contextmanager
from dataclasses import fields, replace

import numpy as np
import pytest

from kohya_bucket.latents.dtypes import dtype_name, from_float32, to_float32
from kohya_bucket.latents.fingerprint import (
    Fingerprint,
    Stale,
    StaleReason,
    as_text,
    module_hash,
    source_identity,
    stamp_is_shared,
    stamps_shared,
    why_stale,
)
from tests.latents.latent_helpers import PRINT

CHANGES = {
    "source_bytes": 101,
    "source_mtime_ns": 201,
    "vae": "another",
    "bucket_size": (32, 64),
    "resized_size": (71, 32),
    "crop": (2, 0),
    "interpolation": "lanczos/pillow",
    "dtype": "float32",
    "kind": "posterior",
    "flip": True,
    "mask": True,
}


def test_every_field_has_a_case():
    assert set(CHANGES) | {"source_hash"} == {f.name for f in fields(Fingerprint)}


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_factor_is_one_reason(name):
    changed = replace(PRINT, **{name: CHANGES[name]})
    assert why_stale(PRINT, PRINT) == []
    assert len(why_stale(PRINT, changed)) == 1
    back = why_stale(changed, PRINT)
    assert back == [] if name in ("flip", "mask") else len(back) == 1


def test_what_imitates_a_library_serves_like_it():
    stub = replace(PRINT, interpolation=f"{PRINT.interpolation}-stub")
    assert why_stale(stub, PRINT) == why_stale(PRINT, stub) == []
    assert len(why_stale(stub, replace(PRINT, interpolation="area/pillow"))) == 1


def test_the_content_hash_decides_when_both_are_known():
    stored = replace(PRINT, source_hash="aa")
    assert why_stale(stored, replace(PRINT, source_hash="aa", source_mtime_ns=9)) == []
    assert why_stale(stored, replace(PRINT, source_hash="bb")) == [
        StaleReason(Stale.SOURCE, "its content hash differs")
    ]


def test_a_touched_file_is_current_and_an_edited_one_is_not(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"image")
    size, mtime, content = source_identity(path, content=True)
    stored = replace(PRINT, source_bytes=size, source_mtime_ns=mtime, source_hash=content)
    os.utime(path, ns=(1, mtime + 5))
    touched = replace(stored, source_mtime_ns=mtime + 5, source_hash="")
    assert why_stale(stored, touched, path) == []
    (reason,) = why_stale(replace(stored, source_hash=""), touched, path)
    assert str(reason) == "the image changed (its modification time differs)"
    path.write_bytes(b"IMAGE")
    assert why_stale(stored, touched, path) == [StaleReason(Stale.SOURCE, "its content hash differs")]


def test_what_is_ignored_is_no_reason():
    other = replace(PRINT, **CHANGES)
    kinds = [reason.kind for reason in why_stale(PRINT, other)]
    # length and time of the file are one, and the crop follows from the bucket and the resized size
    assert len(kinds) == len(set(kinds)) == len(CHANGES) - 2
    assert why_stale(PRINT, other, ignoring=kinds) == []
    for kind in kinds:
        assert [reason.kind for reason in why_stale(PRINT, other, ignoring=set(kinds) - {kind})] == [kind]


def test_reasons_are_for_people_too():
    resized = StaleReason(Stale.RESIZED, "70x32", "64x32")
    assert (str(resized), resized.brief) == ("the resized size changed (70x32 -> 64x32)", "the resized size changed")
    shape = StaleReason(Stale.SHAPE, "latents", [4, 8, 8], [4, 8, 16])
    assert str(shape) == shape.brief == "its latents has shape [4, 8, 8], not [4, 8, 16]"
    dropout = StaleReason(Stale.DROPOUT, 0.1, 0.25)
    assert as_text([dropout, StaleReason(Stale.MASK)]) == (
        "the caption_dropout_rate changed (0.1 -> 0.25); the alpha mask is missing"
    )


def test_hash_of_weights():
    import torch

    torch.manual_seed(0)
    one = torch.nn.Linear(3, 4)
    same = torch.nn.Linear(3, 4)
    same.load_state_dict(one.state_dict())
    assert module_hash(one) == module_hash(same)
    # under other names, as a convolution, in another type: one model
    other = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(3, 4, 1)})
    other.load_state_dict({"conv.weight": one.weight[:, :, None, None], "conv.bias": one.bias})
    assert module_hash(other) == module_hash(one)
    assert module_hash(one.to(torch.bfloat16)) == module_hash(same)
    for part, change in (("bias", 1.01), ("weight", -1.0)):
        with torch.no_grad():
            getattr(same, part).view(-1)[2] *= change
        assert module_hash(one) != module_hash(same)
        same.load_state_dict(one.state_dict())
    turned = torch.nn.Linear(4, 3, bias=False)
    turned.weight.data = one.weight.data.float().reshape(3, 4)
    plain = torch.nn.Linear(3, 4, bias=False)
    plain.weight.data = one.weight.data.float()
    assert module_hash(turned) != module_hash(plain)


def test_bfloat16_rounds_as_torch_does():
    import torch

    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    bits[:4] = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00008000]
    values = bits.view(np.float32)
    want = torch.from_numpy(values.copy()).to(torch.bfloat16)
    got = from_float32(values, "bfloat16")
    real = ~np.isnan(values)
    assert np.array_equal(got[real], want.view(torch.int16).numpy().view(np.uint16)[real])
    assert np.isnan(to_float32(got, "bfloat16")[~real]).all()
    assert np.array_equal(to_float32(got, "bfloat16")[real], want.float().numpy()[real])


@pytest.mark.parametrize(
    ("given", "name"), [("bf16", "bfloat16"), (np.float32, "float32"), ("torch.float16", "float16")]
)
def test_names_of_types(given, name):
    assert dtype_name(given) == name


def test_a_sampled_hash_knows_a_module_again():
    import torch

    from kohya_bucket.latents.fingerprint import sampled_hash

    def module():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Embedding(5, 3))

    first = sampled_hash(module())
    assert len(first) == 32
    assert sampled_hash(module()) == first
    changed = module()
    with torch.no_grad():
        changed[1].weight *= 1.01
    assert sampled_hash(changed) != first
    assert sampled_hash(module().to(torch.float16)) != first
    assert sampled_hash(module().to("meta")) == sampled_hash(object()) == ""


def test_files_that_share_length_and_time():
    rng = np.random.default_rng(0)
    for _ in range(100):
        nbytes, mtimes = rng.integers(-1, 4, (2, 20))
        stamps = list(zip(nbytes.tolist(), mtimes.tolist(), strict=True))
        expected = [stamp[0] >= 0 and stamps.count(stamp) > 1 for stamp in stamps]
        assert stamps_shared(nbytes, mtimes).tolist() == expected


def twins(folder):
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(b"of one length")
        os.utime(folder / name, ns=(10**18, 10**18))
    return os.fspath(folder / "a.png")


def test_stamps_of_files_beside_one_that_goes_away(tmp_path, monkeypatch):
    path, other, scandir = twins(tmp_path), tmp_path / "c.tmp", os.scandir
    other.touch()

    @contextmanager
    def later(folder):
        with scandir(folder) as entries:
            found = list(entries)
        other.unlink()
        yield found

    monkeypatch.setattr(os, "scandir", later)
    assert stamp_is_shared(path)


def test_a_folder_is_looked_through_once_an_occasion(tmp_path, monkeypatch):
    path, looks, scandir = twins(tmp_path), [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: looks.append(folder) or scandir(folder))
    for number in range(3):
        assert stamp_is_shared(path, "one")
        (tmp_path / f"{number}.safetensors").touch()
        os.utime(tmp_path, ns=(number, number))
    assert len(looks) == 1
    (tmp_path / "b.png").write_bytes(b"another")
    assert not stamp_is_shared(path, "another")
    assert len(looks) == 2
