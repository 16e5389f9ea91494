"""`kohya-bucket precompute` and `cache`: the commands as a user types them."""

import json
import os
import re
import shlex

import numpy as np
import pytest

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents import LatentStore
from kohya_bucket.latents.items import Caption, Encoding
from kohya_bucket.latents.store.exact_arrays import pack
from kohya_bucket.latents.store.writer import StoreWriter
from kohya_bucket.latents.vae import diffusers_vae
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.names import npz_path
from tests.command_line import encoded_counts
from tests.latents.latent_helpers import fill
from tests.latents.stub_encoders import MeanEncoder, PosteriorStub, make_images

SIZES = [(100, 60), (60, 100), (64, 64), (100, 62), (300, 200)]


@pytest.fixture
def images(tmp_path):
    made = make_images(tmp_path / "images", SIZES)
    made[0].with_suffix(".txt").write_text("a caption\n", encoding="utf-8")
    return made


@pytest.fixture
def run(monkeypatch, command_line):
    """Runs a command; returns exit code, output and errors. The VAE is a stub."""
    encoders = {"mean": MeanEncoder, "posterior": PosteriorStub}

    def load(name, *, device, architecture, dtype="bfloat16"):
        return encoders[name]()  # no other option is one of `load_encoder`

    monkeypatch.setattr(diffusers_vae, "load_encoder", load)
    return command_line


def bucket_file(tmp_path):
    path = tmp_path / "buckets.json"
    sizes = [{"width": w, "height": h} for w, h in [(64, 64), (80, 48), (48, 80)]]
    path.write_text(json.dumps({"name": "small", "vae_factor": 8, "buckets": sizes}), encoding="utf-8")
    return path


def test_precompute_status_verify(tmp_path, images, run):
    folder, out = tmp_path / "images", tmp_path / "out"
    options = ["--vae", "mean", "-o", out, "-c", bucket_file(tmp_path), "--encode-batch-size", 2, "--flip"]
    code, text, _ = run("precompute", folder, *options)
    assert code == 0
    assert encoded_counts(text) == (5, 0, 0)
    store = LatentStore(out)
    assert store.info(0).latents.dtype == "bfloat16"
    assert store.entry(int(store.find(["img_000.png"])[0])).caption == "a caption"
    assert encoded_counts(run("precompute", folder, *options)[1])[:2] == (0, 5)
    code, text, _ = run("cache", "status", out)
    assert (code, "whether images are missing is told with --image-dir" in text) == (0, True)
    code, text, _ = run("cache", "status", out, "--image-dir", folder)
    assert (code, "everything is up to date" in text) == (0, True)
    added = make_images(folder / "later", [(64, 64)] * 3)
    code, text, _ = run("cache", "status", out, "--image-dir", folder)
    assert (code, "an image without a latent: 3; what to do: run `precompute` for that folder again" in text) == (
        1,
        True,
    )
    assert json.loads(run("cache", "status", out, "--image-dir", folder, "--json")[1])["missing"] == list(
        map(str, added)
    )
    for path in added:
        path.unlink()
    code, text, _ = run("cache", "status", out, "--json")
    assert json.loads(text)["items"] == 5
    assert run("cache", "verify", out)[:2] == (0, "5 items read, 0 damaged, 0 files unusable\n")
    os.utime(images[1], ns=(1, 1))
    code, text, _ = run("cache", "status", out)
    assert code == 1
    assert "its image changed: 1; what to do: run the same `precompute` again" in text
    assert f"  {images[1]}\n" in text


def test_precompute_to_an_address(tmp_path, images, run, monkeypatch):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS", str(tmp_path / "kept"))
    folder, out = tmp_path / "images", f"memory://{tmp_path.name}/cli/latents"
    options = ["--vae", "mean", "-c", bucket_file(tmp_path)]
    code, text, _ = run("precompute", folder, *options, "-o", out)
    assert (code, encoded_counts(text)) == (0, (5, 0, 0))
    code, text, _ = run("cache", "pack", out, "--output", tmp_path / "here")
    assert (code, "5 items copied" in text, "outputs of captions" in text) == (0, True, False)
    assert LatentStore(tmp_path / "here").layout.images_root() == folder
    code, _, errors = run("precompute", folder, *options, "-o", out, "--format", "npz", "--arch", "sd")
    assert (code, str(out) in errors) == (2, True)


def test_a_copy_says_how_outputs_of_captions_are_copied(tmp_path, run, monkeypatch):
    fill(tmp_path / "out", "ab")
    with StoreWriter(tmp_path / "out" / "text") as writer:
        writer.add_text(Caption("a").entry("text", Encoding()), {"x": pack(np.zeros(3, np.float32))})
    monkeypatch.chdir(tmp_path)
    _, text, _ = run("cache", "pack", "out", "-o", "copy")
    command = text.splitlines()[1].partition("kohya-bucket ")[2]
    assert run(*shlex.split(command, posix=os.name != "nt"))[0] == 0
    assert len(LatentStore(tmp_path / "copy" / "text")) == 1


