"""What the documentation once named is still there, and says where it went."""

import importlib
import sys

import pytest

from kohya_bucket.moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_is_the_new_one_with_a_warning(old):
    sys.modules.pop(old, None)
    if "latents.vae" in MOVED[old][0]:
        pytest.importorskip("torch", reason="torch is not installed")
    with pytest.warns(DeprecationWarning, match="is now kohya_bucket"):
        module = importlib.import_module(old)
    for new in map(importlib.import_module, MOVED[old]):
        assert new.__all__
        for name in new.__all__:
            assert getattr(module, name) is getattr(new, name)
    sys.modules.pop(old)
