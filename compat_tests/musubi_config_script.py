"""What musubi-tuner makes of configs: `musubi_config_script.py SPEC.json` with `configs` (paths) and `out`."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from musubi_tuner.dataset import config_utils


def blueprint(path):
    """The parameters of each dataset, or the name of the error."""
    try:
        user = config_utils.load_user_config(path)
        user.pop("kohya_bucket", None)
        made = config_utils.BlueprintGenerator(config_utils.ConfigSanitizer()).generate(
            user, argparse.Namespace(), architecture="wan"
        )
    except Exception as error:
        return type(error).__name__
    return [{"images": one.is_image_dataset, **dataclasses.asdict(one.params)} for one in made.dataset_group.datasets]


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(told["out"]).write_text(json.dumps([blueprint(path) for path in told["configs"]]), encoding="utf-8")
