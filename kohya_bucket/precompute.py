"""`torchrun -m kohya_bucket.precompute …`, `accelerate launch -m kohya_bucket.precompute …`: all GPUs, all nodes.

The same options as `kohya-bucket precompute`. Processes find their GPU by `LOCAL_RANK`, and each encodes its share by
`RANK`; they open no process group. Only the first one of each machine prints.
"""

from __future__ import annotations

import os
import sys

from kohya_bucket.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    quiet = ["--quiet"] if os.environ.get("LOCAL_RANK", "0") != "0" else []
    sys.argv = ["kohya-bucket", "precompute", *quiet, *sys.argv[1:]]
    main()
