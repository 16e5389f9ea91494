"""One of several ranks that cache text-encoder outputs through sd-scripts' real datasets, strategies and accelerator.

Run under `torch.distributed.run` by `test_sdscripts_text_outputs.py`; not a test by itself. The process group gives up
after 5 seconds, and the last rank works longer than that.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from impatient_ranks import meet
from sdscripts_rank import end, sd, strategy_base
from sdscripts_support import build_groups
from small_text_encoders import make_family

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--seconds", type=float, help="of work per caption, on the last rank")
options = parser.parse_args()

family = make_family("sdxl")

meet(options.out)
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
accelerator = SimpleNamespace(
    num_processes=ranks, process_index=rank, device=torch.device("cpu"), wait_for_everyone=torch.distributed.barrier
)
kinds = (strategy_base.TokenizeStrategy, strategy_base.TextEncodingStrategy,
         strategy_base.TextEncoderOutputsCachingStrategy)  # fmt: skip
encoded: list[str] = []
encode_batch = family.caching.cache_batch_outputs


def cache_batch_outputs(tokenizing, models, encoding, infos):
    encoded.extend(info.caption for info in infos)
    if rank == ranks - 1:
        time.sleep(options.seconds * len(infos))
    encode_batch(tokenizing, models, encoding, infos)


family.caching.cache_batch_outputs = cache_batch_outputs


def cache():
    """One run's caching; returns its datasets."""
    group, _ = build_groups(sd, json.loads(options.config.read_text(encoding="utf-8")))
    for kind, strategy in zip(kinds, family, strict=False):
        kind._strategy = strategy
    group.new_cache_text_encoder_outputs(family.models, accelerator)
    return group


started = time.monotonic()
group = cache()
seconds = time.monotonic() - started

seen = {}
for dataset in group.datasets:
    for info in dataset.image_data.values():
        arrays = family.caching.load_outputs_npz(info.text_encoder_outputs_npz)
        seen[Path(info.absolute_path).name] = hashlib.sha256(b"".join(part.tobytes() for part in arrays)).hexdigest()

first = list(encoded)
cache()
found = {"encoded": first, "again": encoded[len(first) :], "seen": seen, "seconds": seconds}
end(options.out, rank, found)