def test_images_that_are_gone_are_taken_out_unless_all_are(tmp_path, images, run):
    out = tmp_path / "out"
    run("precompute", tmp_path / "images", "--vae", "mean", "-o", out, "-c", bucket_file(tmp_path))
    images[0].unlink()
    assert "1 item dropped" in run("cache", "prune", out, "--gone")[1]
    assert len(LatentStore(out)) == 4
    for image in images[1:]:
        image.unlink()
    code, _, err = run("cache", "prune", out, "--gone")
    assert (code, "moved away" in err) == (2, True)


def test_npz_import_and_export(tmp_path, images, run):
    folder = tmp_path / "images"
    options = ["--vae", "posterior", "-c", bucket_file(tmp_path), "--format", "npz", "--arch", "sd"]
    assert "5 encoded" in run("precompute", folder, *options)[1]
    before = npz_path(images[2], SIZES[2], ARCHITECTURES["sd"])
    assert before.exists()
    assert "5 latents imported" in run("cache", "import", folder, "-o", tmp_path / "out", "--arch", "sd")[1]
    assert "5 latents exported" in run("cache", "export", tmp_path / "out", "--arch", "sd", "-o", tmp_path / "npz")[1]
    assert (tmp_path / "npz" / before.name).read_bytes() == before.read_bytes()


def keys_in(folder):
    """Whether the npz of a folder have "plain" keys, "sized" ones, or both."""
    kinds = set()
    for path in folder.glob("*.npz"):
        with np.load(path) as file:
            kinds |= {"plain" for name in file.files if name == "latents"}
            kinds |= {"sized" for name in file.files if re.fullmatch(r"latents_\d+x\d+", name)}
    return " and ".join(sorted(kinds))


def checkout(folder, strategy=None):
    """One of sd-scripts; without a strategy too old a one."""
    (folder / "library").mkdir(parents=True)
    (folder / "library" / "train_util.py").touch()
    if strategy is not None:
        (folder / "library" / "strategy_base.py").touch()
        (folder / "library" / "strategy_sd.py").write_text(strategy, encoding="utf-8")
    return folder


@pytest.mark.long
def test_npz_have_the_keys_that_the_sd_scripts_at_hand_reads(tmp_path, images, run, monkeypatch):
    out = tmp_path / "out"
    run("precompute", tmp_path / "images", "--vae", "mean", "-c", bucket_file(tmp_path), "-o", out)
    old, new = checkout(tmp_path / "old", "class X: pass"), checkout(tmp_path / "new", "f(multi_resolution=True)")
    cases = [((), None, "sized"), ((), old, "plain"), ((), new, "sized"), (("--for", "0.11"), old, "sized")]
    cases += [(("--for", value), new, "plain") for value in ("0.10.1", "v0.10.1", "0.10", old)]
    for n, (options, where, kind) in enumerate(cases):
        monkeypatch.chdir(where or tmp_path)
        assert "5 latents exported" in run("cache", "export", out, "--arch", "sd", "-o", tmp_path / str(n), *options)[1]
        assert keys_in(tmp_path / str(n)) == kind
    for value, words in (
        ("0.9.1", "needs sd-scripts"), (checkout(tmp_path / "no version"), "needs sd-scripts"),
        ("main", "must be a version such as"), (tmp_path, "not an sd-scripts checkout"),
    ):  # fmt: skip
        code, _, err = run("cache", "export", out, "--arch", "sd", "-o", tmp_path / "wrong", "--for", value)
        assert (code, len(err.splitlines()), words in err) == (2, 1, True)
    assert not (tmp_path / "wrong").exists()


def test_npz_are_precomputed_for_an_older_sd_scripts_and_moved_for_it(tmp_path, images, run):
    folder = tmp_path / "images"
    options = ["--vae", "posterior", "-c", bucket_file(tmp_path), "--format", "npz", "--arch", "sd"]
    assert "5 encoded" in run("precompute", folder, *options)[1]
    assert keys_in(folder) == "sized"
    assert encoded_counts(run("precompute", folder, *options, "--for", "0.10.1")[1])[:2] == (0, 5)
    assert keys_in(folder) == "plain"
    assert encoded_counts(run("precompute", folder, *options)[1])[:2] == (0, 5)  # which it reads too
    assert keys_in(folder) == "plain"
    assert "5 encoded" in run("precompute", folder, *options, "--flip", "--for", "0.10.1")[1]
    assert keys_in(folder) == "plain"
    code, _, err = run("precompute", folder, *options[:4], "-o", tmp_path / "out", "--for", "0.10.1")
    assert (code, "add --format npz" in err) == (2, True)


