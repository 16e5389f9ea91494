"""LoRA training by the real `train_network.py`, by its own command line, with the launcher or a patch."""

import collections
import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from sdscripts_support import metadata, random_sizes, write_images
from training_runs import train, write_config

PATCH = Path(__file__).parents[1] / "patches" / "library-init.patch"
COUNT = 11
NAMES = {f"number {i}": 1 for i in range(COUNT)}
pytestmark = pytest.mark.slow


@pytest.fixture
def data(unpatched, tmp_path):
    write_images(tmp_path / "images", random_sizes(COUNT, 1, 100, 300))
    return tmp_path / "images"


def epochs_of(batches, count):
    """How often each image was trained in each of so many epochs."""
    per_epoch, rest = divmod(len(batches), count)
    assert not rest
    return [
        collections.Counter(
            image for step in batches[k * per_epoch :][:per_epoch] for row in step for image in row["images"]
        )
        for k in range(count)
    ]


@pytest.mark.training_run("not cached")
def test_every_image_once_in_each_epoch(sd_scripts_dir, data, tmp_path):
    run = train(sd_scripts_dir, write_config(tmp_path, data), "--max_train_epochs", 2, out=tmp_path / "out")
    run.assert_trained(len(run.batches))
    assert epochs_of(run.batches, 2) == [NAMES, NAMES]
    half = len(run.batches) // 2
    assert run.batches[:half] != run.batches[half:]
    assert "sd-scripts' buckets" in run.log
    for epoch in (1, 2):
        assert run.log.count(f"epoch {epoch}: {COUNT} images, 0 missed, 0 repeated") == 1


@pytest.mark.training_run("8 persistent workers")
def test_every_image_with_many_workers(sd_scripts_dir, data, tmp_path):
    options = ["--max_train_epochs", 3, "--max_data_loader_n_workers", 8, "--persistent_data_loader_workers"]
    run = train(sd_scripts_dir, write_config(tmp_path, data), *options, out=tmp_path / "out")
    run.assert_trained(len(run.batches))
    assert epochs_of(run.batches, 3) == [NAMES] * 3


@pytest.mark.training_run("persistent workers without workers")
def test_a_loader_that_pytorch_refuses_ends_the_run_in_one_line_before_caches_are_made(sd_scripts_dir, data, tmp_path):
    options = ["--max_data_loader_n_workers", 0, "--persistent_data_loader_workers", "--cache_latents"]
    run = train(sd_scripts_dir, write_config(tmp_path, data), *options, out=tmp_path / "out")
    assert run.status == 2
    assert "persistent_data_loader_workers keeps workers, and max_data_loader_n_workers is 0: leave" in run.log
    assert "Traceback" not in run.log


@pytest.mark.training_run("2 processes")
@pytest.mark.parametrize("shapes", ["equal_cost", "one"])
def test_two_processes_without_a_seed(sd_scripts_dir, data, tmp_path, shapes):
    config = write_config(tmp_path, data, f"[kohya_bucket]\nstep_shapes = '{shapes}'")
    run = train(sd_scripts_dir, config, "--max_train_epochs", 2, out=tmp_path / "out", ranks=2)
    run.assert_trained(len(run.batches))
    assert all(len({tuple(row["size"]) for row in step}) == 1 for step in run.batches) == (shapes == "one")
    alone = sum(step[0]["images"] == step[1]["images"] for step in run.batches)
    for epoch in epochs_of(run.batches, 2):
        assert not NAMES.keys() - epoch.keys()
        assert sum(epoch.values()) - COUNT <= {"equal_cost": 0, "one": alone}[shapes]
    for step in run.batches:  # what an image adds to the average of both means: the same as on one process
        part = collections.Counter()
        for row in step:
            weights = zip(row["images"], row["weights"], strict=True)
            part.update({image: weight / len(row["images"]) / 2 for image, weight in weights})
        counted = [weight for weight in part.values() if weight]  # a batch that is repeated at the end adds nothing
        assert counted == pytest.approx([1 / len(counted)] * len(counted))


@pytest.mark.training_run("2 processes")
def test_a_trainer_that_does_not_weigh_images_says_so(unpatched, sd_scripts_dir, tmp_path):
    data = tmp_path / "images"
    write_images(data, [(128, 128)] * 3)  # one step: two images on one GPU, one on the other
    # without --cache_latents some versions of February 2026 end here by themselves: they ask for a strategy too early
    config, options = write_config(tmp_path, data), ["--max_train_steps", 1, "--cache_latents"]
    images = {str(file): {"caption": file.stem} for file in data.glob("*.png")}
    (tmp_path / "metadata.json").write_text(json.dumps(images), encoding="utf-8")
    without = config.with_name("metadata.toml")
    named = f"metadata_file = '{tmp_path / 'metadata.json'}'"
    text = config.read_text(encoding="utf-8").replace("caption_extension = '.txt'", named)
    without.write_text(text, encoding="utf-8")
    run = train(sd_scripts_dir, without, *options, out=tmp_path / "out", trainer="fine_tune.py", network=False, ranks=2)
    assert len(run.batches) == 1, run.log[-3000:]  # it cannot save: there is no whole checkpoint
    assert "ignores loss_weights" in run.log
    run = train(sd_scripts_dir, config, *options, out=tmp_path / "db", trainer="train_db.py", network=False, ranks=2)
    assert len(run.batches) == 1, run.log[-3000:]
    assert "ignores loss_weights" not in run.log


