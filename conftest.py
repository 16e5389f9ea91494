"""Settings of all tests, and the fixtures that several folders of tests need."""

import importlib.util

pytest_plugins = ["tests.command_line", "tests.full_disk"]

if importlib.util.find_spec("hypothesis") is not None:  # `compat_tests` run without it
    from hypothesis import settings

    # On a machine that is busy otherwise an example may take any time: how long is for benchmarks to say.
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")