def test_npz_without_images_are_no_import(tmp_path, run):
    (tmp_path / "a_0512x0512_sd.npz").write_bytes(b"")
    code, _, said = run("cache", "import", tmp_path, "-o", tmp_path / "out", "--arch", "sd")
    assert (code, "no images found there" in said, (tmp_path / "out").exists()) == (2, True, False)


def test_the_vae_of_imported_npz_is_named(tmp_path, images, run):
    folder, out = tmp_path / "images", tmp_path / "out"
    buckets = ["-c", bucket_file(tmp_path)]
    run("precompute", folder, "--vae", "posterior", *buckets, "--format", "npz", "--arch", "sd")
    for path in folder.glob("*.npz"):
        arrays = {name: array for name, array in np.load(path).items() if "fingerprint" not in name}
        np.savez(path, **arrays)
    options = ["cache", "import", folder, "-o", out, "--arch", "sd"]
    code, _, err = run(*options[:-1], "flux", "--vae", "posterior")
    assert (code, "flux has 16" in err) == (2, True)
    assert not out.exists()
    assert "5 latents imported" in run(*options, "--vae", "posterior")[1]
    report = run("precompute", folder, "--vae", "posterior", *buckets, "-o", out, "--dtype", "float32")[1]
    assert "0 encoded" in report


def test_a_config_says_what_to_encode(tmp_path, images, run):
    config = tmp_path / "data.toml"
    config.write_text(
        f"""
[general]
enable_bucket = true
[[datasets]]
resolution = 256
min_bucket_reso = 128
[[datasets.subsets]]
image_dir = '{tmp_path / "images"}'
caption_extension = ".txt"
class_tokens = "x"
flip_aug = true
""",
        encoding="utf-8",
    )
    code, _, err = run("precompute", "--config", config, "--vae", "mean", "-o", tmp_path / "out")
    assert code == 0, err
    store = LatentStore(tmp_path / "out")
    assert len(store) == 5
    assert store.entry(0).fingerprint.flip
    assert store.strings("caption") == ["a caption", *["x"] * 4]
    assert run("precompute", "x", "--config", config, "--vae", "mean", "-o", tmp_path / "out")[0] == 2
    with config.open("a", encoding="utf-8") as file:
        file.write('[kohya_bucket]\nlatent_cache = "shards"\n')
    code, _, err = run("precompute", "--config", config, "--vae", "mean")
    assert code == 0, err
    assert len(LatentStore(tmp_path / "images" / "kohya_bucket_latents")) == 5  # where training looks


def several_sizes(tmp_path, table):
    config = tmp_path / "data.toml"
    config.write_text(
        f"""
[kohya_bucket]
{table}
[[datasets]]
resolution = 64
enable_bucket = true
min_bucket_reso = 16
max_bucket_reso = 256
bucket_reso_steps = 16
batch_size = 2
[[datasets.subsets]]
image_dir = '{tmp_path / "images"}'
class_tokens = "x"
""",
        encoding="utf-8",
    )
    return config


@pytest.mark.long
@pytest.mark.parametrize("format", ["shards", "npz"])
def test_a_config_that_trains_images_at_other_sizes(tmp_path, images, run, monkeypatch, format):
    config = several_sizes(tmp_path, "remainder = 'catch_all'\nresolutions = [64, 96]\nstep_shapes = 'one'")
    where = ["-o", tmp_path / "out"] if format == "shards" else ["--arch", "sd"]
    options = ["--config", config, "--vae", "mean" if format == "shards" else "posterior", "--format", format, *where]
    code, text, err = run("precompute", *options)
    assert code == 0, err
    assert "remainder 'catch_all' moves images: for training on 1 GPU in batches of 2; for another number add" in text
    before, further = text.split("at further sizes:")
    assert encoded_counts(before) == (5, 0, 0)
    more = int(further.split()[0])
    assert 5 < more <= 15
    if format == "shards":
        store = LatentStore(tmp_path / "out")
        assert len(store) == 5 + more
        assert len({*zip(store.strings("source"), map(tuple, store.bucket_sizes.tolist()), strict=True)}) == 5 + more
    else:
        assert len(list((tmp_path / "images").glob("*_sd.npz"))) == 5
        assert len(list((tmp_path / "images").glob("*_sd_at_*x*.npz"))) == more
    text = run("precompute", *options, "--gpus", "1,2")[1]
    assert "for training on 1, 2 GPUs in batches of 2\n" in text
    assert f"{more} were current" in text
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "on 2 GPUs in batches of 2; for another" in run("precompute", *options)[1]
    assert run("precompute", *options, "--gpus", "0")[0] == 2


