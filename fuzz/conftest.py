"""Settings of the fuzz targets: the same inputs in every run; `--hypothesis-profile=search` looks for new ones.

`pytest fuzz` takes a quarter of a minute. A failing input is printed, shrunk, with what reproduces it.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

ALL = list(HealthCheck)
settings.register_profile("fuzz", deadline=None, max_examples=40, derandomize=True, database=None, print_blob=True,
                          suppress_health_check=ALL)  # fmt: skip
settings.register_profile("search", deadline=None, max_examples=20_000, print_blob=True, suppress_health_check=ALL)
settings.load_profile("fuzz")
