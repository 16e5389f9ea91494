"""Says in one line of JSON what the adapter finds in the checkout `SD_SCRIPTS_DIR`; run in that checkout's environment.

`packages`: their versions; `seams`: how many places of each subject were checked; `left`: subjects that are left to
sd-scripts, and why; `refused`: why the adapter is not put in at all.
"""

import importlib.metadata
import json
import os
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
found = {"packages": {}, "seams": {}, "left": {}}
for name in ("torch", "accelerate", "transformers", "diffusers", "numpy"):
    try:
        found["packages"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue

from library import config_util, train_util  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from kohya_bucket.sdscripts.seams import SeamError, check_seams  # noqa: E402

try:
    found["seams"]["all"] = len(check_seams(train_util, config_util, DataLoader))
except SeamError as error:
    found["refused"] = str(error)
print(json.dumps(found))