def test_images_that_move_whatever_the_number_of_gpus(tmp_path, images, run):
    config = several_sizes(tmp_path, "remainder = 'merge'\nmerge_max_crop = 0.9")
    text = run("precompute", "--config", config, "--vae", "mean", "-o", tmp_path / "out")[1]
    assert "remainder 'merge' moves images: for training in batches of 2\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["precompute", "data", "-o", "out", "--vae", "mean", "-p", "sdxl", "--gpus", "2"],
            "say how a --config will be trained",
        ),
        (["precompute", "data", "-o", "out", "-p", "sdxl"], "add --vae"),
        (["precompute", "data", "-o", "out", "--vae", "mean"], "choose the buckets by --arch, --resolution"),
        (["precompute", "-o", "out", "--vae", "mean", "-p", "sdxl"], "name a folder"),
        (["cache", "status", "nowhere"], "latent store"),
        (["cache", "export", "nowhere", "--arch", "sd4"], "sd, sdxl"),
    ],
)
def test_mistakes_are_one_line(tmp_path, run, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.long
def test_prune_of_stale_items_keeps_the_same_image_in_another_collection(tmp_path, images, run):
    options = ["--vae", "mean", "-o", tmp_path / "out", "-c", bucket_file(tmp_path)]
    for name in ("a", "b"):
        run("precompute", tmp_path / "images", *options, "--collection", name)
    os.utime(images[0], ns=(1, 1))
    run("precompute", tmp_path / "images", *options, "--collection", "b")
    assert "1 item dropped" in run("cache", "prune", tmp_path / "out", "--stale")[1]
    store = LatentStore(tmp_path / "out")
    assert [len(store.in_collection(name)) for name in ("a", "b")] == [4, 5]
    assert run("cache", "status", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("command", [["prune", "--drop-collection"], ["export", "--arch", "sd", "--collection"]])
def test_a_collection_that_is_not_there_is_said(tmp_path, images, run, command):
    run("precompute", tmp_path / "images", "--vae", "mean", "-o", tmp_path / "out", "-c", bucket_file(tmp_path),
        "--collection", "a")  # fmt: skip
    code, _, err = run("cache", command[0], tmp_path / "out", *command[1:], "b")
    assert (code, "no collection 'b'" in err) == (2, True)


def test_a_linked_folder_keeps_its_names_and_its_npz(tmp_path, images, run):
    try:
        (tmp_path / "link").symlink_to(tmp_path / "images", target_is_directory=True)
    except OSError:
        pytest.skip("no links here")
    if not (tmp_path / "link").is_symlink():
        pytest.skip("Wine makes no links")
    options = ["--vae", "posterior", "-c", bucket_file(tmp_path)]
    run("precompute", tmp_path / "link", *options, "-o", tmp_path / "out")
    assert LatentStore(tmp_path / "out").strings("source") == [path.name for path in images]
    run("precompute", tmp_path / "link", *options, "-o", tmp_path / "npz", "--format", "npz", "--arch", "sd")
    assert len(list((tmp_path / "npz").glob("*.npz"))) == 5
    assert not list((tmp_path / "images").glob("*.npz"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "-p", "sdxl", "-o", "out"], "nowhere"),
        (["images", "-p", "sdxxl", "-o", "out"], "sdxxl"),
        (["images", "-p", "sdxl"], "add --output"),
        (["images", "-p", "sdxl", "-o", "out", "--dtype", "int3"], "int3"),
        (["images", "-p", "sdxl", "-o", "out", "--arch", "sd9"], "--arch 'sd9': use one of sd, sdxl"),
        (["images", "-p", "sdxl", "--format", "zip"], "'zip'"),
        (["images", "-p", "sdxl", "--format", "npz", "--posterior"], "--posterior"),
        (["images", "-p", "sdxl", "-o", "out", "--captions-file", "nowhere.txt"], "nowhere.txt"),
        (["--config", "nowhere.toml", "-o", "out"], "nowhere.toml"),
        (["--config", "config.toml", "-o", "out", "--gpus", "0"], "--gpus is '0'"),
        (["--config", "config.toml", "-o", "out", "--dtype", "int3"], "int3"),
    ],
)
def test_all_input_is_judged_before_a_vae_is_loaded(tmp_path, images, command_line, monkeypatch, arguments, message):
    def load(name, **_):
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(diffusers_vae, "load_encoder", load)
    monkeypatch.chdir(tmp_path)
    several_sizes(tmp_path, "remainder = 'keep'").rename(tmp_path / "config.toml")
    code, _, err = command_line("precompute", *arguments, "--vae", "some/vae")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


@pytest.mark.further
@pytest.mark.parametrize("device", ["gpu", "cuda:99", "warp:0"])
def test_a_device_is_judged_before_a_vae_is_looked_for(tmp_path, device):
    pytest.importorskip("diffusers")
    with pytest.raises(KohyaBucketError, match=re.escape(f"device is {device!r}")):
        diffusers_vae.load_encoder(tmp_path / "nowhere", device=device)
