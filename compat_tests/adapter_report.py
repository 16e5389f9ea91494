"""Says in one line of JSON what the adapter finds in the checkout `SD_SCRIPTS_DIR`; run in that checkout's environment.

`packages`: their versions; `seams`: how many places of each subject are checked; `left`: what is left to sd-scripts
there, and why; `absent`: the same where this version has nothing of that subject; `refused`: why the adapter is not put
in at all.
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

from kohya_bucket import sdscripts  # noqa: E402

sdscripts.install(quiet=True)
import library.config_util  # noqa: E402, F401

from kohya_bucket.adapter.seams import Owners  # noqa: E402
from kohya_bucket.sdscripts.door import SdScriptsDoor  # noqa: E402
from kohya_bucket.sdscripts.seams import SUBJECTS  # noqa: E402

why = sdscripts.why_inactive()
if why:
    found["refused"] = why
door = SdScriptsDoor()
owners = Owners(door.package, door.home(), door.complete())
found["seams"] = {subject.name: len(subject.seams_of(owners)) for subject in SUBJECTS}
found["absent"] = [subject.text for subject in SUBJECTS if not subject.seams_of(owners)]
found["left"] = {subject.text: left for subject in SUBJECTS if (left := sdscripts.left_alone().get(subject.name))}
print(json.dumps(found))
