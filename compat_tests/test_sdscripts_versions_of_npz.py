"""npz of two versions of sd-scripts, one before 0.10.2 and one since: what one cached, no other encodes again.

The checkout under test has the adapter. The other one, of the other kind, is `OTHER_SD_SCRIPTS_DIR`, or else one that
lies beside the first; it runs in processes of its own, with the adapter and without.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sdscripts_support import random_sizes
from versions_of_npz import cached_digests

from kohya_bucket.trainers import sdscripts
from kohya_bucket.trainers.sdscripts.checkout import npz_version
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.exchange import export_npz, import_npz

COUNT = 5
SCRIPT = Path(__file__).with_name("npz_script.py")


@pytest.fixture(scope="module")
def other(sd_scripts_dir):
    """A checkout whose npz have the other kind of keys."""
    here = npz_version(sd_scripts_dir)
    named = os.environ.get("OTHER_SD_SCRIPTS_DIR")
    folders = [Path(named)] if named else sorted(sd_scripts_dir.parent.iterdir(), reverse=True)
    for folder in folders:
        if (folder / "library" / "strategy_sd.py").is_file() and npz_version(folder) != here:
            return folder
    pytest.skip("OTHER_SD_SCRIPTS_DIR is not set, and beside SD_SCRIPTS_DIR lies none with other npz")


@pytest.fixture
def run_other(other, tmp_path):
    def run(folder, *resolutions, adapter=False):
        out = tmp_path / "out.json"
        command = [sys.executable, str(SCRIPT), str(folder), str(out), *(["--adapter"] if adapter else [])]
        command += [word for resolution in resolutions for word in ("--resolution", str(resolution))]
        done = subprocess.run(
            command, env={**os.environ, "SD_SCRIPTS_DIR": str(other)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(out.read_text(encoding="utf-8"))

    return run


@pytest.fixture
def folder(tmp_path):
    """Images, some with transparent parts."""
    folder = tmp_path / "a"
    folder.mkdir()
    for i, size in enumerate(random_sizes(COUNT, 1, 100, 300)):
        pixels = np.random.default_rng(i).integers(0, 255, (*size[::-1], 4), dtype=np.uint8)
        Image.fromarray(pixels if i % 2 else pixels[:, :, :3]).save(folder / f"{i}.png")
    return folder


def with_adapter(sd, *arguments):
    sdscripts.install()
    try:
        return cached_digests(sd, *arguments)
    finally:
        sdscripts.uninstall()


def test_there_and_back(unpatched, run_other, folder):
    theirs = run_other(folder, 128)
    assert theirs["encoded"] == 2 * COUNT
    ours = with_adapter(unpatched, folder, [128])
    assert ours == {"encoded": 0, "seen": theirs["seen"]}
    both = with_adapter(unpatched, folder, [128, 192])
    assert both["encoded"] == 2 * COUNT
    assert both["seen"].items() >= theirs["seen"].items()
    assert len(both["seen"]) == 2 * COUNT
    assert with_adapter(unpatched, folder, [128, 192]) == {**both, "encoded": 0}
    # the other version, as it is: for one size it needs no help
    assert run_other(folder, 128) == {**theirs, "encoded": 0}
    assert run_other(folder, 192, 128, adapter=True) == {**both, "encoded": 0}
    assert with_adapter(unpatched, folder, [192, 128]) == {**both, "encoded": 0}
    assert cached_digests(unpatched, folder, [192])["encoded"] == 0


def test_by_a_store(unpatched, other, run_other, folder, tmp_path):
    """`cache import` and `export`, from either version to the other, neither of which has the adapter."""
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    images = sorted(map(str, folder.glob("*.png")))
    here = unpatched.root
    runs = {here: lambda: cached_digests(unpatched, folder, [128]), other: lambda: run_other(folder, 128)}
    for writer, reader in ((here, other), (other, here)):
        for path in folder.glob("*.npz"):
            path.unlink()
        written = runs[writer]()
        store = tmp_path / f"of {writer.name}"
        family = ARCHITECTURES["sd"]
        done = import_npz(images, store, family, images_root=folder)
        assert (done.done, done.skipped) == (COUNT, [])
        for path in folder.glob("*.npz"):
            path.unlink()
        from kohya_bucket.latents.store.latent_store import LatentStore

        export_npz(LatentStore(store), family.read_by(npz_version(reader)), images_root=folder)
        assert runs[reader]() == {**written, "encoded": 0}


def test_what_the_newer_takes_for_its_own_at_any_size(unpatched, run_other, sd_scripts_dir, folder):
    """Plain keys of another shape: since 0.10.2 sd-scripts trains from them as they are."""

    def run_here(folder, resolution, adapter=False):
        return (with_adapter if adapter else cached_digests)(unpatched, folder, [resolution])

    older, newer = (run_here, run_other) if npz_version(sd_scripts_dir) else (run_other, run_here)
    large = older(folder, 192)
    with pytest.raises(AssertionError, match="shape"):
        newer(folder, 128)
    found = newer(folder, 128, adapter=True)
    assert found["encoded"] == 2 * COUNT
    assert newer(folder, 128) == {**found, "encoded": 0}
    assert older(folder, 192) == {**large, "encoded": 0}
