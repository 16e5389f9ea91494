"""One of several ranks that cache latents through sd-scripts' real datasets, strategies and accelerator.

Run under `torch.distributed.run` by `test_sdscripts_caching_ranks.py`; not a test by itself. The process group gives up
after 5 seconds, and the last rank works much longer than that.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.dont_write_bytecode = True
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.environ["SD_SCRIPTS_DIR"])
sys.path.insert(0, str(Path(__file__).parent))

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--seconds", type=float, help="of work per image, on the last rank")
options = parser.parse_args()

from kohya_bucket.trainers import sdscripts  # noqa: E402

sdscripts.install()
import torch  # noqa: E402
from impatient_ranks import meet  # noqa: E402
from library import config_util, strategy_base, strategy_sd  # noqa: E402
from sdscripts_support import LibraryNames, MeanVAE, build_groups  # noqa: E402

train_util = LibraryNames()

meet(options.out)
arguments = argparse.ArgumentParser()
train_util.add_training_arguments(arguments, True)
accelerator = train_util.prepare_accelerator(
    argparse.Namespace(**{**vars(arguments.parse_args(["--mixed_precision", "no"])), "deepspeed": False})
)
rank, ranks = accelerator.process_index, accelerator.num_processes
sd = SimpleNamespace(train_util=train_util, config_util=config_util)
group, _ = build_groups(sd, json.loads(options.config.read_text(encoding="utf-8")))

strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 2, False)
strategy_base.LatentsCachingStrategy._strategy = strategy
encoded: list[str] = []
encode_batch = strategy.cache_batch_latents


def cache_batch_latents(model, infos, *settings):
    encoded.extend(Path(info.absolute_path).name for info in infos)
    if rank == ranks - 1:
        time.sleep(options.seconds * len(infos))
    encode_batch(model, infos, *settings)


strategy.cache_batch_latents = cache_batch_latents
started = time.monotonic()
group.new_cache_latents(MeanVAE(), accelerator)
seconds = time.monotonic() - started
accelerator.wait_for_everyone()

seen = {}
for dataset in group.datasets:
    for info in dataset.image_data.values():
        latents, _, _, flipped, _ = strategy.load_latents_from_disk(info.latents_npz, info.bucket_reso)
        name = f"{Path(info.absolute_path).name} at {dataset.width}"
        seen[name] = hashlib.sha256(latents.tobytes() + flipped.tobytes()).hexdigest()

first = list(encoded)
again, _ = build_groups(sd, json.loads(options.config.read_text(encoding="utf-8")))
again.new_cache_latents(MeanVAE(), accelerator)

# the time-out is real: a rank that waits for another in a collective operation does not live through this
gave_up = False
if rank == ranks - 1:
    time.sleep(8)
else:
    try:
        torch.distributed.barrier()
    except RuntimeError:
        gave_up = True
found = {"encoded": first, "again": encoded[len(first) :], "seconds": seconds, "seen": seen, "gave_up": gave_up}
(options.out.parent / f"{options.out.name}.{rank}").write_text(json.dumps(found), encoding="utf-8")
os._exit(0)  # the group is broken now: it cannot be taken down in good order
