"""The adapter's hold on the real musubi-tuner: no name or parameter that it relies on changes unseen."""

import os

import pytest
from renaming import unseen


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each change is tried in a fork")
def test_nothing_can_change_unseen(musubi_source, tmp_path):
    tried, missed = unseen("musubi", musubi_source.parent, tmp_path)
    assert tried > 100
    assert missed == []
