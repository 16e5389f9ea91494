"""Order "local" with datasets that know their shards themselves."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kohya_bucket import BucketBatchSampler, KohyaBuckets
from kohya_bucket.datasets.images import BucketedDataset
from kohya_bucket.datasets.webdataset import TarSource
from kohya_bucket.errors import PlanError
from kohya_bucket.images.tar_index import TarIndex


def _shard(path: Path, sizes: list[tuple[int, int]]) -> str:
    with tarfile.open(path, "w") as tar:
        for i, size in enumerate(sizes):
            out = io.BytesIO()
            Image.new("RGB", size).save(out, "PNG")
            member = tarfile.TarInfo(f"{i:03d}.png")
            member.size = out.tell()
            tar.addfile(member, io.BytesIO(out.getvalue()))
    return str(path)


def test_tar_shards_are_opened_few_at_a_time(tmp_path: Path) -> None:
    rng = np.random.RandomState(0)
    shapes = [(64, 64), (96, 48), (48, 96)]
    names = [
        _shard(tmp_path / f"{n}.tar", [shapes[k] for k in rng.choice(3, 30, p=[0.6, 0.2, 0.2])]) for n in range(12)
    ]
    data = BucketedDataset.from_source(TarSource(TarIndex.build(names)), KohyaBuckets(64, 32, 128, 16))
    for rank in range(2):
        sampler = BucketBatchSampler(data, 2, num_replicas=2, rank=rank, order="local", open_shards=4, seed=3)
        seen: dict[int, list[int]] = {}
        batches = list(sampler)
        for step, batch in enumerate(batches):
            assert len({int(data.bucket_indices[i]) for i in batch}) == 1
            for i in batch:
                seen.setdefault(int(data.source.shards[i]), []).append(step)
        spans = [(min(steps), max(steps)) for steps in seen.values()]
        assert max(sum(a <= s <= b for a, b in spans) for s in range(len(batches))) <= 4
    # as ever: the position is saved and read back
    state = sampler.state_dict(step=20)
    again = BucketBatchSampler(data, 4, order="local", open_shards=4, seed=3)
    again.load_state_dict(state)
    rest = [sorted(batch) for batch in again]
    whole = BucketBatchSampler(data, 4, order="local", open_shards=4, seed=3)
    assert rest == [sorted(batch) for batch in whole][20:]


def test_data_without_shards_is_told_what_is_missing() -> None:
    with pytest.raises(PlanError, match="needs shards"):
        BucketBatchSampler(np.zeros(9, int), 2, order="local")