@pytest.mark.training_run("cached in memory")
def test_latents_in_memory(sd_scripts_dir, data, tmp_path):
    config = write_config(tmp_path, data)
    options = ["--max_train_steps", 4, "--cache_latents"]
    ours = train(sd_scripts_dir, config, *options, out=tmp_path / "ours")
    ours.assert_trained(4)
    theirs = train(sd_scripts_dir, config, *options, out=tmp_path / "theirs", door=())
    assert theirs.status == 0, theirs.log[-3000:]
    assert "kohya_bucket in sd-scripts" not in theirs.log
    for key in ("ss_bucket_info", "ss_num_train_images", "ss_num_batches_per_epoch", "ss_datasets", "ss_dataset_dirs"):
        assert metadata(ours.weights).get(key) == metadata(theirs.weights).get(key), key


@pytest.mark.training_run("cached on disk")
def test_latents_on_disk(sd_scripts_dir, data, tmp_path):
    options = ["--max_train_epochs", 1, "--cache_latents", "--cache_latents_to_disk"]
    for name in ("first", "second"):
        run = train(sd_scripts_dir, write_config(tmp_path, data), *options, out=tmp_path / name)
        run.assert_trained(len(run.batches))
        assert epochs_of(run.batches, 1) == [NAMES]
    assert len(list(data.glob("*.npz"))) == COUNT


@pytest.mark.training_run("not cached, bucket_no_upscale")
def test_no_upscale_on_images_that_end_in_a_division_by_zero(sd_scripts_dir, data, tmp_path):
    write_images(data, [(50, 1000)], prefix="narrow")
    config = write_config(tmp_path, data, bucket_no_upscale=True)
    theirs = train(sd_scripts_dir, config, "--max_train_steps", 2, out=tmp_path / "theirs", door=())
    assert "ZeroDivisionError" in theirs.log
    ours = train(sd_scripts_dir, config, "--max_train_epochs", 1, out=tmp_path / "ours")
    ours.assert_trained(len(ours.batches))
    assert epochs_of(ours.batches, 1) == [NAMES]
    assert "1 image will not be trained" in ours.log


