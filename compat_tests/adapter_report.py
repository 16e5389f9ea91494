"""Says in one line of JSON what the adapter finds in the checkout that `SD_SCRIPTS_DIR` or `MUSUBI_DIR` names.

It runs in that checkout's environment. `packages`: their versions; `seams`: how many places of each subject are
checked; `left`: what is left to the trainer there, and why; `absent`: the same where this version has nothing of that
subject; `refused`: why the adapter is not put in at all.
"""

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path

sys.dont_write_bytecode = True
if "MUSUBI_DIR" in os.environ:
    folder, home, name = Path(os.environ["MUSUBI_DIR"], "src"), "musubi_tuner.dataset.config_utils", "musubi"
else:
    folder, home, name = os.environ["SD_SCRIPTS_DIR"], "library.config_util", "sdscripts"
sys.path.insert(0, str(folder))
found = {"packages": {}, "seams": {}, "left": {}}
for package in ("torch", "accelerate", "transformers", "diffusers", "numpy"):
    try:
        found["packages"][package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        continue

door = importlib.import_module(f"kohya_bucket.trainers.{name}.door").DOOR
door.open(quiet=True)
importlib.import_module(home)

from kohya_bucket.trainers.door.seams import Owners  # noqa: E402

why = door.why_inactive()
if why:
    found["refused"] = why
subjects = importlib.import_module(f"kohya_bucket.trainers.{name}.seams").SUBJECTS
owners = Owners(door.package, door.home(), door.complete())
found["seams"] = {subject.name: len(subject.seams_of(owners)) for subject in subjects}
found["absent"] = [subject.text for subject in subjects if not subject.seams_of(owners)]
found["left"] = {subject.text: left for subject in subjects if (left := door.left_alone().get(subject.name))}
print(json.dumps(found))
