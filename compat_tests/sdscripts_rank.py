"""sd-scripts' modules with the adapter in them, for the scripts beside this one that are run as one of several ranks.

It is imported before anything of sd-scripts or torch.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kohya_bucket.trainers import sdscripts

sys.dont_write_bytecode = True
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
sdscripts.install()
from library import config_util, deepspeed_utils, strategy_base, strategy_sd  # noqa: E402
from sdscripts_support import LibraryNames  # noqa: E402

__all__ = ["accelerator_of", "end", "sd", "strategy_base", "strategy_sd"]
sd = SimpleNamespace(train_util=LibraryNames(), config_util=config_util)


def accelerator_of(*options: str) -> Any:
    """The accelerator that a trainer with these options makes."""
    arguments = argparse.ArgumentParser()
    sd.train_util.add_dataset_arguments(arguments, True, True, True)
    sd.train_util.add_training_arguments(arguments, True)
    deepspeed_utils.add_deepspeed_arguments(arguments)
    return sd.train_util.prepare_accelerator(arguments.parse_args([*options, "--mixed_precision", "no"]))


def end(out: Path, rank: int, found: Any) -> None:
    """Writes what was found, and ends: torch's gloo threads now and then abort a process that ends in good order."""
    Path(f"{out}.{rank}").write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)