@pytest.mark.training_run("from a patched checkout")
def test_through_the_patch(sd_scripts_dir, data, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(sd_scripts_dir, checkout, ignore=shutil.ignore_patterns(".git", "__pycache__", ".venv", "venv"))
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    subprocess.run(["git", "apply", PATCH], cwd=checkout, check=True)
    run = train(checkout, write_config(tmp_path, data), "--max_train_epochs", 2, out=tmp_path / "out", door=())
    run.assert_trained(len(run.batches))
    assert epochs_of(run.batches, 2) == [NAMES, NAMES]


@pytest.mark.training_run("with a rule or option of its own")
@pytest.mark.parametrize(
    "options",
    [
        "rule = 'novelai'",
        "rule = 'exact'",
        "rule = 'auto'\nnum_buckets = 3",
        "rule = 'preset:NAME'",
        "rule = 'file:FILE'",
        "switching = 'geometric'\nmax_crop = 0.5",
        "no_upscale_fit = 'largest'",
        "no_upscale_fit = 'standard'",
        "order = 'runs'\nremainder = 'pad'",
        "remainder = 'merge'\nmerge_max_crop = 0.5",
        "resolutions = [128, 192]\nresolution_mode = 'rotate'\nremainder = 'catch_all'",
    ],
)
def test_every_rule(sd_scripts_dir, data, tmp_path, options):
    buckets = tmp_path / "buckets.toml"
    sizes = [(128, 128), (192, 64), (64, 192)]
    buckets.write_text(
        "name = 'mine'\nvae_factor = 64\n" + "".join(f"[[buckets]]\nwidth = {w}\nheight = {h}\n" for w, h in sizes),
        encoding="utf-8",
    )
    options = options.replace("NAME", "sd15").replace("FILE", buckets.as_posix())
    config = write_config(
        tmp_path, data, f"[kohya_bucket]\n{options}", bucket_no_upscale="no_upscale_fit" in options
    )  # fmt: skip
    steps = 1 if "preset" in options else 4  # a preset's images are 16 times as large as the others here
    run = train(sd_scripts_dir, config, "--max_train_steps", steps, "--cache_latents", out=tmp_path / "out")
    run.assert_trained(steps)


SEVERAL = (
    "[kohya_bucket]\nresolutions = [128, 192]\nresolution_mode = 'rotate'\nremainder = 'merge'\nmerge_max_crop = 0.5"
)


def weights_from(kind, sd_scripts_dir, data, tmp_path, table, steps=4):
    """The weights that a run ends with that makes its latents at its start, in files of a kind, and reads them."""
    if kind == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    table += f"\nlatent_cache = '{kind}'" + (f"\nlatent_cache_dir = '{tmp_path / 'store'}'" if kind == "shards" else "")
    options = ["--cache_latents", "--cache_latents_to_disk", "--seed", 7, "--vae_batch_size", 1]
    config = write_config(tmp_path, data, table)
    run = train(sd_scripts_dir, config, "--max_train_steps", steps, *options, out=tmp_path / kind)
    run.assert_trained(steps)
    return run.tensors


@pytest.mark.training_run("cached in shards")
def test_shards_train_the_same_weights_as_npz(sd_scripts_dir, data, tmp_path):
    weights = [weights_from(kind, sd_scripts_dir, data, tmp_path, "[kohya_bucket]") for kind in ("shards", "npz")]
    assert list((tmp_path / "store").iterdir())
    assert weights[0] == weights[1]


@pytest.mark.training_run("cached in shards, few of them at a time")
@pytest.mark.parametrize("ranks", [1, 2])
def test_few_shards_at_a_time(sd_scripts_dir, data, tmp_path, ranks):
    """A shard holds one bucket here, and a window one shard: no bucket comes back in an epoch, but for the run's first
    step, which needs most memory."""
    table = f"[kohya_bucket]\nlatent_cache = 'shards'\nlatent_cache_dir = '{tmp_path / 'store'}'\n"
    config = write_config(tmp_path, data, table + "order = 'local'\nopen_shards = 2")
    options = ["--cache_latents", "--max_train_epochs", 2, "--seed", 1]
    refused = train(sd_scripts_dir, config, *options, out=tmp_path / "refused")
    assert refused.status == 2, refused.log[-3000:]
    assert "order is 'local', but latents are not cached in shards" in refused.log
    assert "Traceback" not in refused.log
    run = train(sd_scripts_dir, config, *options, "--cache_latents_to_disk", out=tmp_path / "out", ranks=ranks)
    run.assert_trained(len(run.batches))
    sizes = [tuple(step[0]["size"]) for step in run.batches]
    half = len(sizes) // 2
    for epoch in (sizes[1:half], sizes[half:]):
        assert 1 + sum(a != b for a, b in itertools.pairwise(epoch)) == len(set(epoch)) > 1
    if ranks == 1:
        assert run.batches[:half] != run.batches[half:]
        assert epochs_of(run.batches, 2) == [NAMES, NAMES]


@pytest.mark.training_run("cached in shards, several sizes")
@pytest.mark.parametrize("remainder", ["merge", "catch_all"])
def test_several_sizes_from_disk(sd_scripts_dir, data, tmp_path, remainder):
    """Shards and npz, each made at the start of one run and read by it, train the same weights."""
    table = SEVERAL if remainder == "merge" else SEVERAL.replace("'merge'\nmerge_max_crop = 0.5", f"'{remainder}'")
    weights = [weights_from(kind, sd_scripts_dir, data, tmp_path, table) for kind in ("shards", "npz")]
    assert len(list(data.glob("*_sd.npz"))) == COUNT
    assert len(list(data.glob("*_sd_at_*.npz"))) > COUNT  # each image at the other resolution, and those that may move
    assert list((tmp_path / "store").iterdir())
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(1, marks=pytest.mark.training_run("resumed, several sizes")),
        pytest.param(2, marks=pytest.mark.training_run("resumed on 2 processes, several sizes")),
    ],
)
def test_stopped_and_resumed_with_accumulation(sd_scripts_dir, data, tmp_path, ranks):
    """Two epochs of a run, and its second part again from a state in mid-epoch: the same images at the same sizes."""
    config = write_config(tmp_path, data, f"{SEVERAL}\nstep_shapes = 'one'", batch_size=1)
    options = ["--cache_latents", "--gradient_accumulation_steps", 2, "--seed", 3]
    total = 6 if ranks > 1 else 9
    options += ["--max_train_steps", total]
    whole = train(
        sd_scripts_dir, config, *options, "--save_every_n_steps", 2, "--save_state", out=tmp_path / "whole", ranks=ranks
    )  # fmt: skip
    whole.assert_trained(total)
    assert {len(step) for step in whole.batches} == {ranks}
    assert all(len({tuple(row["size"]) for row in step}) == 1 for step in whole.batches)
    assert len({tuple(row["size"]) for step in whole.batches for row in step}) > 1
    # With another seed the images were the same too, but latents that are made anew are drawn by it.
    resume = ["--resume", tmp_path / "whole" / "lora-step00000002-state"]
    for number, place in enumerate([["--skip_until_initial_step"], ["--initial_step", 2]][: 3 - ranks]):
        rest = train(sd_scripts_dir, config, *options, *resume, *place, out=tmp_path / f"rest{number}", ranks=ranks)
        rest.assert_trained(total)
        assert rest.batches == whole.batches[4:]
        # sd-scripts saves the random states of the first process alone.
        assert ranks > 1 or rest.tensors == whole.tensors
