"""Settings of all tests, and the fixtures that several folders of tests need."""

import importlib.util

# `compat_tests` run without them: bitsandbytes 0.44, which sd-scripts 0.9 pins, installs a package `tests` of its own
_PLUGINS = "tests.command_line", "tests.full_disk", "tests.as_windows"
pytest_plugins = [name for name in _PLUGINS if importlib.util.find_spec(name)]

if importlib.util.find_spec("hypothesis") is not None:  # `compat_tests` run without it
    from hypothesis import settings

    # No deadline: on a machine that is busy otherwise an example may take any time.
    settings.register_profile("few", deadline=None, max_examples=12)  # others in every run
    settings.register_profile("many", deadline=None, max_examples=150)
    settings.load_profile("few")
