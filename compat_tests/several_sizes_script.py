"""One of several ranks that cache latents on disk at several sizes and then train from them, through the real path.

Run under `torch.distributed.run` by `test_sdscripts_caching_ranks.py`; not a test by itself.
"""

import argparse
import json
from multiprocessing import Value
from pathlib import Path

import torch
from sdscripts_rank import accelerator_of, end, sd, strategy_base, strategy_sd
from sdscripts_support import MeanVAE, build_groups
from several_sizes import at_size, sizes_of

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

accelerator = accelerator_of()
rank = accelerator.process_index
config = json.loads(options.config.read_text(encoding="utf-8"))


def caching_group(vae: MeanVAE):
    group, _ = build_groups(sd, config)
    strategy_base.LatentsCachingStrategy._strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 2, False)
    group.new_cache_latents(vae, accelerator)
    accelerator.wait_for_everyone()
    group.set_current_strategies()
    return group


first, second = MeanVAE(), MeanVAE()
caching_group(first)
group = caching_group(second)
for dataset in group.datasets:
    dataset.debug_dataset = True  # batches then name their images
data = group.datasets[0].image_data
epoch = Value("i", 0)
loader = torch.utils.data.DataLoader(
    group, batch_size=1, shuffle=True, collate_fn=sd.train_util.collator_class(epoch, epoch, None), num_workers=2
)
loader = accelerator.prepare(loader)
rows = []
for number in range(1, options.epochs + 1):
    epoch.value = number
    for batch in loader:
        size = sizes_of(batch)
        for key, latent, flipped in zip(batch["image_keys"], batch["latents"], batch["flippeds"], strict=True):
            picture = at_size(sd, data[key], size)[None]
            picture = torch.flip(picture, dims=[3]) if flipped else picture
            wanted = MeanVAE().encode(picture).latent_dist.sample()[0]
            assert torch.allclose(latent, wanted, atol=1e-6), (key, size)
        moved = sum(tuple(data[key].bucket_reso) != size for key in batch["image_keys"])
        keys = [Path(key).name for key in batch["image_keys"]]
        rows.append({"epoch": number, "size": size, "keys": keys, "moved": moved})
found = {"encoded": [first.encoded, second.encoded], "rows": rows}
accelerator.wait_for_everyone()
end(options.out, rank, found)
