"""One of several ranks that cache latents through sd-scripts' real datasets, strategies and accelerator.

Run under `torch.distributed.run` by `test_sdscripts_caching_ranks.py`; not a test by itself. The process group gives up
after 5 seconds, and the last rank works much longer than that.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
from impatient_ranks import meet
from sdscripts_rank import accelerator_of, end, sd, strategy_base, strategy_sd
from sdscripts_support import MeanVAE, build_groups

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--seconds", type=float, help="of work per image, on the last rank")
options = parser.parse_args()

meet(options.out)
accelerator = accelerator_of()
rank, ranks = accelerator.process_index, accelerator.num_processes
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
end(options.out, rank, found)  # the group is broken now: it cannot be taken down in good order
