"""The launcher, killed as soon as a folder holds so many caches: killed_while_caching.py FOLDER COUNT TRAINER …"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

folder, count = Path(sys.argv[1]), int(sys.argv[2])


def kill_when_there_are_enough():
    while len(list(folder.glob("*.npz"))) < count:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


threading.Thread(target=kill_when_there_are_enough, daemon=True).start()
sys.argv = ["kohya_bucket.launch", *sys.argv[3:]]
runpy.run_module("kohya_bucket.launch", run_name="__main__", alter_sys=True)
