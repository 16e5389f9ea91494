"""Whatever cannot be read now, no cache of musubi-tuner's counts as missing or stale because of it."""

import errno
import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_folder import Folder

from kohya_bucket.errors import KohyaBucketError, UnreadableError
from kohya_bucket.trainers.door.batches import PlannedBatch
from kohya_bucket.trainers.musubi.batches import HELD, CachedItems, Held, TimestepPool, planned_item
from tests.faults import PASSING, Faults


def without_texts(file: Path) -> None:
    """As musubi-tuner alone writes it."""
    content = file.read_bytes()
    end = 8 + struct.unpack_from("<Q", content)[0]
    header = json.loads(content[8:end])
    del header["__metadata__"]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_every_call_of_the_system_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, noted: bool
) -> None:
    folder = Folder(tmp_path, 2)
    folder.make()
    for file in () if noted else (tmp_path / "cache").iterdir():
        without_texts(file)
    faults = Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(0), 0):
        assert folder.reasons() == [[]] * 2
        calls = faults.calls
    refused = 0
    for first in range(1, calls + 1):
        for failing in (range(first, first + 1), range(first, 10**9)):
            with faults.at(failing, code):
                try:
                    assert folder.reasons() == [[]] * 2
                except UnreadableError:
                    refused += 1
    assert refused > calls


class Manager:
    """Loads caches as musubi-tuner's batch manager does; safetensors names no file in its errors."""

    num_timestep_buckets, batch_size = None, 2
    buckets: dict[Any, list[Any]]
    bucket_batch_indices: list[tuple[Any, int]]

    def __getitem__(self, number: int) -> dict[str, list[Any]]:
        from safetensors.torch import load_file

        paths = [one.latent_cache_path for one in self.buckets[self.bucket_batch_indices[number][0]]]
        names = [Path(path).name for path in paths]
        return {"names": names, "latents": [load_file(path)["latents_1x8x8_float32"] for path in paths]}


def test_one_cache_that_is_gone_is_left_out_and_a_folder_of_them_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    folder, manager = Folder(tmp_path, 4), Manager()
    folder.make()
    caches = [tmp_path / "cache" / f"a{i}_0064x0064_zi.safetensors" for i in range(4)]
    manager.buckets = {
        (64, 64): [SimpleNamespace(latent_cache_path=str(p), text_encoder_output_cache_path=str(p)) for p in caches]
    }
    dataset: Any = SimpleNamespace(batch_manager=manager, resolution=(64, 64))
    held = Held([CachedItems.from_dataset(dataset)], TimestepPool(4, 2), "leave_out")
    group: Any = SimpleNamespace(datasets=[dataset], **{HELD: held})
    stopping: Any = SimpleNamespace(datasets=[dataset], **{HELD: held._replace(on_bad_image="stop")})
    batch = PlannedBatch(0, 0, 0, np.array([0, 1], dtype=np.int32), 7, 0)
    monkeypatch.chdir(tmp_path / "im")
    caches[1].unlink()
    assert planned_item(group, batch)["names"] == [caches[0].name, caches[2].name]
    caches[2].write_bytes(caches[2].read_bytes()[:-4] + struct.pack("<f", float("nan")))
    assert planned_item(group, batch)["names"] == [caches[0].name, caches[3].name]
    with pytest.raises(KohyaBucketError, match=r"a2.*: its latents is not finite .*: remove its cache"):
        planned_item(stopping, replace(batch, images=np.array([0, 2], dtype=np.int32)))
    (tmp_path / "im" / "model.safetensors").touch()
    (tmp_path / "cache").rename(tmp_path / "away")
    with pytest.raises(UnreadableError, match="cache is gone, or empty"):
        planned_item(group, batch)
