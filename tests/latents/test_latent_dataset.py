"""`BucketedLatentDataset`: what is stored, batched by torch's own collation."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import kohya_bucket
from kohya_bucket.datasets.latents import BucketedLatentDataset
from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.latents import precompute_latents
from kohya_bucket.latents.items import Caption, Encoding
from kohya_bucket.latents.store.exact_arrays import pack
from kohya_bucket.latents.store.writer import StoreWriter
from tests.latents.latent_helpers import bits, fill
from tests.latents.stub_encoders import SIZES, MeanEncoder, PosteriorStub, dataset_of, make_images
from tests.latents.text_outputs import fill_texts, made_outputs, same_outputs
from tests.warm import QUICK


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", SIZES, alpha=True)


def stored(images, out, encoder=None, **settings):
    captions = [f"caption {i}" for i in range(len(images))]
    captions[3] = None
    precompute_latents(dataset_of(images, captions), encoder or MeanEncoder(), out, **settings)
    return out


def batches(dataset):
    order = np.argsort(dataset.bucket_indices, kind="stable")
    return [part.tolist() for k in range(len(dataset.bucket_set)) for part in
            [order[dataset.bucket_indices[order] == k]] if len(part)]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_gives_batches_of_one_bucket(tmp_path, images, workers):
    dataset = BucketedLatentDataset(stored(images, tmp_path / "out", dtype="bfloat16"))
    context = QUICK if workers else None
    loader = DataLoader(dataset, batch_sampler=batches(dataset), num_workers=workers, multiprocessing_context=context)
    seen = []
    for batch in loader:
        (bucket,) = set(batch["bucket"])
        assert batch["latents"].shape == (len(batch["path"]), 4, bucket.height // 8, bucket.width // 8)
        assert batch["latents"].dtype == torch.bfloat16
        assert batch["original_size"].dtype == torch.int64
        assert batch["crop_ltrb"].shape == (len(batch["path"]), 4)
        assert {dataset.bucket_set[i] for i in batch["bucket_idx"].tolist()} == {bucket}
        for k, path in enumerate(batch["path"]):
            i = int(path[4:7])
            seen.append(i)
            assert batch["caption"][k] == ("" if i == 3 else f"caption {i}")
            assert tuple(batch["original_size"][k].tolist()) == SIZES[i]
            (at,) = dataset.store.find([path])
            assert np.array_equal(batch["latents"][k].view(torch.int16).numpy(), dataset.store.read(at).view(np.int16))
    assert sorted(seen) == list(range(len(images)))


def test_latents_are_not_cropped_anew(tmp_path, images):
    dataset = BucketedLatentDataset(stored(images, tmp_path / "out"))
    sampler = kohya_bucket.BucketBatchSampler(dataset, batch_size=4, remainder="catch_all")
    with pytest.raises(KohyaBucketError, match="latents cannot be cropped again, so plan without 'merge'"):
        list(DataLoader(dataset, batch_sampler=sampler))


def test_gathering_copies_once(tmp_path, images):
    dataset = BucketedLatentDataset(stored(images, tmp_path / "out"))
    indices = max(batches(dataset), key=len)
    items = dataset.__getitems__(indices)
    batch = torch.utils.data.default_collate(items)
    assert batch["latents"].data_ptr() == items[0]["latents"].data_ptr()
    alone = torch.utils.data.default_collate([dataset[i] for i in indices])
    assert torch.equal(alone["latents"], batch["latents"])


def test_items_of_several_buckets_one_by_one(tmp_path, images):
    dataset = BucketedLatentDataset(stored(images, tmp_path / "out"))
    items = dataset.__getitems__(range(len(dataset)))
    assert [item["path"] for item in items] == dataset.store.strings("source")
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    assert dataset[-1]["path"] == items[-1]["path"]


def test_scaling(tmp_path, images):
    raw = BucketedLatentDataset(stored(images, tmp_path / "raw", PosteriorStub()), scaled=False)
    scaled = BucketedLatentDataset(tmp_path / "raw")
    for i in range(len(raw)):
        assert torch.equal((raw[i]["latents"] - 0.25) * 0.5, scaled[i]["latents"])
    own = BucketedLatentDataset(stored(images, tmp_path / "own"))
    assert torch.equal(own[0]["latents"], torch.from_numpy(own.store.read(0).copy()))
    back = BucketedLatentDataset(tmp_path / "own", scaled=False)
    assert torch.equal(back[0]["latents"], own[0]["latents"] / 0.5)


def test_posteriors_are_sampled_at_every_read(tmp_path, images):
    out = stored(images, tmp_path / "out", PosteriorStub(), posterior=True)
    dataset = BucketedLatentDataset(out, scaled=False, generator=torch.Generator().manual_seed(0))
    mean, spread = (torch.from_numpy(dataset.store.read(0)[k].copy()) for k in (0, 1))
    draws = torch.stack([dataset[0]["latents"] for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    assert ((draws.mean(0) - mean).abs() < 6 * spread / 20).all()
    assert ((draws.std(0) / spread - 1).abs() < 0.3).all()


def test_flips_come_with_their_masks(tmp_path, images):
    dataset = BucketedLatentDataset(stored(images, tmp_path / "out", flip=True, mask=True), flip=1.0)
    plain = BucketedLatentDataset(tmp_path / "out")
    half = BucketedLatentDataset(tmp_path / "out", flip=0.5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dataset[0]["latents"], torch.from_numpy(plain.store.read(0, flipped=True).copy()))
    assert torch.equal(dataset[0]["alpha_mask"], plain[0]["alpha_mask"].flip(1))
    assert plain[0]["alpha_mask"].dtype == torch.float32
    for item, mirrored in zip(plain, dataset, strict=True):
        (left, top, right, bottom), width = item["crop_ltrb"].tolist(), item["bucket"].width
        assert mirrored["crop_ltrb"].tolist() == [width - right, top, width - left, bottom]
    flipped = [torch.equal(half[0]["latents"], dataset[0]["latents"]) for _ in range(100)]
    assert 25 < sum(flipped) < 75


def test_what_cannot_be_read_is_said(tmp_path, images):
    stored(images, tmp_path / "out")
    with pytest.raises(KohyaBucketError, match="--flip"):
        BucketedLatentDataset(tmp_path / "out", flip=0.5)
    stored(images, tmp_path / "out", collection="b")
    with pytest.raises(KohyaBucketError, match="several collections"):
        BucketedLatentDataset(tmp_path / "out")
    with pytest.raises(KohyaBucketError, match="no collection 'c'"):
        BucketedLatentDataset(tmp_path / "out", collection="c")
    assert len(BucketedLatentDataset(tmp_path / "out", collection="b")) == len(images)
    fill(tmp_path / "empty", [])
    with pytest.raises(KohyaBucketError, match="holds no latents"):
        BucketedLatentDataset(tmp_path / "empty")
    with pytest.raises(KohyaBucketError, match="latent store"):
        BucketedLatentDataset(tmp_path / "nothing")


def test_flips_that_only_some_have_are_said_at_once(tmp_path, images):
    stored(images[:7], tmp_path / "out", flip=True)
    stored(images, tmp_path / "out")
    with pytest.raises(KohyaBucketError, match="1 of its 8 items"):
        BucketedLatentDataset(tmp_path / "out", flip=0.5)


@pytest.mark.long
def test_workers_and_epochs_draw_differently(tmp_path, images):
    out = stored(images, tmp_path / "out", PosteriorStub(), posterior=True)
    dataset = BucketedLatentDataset(out, generator=torch.Generator().manual_seed(0))

    def draws():
        torch.manual_seed(7)
        loader = DataLoader(dataset, batch_size=1, sampler=[0] * 4, num_workers=2, multiprocessing_context=QUICK)
        return [batch["latents"] for _ in range(2) for batch in loader]

    first = draws()
    assert all(not torch.equal(first[i], first[k]) for i in range(8) for k in range(i))
    assert all(torch.equal(a, b) for a, b in zip(first, draws(), strict=True))


def test_each_latent_is_scaled_by_what_it_is(tmp_path):
    a, b = make_images(tmp_path / "images", [(64, 64), (64, 64)])
    with pytest.raises(TypeError, match=r"^precompute_latents\(\) has no argument 'worker'; the nearest is 'workers'"):
        precompute_latents(dataset_of([a]), MeanEncoder(), tmp_path / "out", worker=2)

    class Raw(PosteriorStub):
        fingerprint = "mean"

    precompute_latents(dataset_of([a]), MeanEncoder(), tmp_path / "out", images_root=tmp_path / "images")
    precompute_latents(dataset_of([b]), Raw(), tmp_path / "out", images_root=tmp_path / "images")
    dataset = BucketedLatentDataset(tmp_path / "out")
    together = dataset.__getitems__([0, 1])
    assert all(torch.equal(item["latents"], dataset[k]["latents"]) for k, item in enumerate(together))
    assert not torch.equal(dataset[1]["latents"], torch.from_numpy(dataset.store.read(1).copy()))


def test_latents_of_two_vaes_are_not_trained_together(tmp_path, images):
    class Other(MeanEncoder):
        fingerprint = "other"

    stored(images, tmp_path / "out")
    precompute_latents(dataset_of(images[:3]), Other(), tmp_path / "out")
    with pytest.raises(KohyaBucketError, match=r"several VAEs \(5 of mean, 3 of other\)"):
        BucketedLatentDataset(tmp_path / "out")
    stored(images, tmp_path / "out")
    assert len(BucketedLatentDataset(tmp_path / "out")) == len(images)


@pytest.mark.parametrize("first", [0, 1])
def test_masks_that_only_some_have_are_batched_with_ones(tmp_path, first):
    paths = make_images(tmp_path / "images", [(64, 64), (64, 64)], alpha=True)
    root = tmp_path / "images"
    precompute_latents(dataset_of([paths[first]]), MeanEncoder(), tmp_path / "out", mask=True, images_root=root)
    precompute_latents(dataset_of([paths[1 - first]]), MeanEncoder(), tmp_path / "out", images_root=root)
    (batch,) = DataLoader(BucketedLatentDataset(tmp_path / "out"), batch_size=2)
    assert (batch["alpha_mask"][first] < 1).any()
    assert (batch["alpha_mask"][1 - first] == 1).all()


def test_outputs_of_text_encoders_are_no_latents(tmp_path):
    fill_texts(tmp_path, 2)
    with pytest.raises(LatentStoreError, match="holds outputs of text encoders: name the store around it"):
        BucketedLatentDataset(tmp_path)


def test_items_have_the_outputs_of_their_captions(tmp_path):
    fill(tmp_path, ["a.png", "b.png"])
    with pytest.raises(LatentStoreError, match=r"text does not exist.*precompute --text"):
        BucketedLatentDataset(tmp_path, text_outputs="flux")
    want = {}
    for number, name in enumerate(["a.png", "b.png"]):
        with StoreWriter(tmp_path / "text") as writer:
            want[name] = made_outputs(number)
            arrays = {key: pack(array) for key, array in want[name].items()}
            writer.add_text(Caption(f"caption of {name}").entry("flux", Encoding()), arrays)
        if number == 0:
            with pytest.raises(LatentStoreError, match=r"no outputs of flux for 1 of 2 captions.*'caption of b\.png'"):
                BucketedLatentDataset(tmp_path, text_outputs="flux")
    with pytest.raises(LatentStoreError, match=r"no outputs of sdxl for 2 of 2.*holds those of \['flux'\]"):
        BucketedLatentDataset(tmp_path, text_outputs="sdxl")
    dataset = pickle.loads(pickle.dumps(BucketedLatentDataset(tmp_path, text_outputs="flux")))
    for batch in DataLoader(dataset, batch_size=2, shuffle=True):
        for k, name in enumerate(batch["path"]):
            found = {key: value[k] for key, value in batch["text_outputs"].items()}
            assert found["states"].dtype == torch.bfloat16
            same_outputs(
                {key: value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
                 for key, value in found.items()}, want[name],
            )  # fmt: skip


def test_dropped_captions_have_the_outputs_of_the_empty_one(tmp_path):
    fill(tmp_path, NAMES := [f"{i}.png" for i in range(40)])
    with StoreWriter(tmp_path / "text") as writer:
        for number, caption in enumerate(f"caption of {name}" for name in NAMES):
            arrays = {key: pack(array) for key, array in made_outputs(number).items()}
            writer.add_text(Caption(caption).entry("flux", Encoding()), arrays)
    with pytest.raises(LatentStoreError, match=r"no outputs of flux for 1 of 41 captions, the first of them ''"):
        BucketedLatentDataset(tmp_path, text_outputs="flux", caption_dropout=0.5)
    with StoreWriter(tmp_path / "text") as writer:
        arrays = {key: pack(array) for key, array in made_outputs(99).items()}
        writer.add_text(Caption("").entry("flux", Encoding()), arrays)
    generator = torch.Generator().manual_seed(3)
    options = {"text_outputs": "flux", "caption_dropout": 0.5, "generator": generator}
    pooled = {name: made_outputs(number)["pooled"] for number, name in enumerate(NAMES)}
    dropped = 0
    for item in map(BucketedLatentDataset(tmp_path, **options).__getitem__, range(len(NAMES))):
        dropped += item["caption"] == ""
        assert item["caption"] in ("", f"caption of {item['path']}")
        want = pooled[item["path"]] if item["caption"] else made_outputs(99)["pooled"]
        assert item["text_outputs"]["pooled"].numpy().tolist() == want.tolist()
    assert 10 < dropped < 30

    plain = BucketedLatentDataset(tmp_path, text_outputs="flux")
    always = BucketedLatentDataset(tmp_path, text_outputs="flux", caption_dropout=1)
    for number in range(-len(NAMES), 0):  # counted from the end
        item = plain[number]
        assert item["path"] == plain[number + len(NAMES)]["path"]
        assert item["text_outputs"]["pooled"].tolist() == pooled[item["path"]].tolist()
        assert always[number]["text_outputs"]["pooled"].tolist() == made_outputs(99)["pooled"].tolist()


@pytest.mark.parametrize("name", ["flip", "caption_dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.5", None, True])
def test_what_is_no_probability_is_refused(tmp_path, name, value):
    with pytest.raises(KohyaBucketError, match=f"{name} is {value!r}, but must be a probability, from 0 to 1"):
        BucketedLatentDataset(tmp_path, **{name: value})


def test_captions_that_are_not_there_cannot_be_dropped(tmp_path, images):
    precompute_latents(dataset_of(images[:2]), MeanEncoder(), tmp_path / "out")
    with pytest.raises(LatentStoreError, match=r"caption_dropout is 0\.1, but no item of .*out has a caption"):
        BucketedLatentDataset(tmp_path / "out", caption_dropout=0.1)
    precompute_latents(dataset_of(images[:2], ["a", "b"]), MeanEncoder(), tmp_path / "out", collection="told")
    BucketedLatentDataset(tmp_path / "out", collection="told", caption_dropout=0.1)
    with pytest.raises(LatentStoreError, match=r"no item of .*out has a caption"):
        BucketedLatentDataset(tmp_path / "out", collection="", caption_dropout=0.1)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.weekly)])
def test_ranks_with_generators_of_one_seed_draw_differently(tmp_path, monkeypatch, workers):
    fill(tmp_path, [f"{i}.png" for i in range(40)])
    patterns = []
    for rank in (0, 1, 2, 1):
        monkeypatch.setattr("kohya_bucket.datasets.latents.world", lambda rank=rank: (3, rank))
        dataset = BucketedLatentDataset(tmp_path, caption_dropout=0.5, generator=torch.Generator().manual_seed(3))
        seeds = torch.Generator().manual_seed(4)
        context = "spawn" if workers else None  # which knows no process group
        loader = DataLoader(dataset, 8, num_workers=workers, multiprocessing_context=context, generator=seeds)
        patterns.append([caption for batch in loader for caption in batch.get("caption", batch["path"])])
    assert patterns[1] == patterns[3]
    assert len({tuple(pattern) for pattern in patterns}) == 3


def test_order_local_reads_the_stores_shards(tmp_path):
    sizes = [(64, 32), (32, 64), (64, 64)]
    for k, size in enumerate(sizes):
        names = [f"{k}/{i:02d}.png" for i in range(40)]
        fill(tmp_path / "out", names, shard_bytes=8 * bits(0, bucket=size).nbytes, bucket_size=size)
    dataset = BucketedLatentDataset(tmp_path / "out")
    assert len(np.unique(dataset.shards)) == len(dataset.store.shards) == 15
    for shard in np.unique(dataset.shards):
        of_shard = {dataset.store.info(int(row)).name for row in dataset._rows[dataset.shards == shard]}
        assert len(of_shard) == 1
    sampler = kohya_bucket.BucketBatchSampler(dataset, 4, order="local", open_shards=4)
    steps = [set(dataset.shards[batch].tolist()) for batch in sampler]
    spans = [[s for s, found in enumerate(steps) if shard in found] for shard in range(15)]
    assert max(sum(min(at) <= s <= max(at) for at in spans) for s in range(len(steps))) <= 4
