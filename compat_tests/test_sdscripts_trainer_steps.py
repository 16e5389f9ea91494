"""The steps that trainers accept, as the table of families has them and as sd-scripts itself checks them."""

import pytest

from compat_tests.sdscripts_support import build_groups, write_images
from kohya_bucket.trainers.sdscripts.checkout import steps_in
from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER, ARCHITECTURES, trainer_named

# lumina_train_network.py demanded 32 until 0.10.1, and forks of that time do
EARLIER = {"lumina_train_network.py": {16, 32}}


def test_the_table_is_what_the_trainers_say(unpatched):
    found = steps_in(unpatched.root)
    assert found
    known = {file: step for file, step in ANY_TRAINER.steps.items() if file in found}
    assert all(found[file] in EARLIER.get(file, {step}) for file, step in known.items())
    assert {file for file in found if not file.endswith("_old.py")} == set(known)
    families = [name for name, arch in ARCHITECTURES.items() if any(file in found for file, _ in arch.trainers)]
    assert {"sd", "sdxl"} <= set(families)


@pytest.mark.parametrize("buckets", [True, False])
def test_a_step_is_refused_where_the_trainer_refuses_it(unpatched, tmp_path, buckets):
    write_images(tmp_path / "set", [(64, 64), (65, 64)])
    steps = steps_in(unpatched.root)
    for step in (16, 32, 64, 96):
        subset = {"image_dir": str(tmp_path / "set"), "caption_extension": ".txt"}
        keys = {"resolution": 256, "enable_bucket": buckets, "bucket_reso_steps": step, "subsets": [subset]}
        group, _ = build_groups(unpatched, {"datasets": [keys]})
        for name in ("sd", "sdxl"):
            trainer = trainer_named(name).as_in(steps)
            refused = False
            for least in set(trainer.steps.values()):
                try:
                    group.verify_bucket_reso_steps(least)
                except AssertionError:
                    refused = True
            assert refused == (buckets and bool(trainer.refusing(step)))
