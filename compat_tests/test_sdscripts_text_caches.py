"""Cached text-encoder outputs of images with several captions, through sd-scripts' own loop and loader."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sdscripts_support import ACCELERATOR, build_groups, random_sizes, write_images, write_metadata

from kohya_bucket.trainers import sdscripts

KEYS = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}


@pytest.fixture
def strategy_type(unpatched):
    from library import strategy_base

    class Strategy(strategy_base.TextEncoderOutputsCachingStrategy):
        """Its outputs are the caption's letters."""

        encoded = 0

        def get_outputs_npz_path(self, image_abs_path):
            return os.path.splitext(image_abs_path)[0] + "_te_outputs.npz"

        def is_disk_cached_outputs_expected(self, npz_path):
            return os.path.exists(npz_path)

        def load_outputs_npz(self, npz_path):
            data = np.load(npz_path)
            return [data["letters"], data["caption_dropout_rate"]]

        def cache_batch_outputs(self, tokenize_strategy, models, text_encoding_strategy, infos):
            for info in infos:
                self.encoded += 1
                letters = np.frombuffer(info.caption.encode().ljust(40), np.uint8).astype(np.float32)
                rate = torch.tensor(getattr(info, "caption_dropout_rate", 0), dtype=torch.float32)
                np.savez(info.text_encoder_outputs_npz, letters=letters, caption_dropout_rate=rate)

    yield Strategy
    strategy_base.TextEncoderOutputsCachingStrategy._strategy = None


def run(sd, strategy_type, datasets, models=()):
    """(captions encoded, {(dataset, image): (caption that is trained, its rate)})."""
    from library import strategy_base

    group, _ = build_groups(sd, {"datasets": [{**KEYS, "subsets": subsets} for subsets in datasets]})
    strategy = strategy_base.TextEncoderOutputsCachingStrategy._strategy = strategy_type(True, 1, False)
    group.new_cache_text_encoder_outputs(list(models), ACCELERATOR)
    group.set_current_strategies()
    trained = {}
    for k, dataset in enumerate(group.datasets):
        dataset.debug_dataset = True
        for i in range(len(dataset)):
            batch = dataset[i]
            letters, rates = batch["text_encoder_outputs_list"]
            for key, row, rate in zip(batch["image_keys"], letters.numpy(), rates.tolist(), strict=True):
                text = bytes(row.astype(np.uint8)).decode().rstrip()
                trained[k, Path(key).name] = (text, pytest.approx(rate))
    return strategy.encoded, trained


def test_data_sets_with_captions_of_their_own(patched, strategy_type, tmp_path):
    paths = write_images(tmp_path / "a", random_sizes(5, 1, 100, 300))
    for path in paths:
        path.with_suffix(".words").write_text(f"words of {path.stem}", encoding="utf-8")
    endings = (".txt", ".words", ".txt")
    datasets = [[{"image_dir": str(tmp_path / "a"), "caption_extension": ending}] for ending in endings]
    for count in (10, 0):
        encoded, trained = run(patched, strategy_type, datasets)
        assert encoded == count
        assert {place: text for place, (text, _) in trained.items()} == {
            (k, path.name): path.with_suffix(ending).read_text(encoding="utf-8")
            for k, ending in enumerate(endings)
            for path in paths
        }
    assert (tmp_path / "a" / "img_000_te_outputs.npz").exists()


def test_images_of_one_stem_with_captions_of_their_own(patched, strategy_type, tmp_path):
    (tmp_path / "a").mkdir()
    paths = [tmp_path / "a" / name for name in ("same.png", "same.bmp")]
    for path in paths:
        Image.new("RGB", (128, 128)).save(path)
    file = write_metadata(tmp_path / "meta.json", paths)
    text = file.read_text(encoding="utf-8").replace('"same"', '"one"', 1)
    file.write_text(text, encoding="utf-8")
    subset = {"image_dir": str(tmp_path / "a"), "metadata_file": str(file)}
    for count in (2, 0):
        encoded, trained = run(patched, strategy_type, [[subset]])
        assert encoded == count
        assert [trained[0, path.name][0][:4] for path in paths] == ["one,", "same"]


def test_another_share_of_captions_to_leave_out(patched, strategy_type, tmp_path, caplog):
    if not hasattr(patched.train_util.ImageInfo("", 1, "", False, ""), "caption_dropout_rate"):
        pytest.skip("this version caches no text-encoder outputs of captions that may be left out")
    write_images(tmp_path / "a", random_sizes(3, 1, 100, 300))
    for rate, count in ((0.1, 3), (0.1, 0), (0.3, 3)):
        subset = {"image_dir": str(tmp_path / "a"), "caption_extension": ".txt", "caption_dropout_rate": rate}
        encoded, trained = run(patched, strategy_type, [[subset]])
        assert encoded == count
        assert [found for _, found in trained.values()] == [rate] * 3
    assert "the caption_dropout_rate changed (0.1 -> 0.3)" in caplog.text


def test_outputs_of_other_text_encoders_are_made_again(patched, strategy_type, tmp_path, caplog):
    write_images(tmp_path / "a", random_sizes(3, 1, 100, 300))
    datasets = [[{"image_dir": str(tmp_path / "a"), "caption_extension": ".txt"}]]
    torch.manual_seed(0)
    models = [torch.nn.Linear(200, 300), None, torch.nn.Embedding(7, 3)]
    for count in (3, 0):
        assert run(patched, strategy_type, datasets, models)[0] == count
    with torch.no_grad():
        models[2].weight += 1
    with caplog.at_level("WARNING", logger="kohya_bucket"):
        assert run(patched, strategy_type, datasets, models)[0] == 3
    assert "the text encoders changed" in caplog.text
    assert run(patched, strategy_type, datasets, models)[0] == 0
    assert run(patched, strategy_type, datasets, [])[0] == 0


def test_files_that_do_not_name_their_text_encoders_are_believed(
    unpatched, strategy_type, tmp_path
):  # fmt: skip
    write_images(tmp_path / "a", random_sizes(3, 1, 100, 300))
    datasets = [[{"image_dir": str(tmp_path / "a"), "caption_extension": ".txt"}]]
    assert run(unpatched, strategy_type, datasets)[0] == 3
    sdscripts.install()
    try:
        assert run(unpatched, strategy_type, datasets, [torch.nn.Linear(2, 3)])[0] == 0
    finally:
        sdscripts.uninstall()
