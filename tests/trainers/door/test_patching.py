"""What a trainer's modules define is replaced wherever it is bound, when all of it is imported, and taken back."""

import importlib
import sys
import types

import pytest

from kohya_bucket.trainers.door.patching import ImportWatch, Patches, Replacement, bindings_of


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `pedal` whose modules import each other in a circle, and bind each other's names."""
    folder = tmp_path / "pedal"
    folder.mkdir()
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / "wheel.py").write_text(
        "def turn(): return 'slow'\nclass Rim:\n    def spin(self): return turn()\nfrom pedal import chain\n",
        encoding="utf-8",
    )
    (folder / "chain.py").write_text(
        "from pedal.wheel import turn, turn as crank\nclass Link: pass\n", encoding="utf-8"
    )
    (folder / "broken.py").write_text("from pedal import wheel\nraise ValueError('flat')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "pedal"]:
        del sys.modules[name]


def ours(module):
    return module.__name__.startswith("pedal")


def fast():
    return "fast"


def test_a_name_is_replaced_wherever_it_is_bound(package):
    wheel, chain = importlib.import_module("pedal.wheel"), importlib.import_module("pedal.chain")
    other = types.ModuleType("other")
    other.turn = slow = wheel.turn
    sys.modules["other"] = other
    patches = Patches()
    try:
        patches.apply([Replacement(wheel, "turn", fast), Replacement(wheel.Rim, "spin", lambda _: "spun"),
                       Replacement(wheel.Rim, "stop", lambda _: "stopped")], ours)  # fmt: skip
        assert patches
        assert (wheel.turn(), chain.turn(), chain.crank()) == ("fast", "fast", "fast")
        assert other.turn is slow  # is not the trainer's
        assert list(bindings_of(slow, ours)) == []
        assert (wheel.Rim().spin(), wheel.Rim().stop()) == ("spun", "stopped")
        assert importlib.import_module("pedal.wheel").turn is fast
    finally:
        del sys.modules["other"]
        patches.take_back()
    assert not patches
    assert wheel.turn is chain.turn is chain.crank is slow
    assert wheel.Rim().spin() == "slow"
    assert not hasattr(wheel.Rim, "stop")


@pytest.mark.parametrize("first", ["pedal.wheel", "pedal.chain"])
def test_word_comes_once_nothing_is_half_made(package, first):
    seen = []

    def then():
        loaded = [sys.modules.get(f"pedal.{name}") for name in ("wheel", "chain")]
        seen.append([hasattr(loaded[0], "Rim"), hasattr(loaded[1], "Link")])

    watch = ImportWatch(lambda name: name.startswith("pedal."), then)
    watch.start()
    watch.start()
    try:
        module = importlib.import_module(first)
    finally:
        watch.stop()
    assert seen == [[True, True]]
    assert watch not in sys.meta_path
    assert module.__spec__.loader is module.__loader__
    assert type(module.__loader__).__name__ == "SourceFileLoader"  # what asks for it gets the true one


def test_a_module_that_fails_is_reported_as_ever(package):
    seen = []
    watch = ImportWatch(lambda name: name.startswith("pedal."), lambda: seen.append(True))
    watch.start()
    try:
        with pytest.raises(ValueError, match="flat"):
            importlib.import_module("pedal.broken")
        importlib.import_module("pedal.chain")  # was imported on the way
        with pytest.raises(ImportError):
            importlib.import_module("pedal.missing")
    finally:
        watch.stop()
    assert seen == []
