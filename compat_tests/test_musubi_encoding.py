"""musubi-tuner's own VAE of Qwen-Image and Krea 2: pictures in 2D behind the launcher."""

import json
import subprocess
import sys

import numpy as np
import pytest
from musubi_support import HERE, environment


def latents(source, dtype, *door):
    command = [sys.executable, *door, str(HERE / "musubi_encoding_script.py"), dtype]
    done = subprocess.run(command, env=environment(source), capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    folded, values = json.loads(done.stdout.splitlines()[-1])
    return folded, np.array(values)


@pytest.mark.slow
def test_pictures_are_encoded_in_2d(musubi_source):
    """What comes of it differs by less than the rounding of the type that it is computed in."""
    launched = "-m", "kohya_bucket.launch"
    (nothing, exact), (_, rounded) = latents(musubi_source, "float32"), latents(musubi_source, "bfloat16")
    (folded, ours), (_, ours_rounded) = (latents(musubi_source, dtype, *launched) for dtype in ("float32", "bfloat16"))
    assert (nothing, folded) == ([], ["encoder"])
    assert 0 < np.abs(ours - exact).max() < 1e-5 * np.abs(exact).max()
    assert np.abs(ours_rounded - rounded).mean() < np.abs(rounded - exact).mean()
