"""Processes that begin within milliseconds: a server that has imported what is slow to import forks them.

They are handed everything as spawned ones are, and take nothing from this process, its environment included. Where
there is no such server, as on Windows, they are spawned and import for themselves.
"""

import multiprocessing

QUICK = multiprocessing.get_context(
    "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
)
if hasattr(QUICK, "set_forkserver_preload"):  # what is not installed is passed over
    QUICK.set_forkserver_preload(
        ["pytest", "torch.distributed", "accelerate", "kohya_bucket.latents", "kohya_bucket.datasets.sampler"]
    )
