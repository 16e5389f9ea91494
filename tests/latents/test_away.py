"""What only a manifest knows of a shard that is away, and comes back, stays known."""

import random
import shutil

import pytest

from kohya_bucket.latents import LatentStore, precompute_latents
from kohya_bucket.latents.maintenance import pack, prune, status, verify
from tests.latents.stub_encoders import MeanEncoder, dataset_of, make_images
from tests.thinned import one_in

COMMANDS = {
    "prune": lambda root, _: prune(LatentStore(root)),
    "prune --damaged": lambda root, _: prune(LatentStore(root), damaged=True),
    "pack": lambda root, _: pack(LatentStore(root)),
    "other images": lambda root, more: precompute_latents(
        dataset_of(more, ["other"] * len(more)), MeanEncoder(), root, images_root=root.parent
    ),
}


def captions(root):
    store = LatentStore(root)
    return dict(zip(store.strings("source"), store.strings("caption"), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("seed", one_in(4, range(8)))
def test_captions_of_a_shard_that_was_away(tmp_path, images, seed):
    rng = random.Random(seed)
    root, away = tmp_path / "out", tmp_path / "away"
    run = {"images_root": tmp_path}
    precompute_latents(dataset_of(images, ["older"] * len(images)), MeanEncoder(), root, **run)
    precompute_latents(dataset_of(images, ["newer"] * len(images)), MeanEncoder(), root, **run)
    before = captions(root)
    assert set(before.values()) == {"newer"}
    assert len(LatentStore(root).shards) > 2
    shards = sorted((root / "shards").iterdir())
    missing = rng.sample(shards, rng.randrange(1, len(shards)))
    away.mkdir()
    cut = rng.random() < 0.5
    for path in missing:
        shutil.copy2(path, away)
        if cut:
            path.write_bytes(path.read_bytes()[: rng.randrange(1, 3000)])
        else:
            path.unlink()
    more = make_images(tmp_path / "more", [(64, 64), (100, 60), (60, 100)], seed=seed)
    assert not status(LatentStore(root)).healthy
    for name in rng.sample(list(COMMANDS), rng.choice([1, 2, 3])):
        COMMANDS[name](root, more)
        if name == "prune --damaged":  # what is given up is named no more
            assert not LatentStore(root).damage
    for path in away.iterdir():
        shutil.copy2(path, root / "shards")
    after = captions(root)
    assert {source: after.get(source) for source in before} == before
    assert not LatentStore(root).damage
    assert verify(LatentStore(root)) == []


@pytest.mark.long
def test_items_that_were_encoded_anew_meanwhile_are_those_that_count(tmp_path, images):
    root = tmp_path / "out"
    precompute_latents(dataset_of(images, ["older"] * len(images)), MeanEncoder(), root)
    precompute_latents(dataset_of(images, ["newer"] * len(images)), MeanEncoder(), root)
    shutil.move(root / "shards", tmp_path / "away")
    prune(LatentStore(root), damaged=True)
    done = precompute_latents(dataset_of(images, ["newest"] * len(images)), MeanEncoder(), root)
    assert done.encoded == len(images)
    shutil.copytree(tmp_path / "away", root / "shards", dirs_exist_ok=True)
    assert set(captions(root).values()) == {"newest"}
    pack(LatentStore(root))
    assert set(captions(root).values()) == {"newest"}
    assert LatentStore(root).away == {}
