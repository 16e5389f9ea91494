"""A model that is named as on the Hugging Face hub, on a machine that cannot reach it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="a VAE needs diffusers")
from tests.latents.test_diffusers_vae import model

pytestmark = pytest.mark.further

NOBODY = "http://127.0.0.1:9"  # the port of `discard`: refused at once
VAE = "from kohya_bucket.latents.vae.diffusers_vae import load_encoder as load; print(load(NAME).architecture)"
TEXT = "from kohya_bucket.latents.encode.text_encoder import load_text_encoder as load; load([NAME])"


def child(program: str, cache: Path, name: str = "someone/a-vae") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_ENDPOINT": NOBODY, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    program = program.replace("NAME", repr(name))
    return subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=cache, capture_output=True, encoding="utf-8", check=False,
        timeout=100,
    )  # fmt: skip


@pytest.mark.weekly
@pytest.mark.parametrize("program", [VAE, TEXT], ids=["vae", "text"])
def test_a_hub_that_cannot_be_reached_is_named_and_asked_once(program: str, tmp_path: Path) -> None:
    if program == TEXT:
        pytest.importorskip("transformers", reason="text encoders need transformers")
    done = child(program, tmp_path)
    last = done.stderr.splitlines()[-1]
    assert f"{NOBODY} cannot be reached" in last
    assert "someone/a-vae has not been downloaded" in last
    assert "Retrying" not in done.stderr


@pytest.mark.weekly
@pytest.mark.parametrize("folder", ["", "vae"])
def test_what_was_downloaded_before_is_taken_without_it(folder: str, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--a-vae"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    model("sdxl").save_pretrained(repository / "snapshots" / ("0" * 40) / folder)
    done = child(VAE, tmp_path)
    assert done.stdout.split()[-1:] == ["sdxl"], done.stderr
    assert "Retrying" not in done.stderr
