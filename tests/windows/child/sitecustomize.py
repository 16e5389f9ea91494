"""Python imports this in every process that a test starts: there too, files are refused as on Windows."""

import os
import sys

folder = os.environ.get("KOHYA_BUCKET_TESTS_AS_WINDOWS")
if folder:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import refusals

    del sys.path[0]
    refusals.install(folder)
