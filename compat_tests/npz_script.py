"""Caches a folder with the sd-scripts in SD_SCRIPTS_DIR, and says what it would train from.

Run by `test_sdscripts_versions_of_npz.py` for checkouts besides the one under test; not a test by itself.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.dont_write_bytecode = True
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
sys.path.insert(0, str(Path(__file__).parent))

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--resolution", type=int, action="append")
parser.add_argument("--adapter", action="store_true")
options = parser.parse_args()

if options.adapter:
    from kohya_bucket.trainers import sdscripts

    sdscripts.install()
from library import config_util, train_util  # noqa: E402
from versions_of_npz import cached_digests  # noqa: E402

sd = SimpleNamespace(train_util=train_util, config_util=config_util)
found = cached_digests(sd, options.folder, options.resolution)
options.out.write_text(json.dumps(found), encoding="utf-8")
