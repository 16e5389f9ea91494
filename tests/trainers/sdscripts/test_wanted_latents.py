"""Which latents a config needs, and why there are none."""

import pytest

from kohya_bucket.cli.encoding import EncodeJob, planned
from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.items import EncodeOptions
from kohya_bucket.trainers.sdscripts.config import read_config
from kohya_bucket.trainers.sdscripts.wanted_latents import wanted_by_config
from tests.pictures import make_pictures

SUBSET = """
[[datasets.subsets]]
image_dir = "{folder}"
num_repeats = 1
{option}
"""


def config_of(tmp_path, *options):
    text = "[[datasets]]\nresolution = 128\nbatch_size = 1\nenable_bucket = true\nmin_bucket_reso = 64\n"
    for k, option in enumerate(options):
        make_pictures(tmp_path / str(k), [(64, 64), (100, 60)])
        text += SUBSET.format(folder=(tmp_path / str(k)).as_posix(), option=option)
    path = tmp_path / "data.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("option", ["random_crop = true", "color_aug = true"])
@pytest.mark.parametrize("others", [[], ["flip_aug = true"]])
def test_images_that_are_cropped_or_coloured_at_random_are_named_with_the_reason(tmp_path, option, others):
    config = config_of(tmp_path, option, *others)
    parts = wanted_by_config(read_config(config, {}), EncodeOptions(""), tmp_path)
    left_out = [reason for part in parts for _, reason in part.without_bucket]
    assert sum(map(len, parts)) == 2 * len(others)
    assert len(left_out) == 2
    assert all("random_crop or color_aug" in reason for reason in left_out)
    if not others:
        work = EncodeJob(None, EncodeOptions(""), None, False, True, 1, 1)
        with pytest.raises(ConfigError, match=r"no image of the config gets a latent.*random_crop or color_aug"):
            planned(config, None, "", "").parts(work, EncodeOptions(""), "local")
