"""The sampler on real ranks: processes of one gloo group, by `torch.distributed.run` too, with and without accelerate.

Further versions of accelerate are tested where KOHYA_BUCKET_ACCELERATE names folders that hold them
(`pip install --no-deps --target FOLDER accelerate`).
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from rank_program import IDS, loss_of, rank_of, small_model

from kohya_bucket import BucketedDataset, KohyaBuckets, planning, precompute_latents
from tests.latents.stub_encoders import MeanEncoder
from tests.pictures import make_pictures
from tests.warm import QUICK

plan_epoch = functools.partial(planning.plan_epoch, step_shapes="one")  # steps that do not depend on the ranks
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("rank_program.py")
ACCELERATES = ["", *filter(None, os.environ.get("KOHYA_BUCKET_ACCELERATE", "").split(os.pathsep))]


def launch(ranks: int, *arguments: object, accelerate: str = "") -> int:
    """The ranks as `torch.distributed.run` starts them, with another accelerate if it is named; its exit code."""
    path = os.pathsep.join(filter(None, [accelerate, str(ROOT), os.environ.get("PYTHONPATH", "")]))
    quiet = {"PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(PROGRAM)]
        + [str(a) for a in arguments],
        env={**os.environ, **quiet},
        timeout=600,
        check=False,
    )
    return done.returncode


def start(ranks: int, part: str, folder: Path, *numbers: int) -> int:
    """The same ranks in processes that begin at once; when one fails or all hang, the rest are ended."""
    store = folder / "meeting"
    processes = [
        QUICK.Process(target=rank_of, args=(rank, ranks, store, part, folder, *numbers)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    left = processes
    while left:
        ended = wait([process.sentinel for process in left], timeout=600)
        if not ended or any(process.exitcode for process in processes):
            for process in left:
                process.kill()
        left = [process for process in left if process.exitcode is None]
    store.unlink(missing_ok=True)
    return next((process.exitcode for process in processes if process.exitcode), 0)


@pytest.mark.weekly
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_images_weigh_the_same_on_any_number_of_ranks(tmp_path, ranks):
    """103 images in 5 buckets, 12 a step: short batches, and one with fewer images than ranks."""
    assert start(ranks, "gradients", tmp_path, 12) == 0
    found = torch.load(tmp_path / "gradients.pt")
    plan, model = plan_epoch(IDS, 12), small_model()
    alone = []
    for step in range(plan.steps):
        model.zero_grad()
        loss_of(model, plan.indices(step, 0)).backward()
        alone.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(found["scaled"], torch.stack(alone), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found["plain"], torch.stack(alone), rtol=1e-3)


def entries(folder: Path, key: str) -> list[list[dict]]:
    """Per rank, the log's entries that have a key, in order."""
    logs = sorted(folder.glob("rank*.jsonl"))
    return [[e for line in p.read_text(encoding="utf-8").splitlines() if key in (e := json.loads(line))] for p in logs]


def steps_of(folder: Path) -> dict[tuple[int, int], list[dict]]:
    """{(epoch, step): one entry per rank}."""
    steps: dict[tuple[int, int], list[dict]] = {}
    for entries_of_rank in entries(folder, "images"):
        for entry in entries_of_rank:
            steps.setdefault((entry["epoch"], entry["step"]), []).append(entry)
    return steps


def check_plan(folder: Path, ranks: int, batch_size: int, epochs: list[int], skipped: int = 0) -> None:
    """The log is the plan: every step of the epochs, on every rank."""
    steps = steps_of(folder)
    assert len({len(e) for e in entries(folder, "images")}) == 1
    for epoch in epochs:
        plan = plan_epoch(IDS, batch_size, world_size=ranks, epoch=epoch)
        assert sorted(s for e, s in steps if e == epoch) == list(range(skipped + 1, plan.steps + 1))
        for s in range(skipped, plan.steps):
            together = steps[epoch, s + 1]
            assert [e["images"] for e in together] == [plan.indices(s, r).tolist() for r in range(ranks)]
            assert len({b for e in together for b in e["buckets"]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "ranks"), [pytest.param(launch, 2, marks=pytest.mark.weekly), (start, 4)])
def test_plain_ranks_train_the_plan_and_notice_a_difference(
    tmp_path: Path, begin: Callable[..., int], ranks: int
) -> None:
    assert begin(ranks, "plain", tmp_path, 8 // ranks, 2) == 0
    check_plan(tmp_path, ranks, 8 // ranks, [0, 1])
    for refusals in entries(tmp_path, "refused"):
        words = [r["refused"] for r in refusals]
        assert "103 images, now 102" in words[0]
        assert "seed was 3, now 4" in words[1]
        assert "order was sorted, now runs" in words[2]
        assert all(f"rank {ranks - 1} is about to train another plan" in w for w in words)
    waits = entries(tmp_path, "alone")
    assert [len(w) for w in waits] == [1] * (ranks - 1) + [0]
    for (alone,) in waits[:-1]:
        assert "not all ranks came to compare their plans within 3 s" in alone["alone"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_that_see_other_images_are_refused(tmp_path: Path, ranks: int) -> None:
    for rank in range(ranks):
        for part in "ab":
            make_pictures(tmp_path / f"machine {rank}" / part, [(64, 64)] * 6)
    files, more = ([tmp_path / "machine 0" / part / f"{i}.png" for i in range(6)] for part in "ab")
    for store, paths in (("latents", files), ("other latents", [*files[:5], more[5]])):
        dataset = BucketedDataset(paths, KohyaBuckets(64, 32, 128, 32))
        precompute_latents(dataset, MeanEncoder(), tmp_path / store)
    assert start(ranks, "names", tmp_path) == 0
    found = {rows[0]["case"]: rows for rows in zip(*entries(tmp_path, "case"), strict=True)}
    assert sorted(name for row in found.pop("same") for name in row["trained"]) == sorted(
        f"{part}/{i}.png" for part in "ab" for i in range(6)
    )
    told = {
        "reversed": "image 0 is '0.png', now '5.png'",
        "exchanged": "image 0 is 'a/0.png', now 'b/0.png'",
        "renamed": "image 5 is '5.png', now '5b.png'",
        "store": "image 0 is '0.png', now 'a/0.png'",
    }
    assert found.keys() == told.keys()
    for case, rows in found.items():
        for row in rows:
            if ranks == 1:
                assert (row["refused"], len(row["trained"])) == ("", 12 if case == "exchanged" else 6)
                continue
            assert f"rank {ranks - 1} is about to train another plan than rank 0" in row["refused"]
            assert (told[case] in row["refused"], row["trained"]) == (True, [])


@pytest.mark.slow
@pytest.mark.parametrize("accelerate", ACCELERATES, ids=lambda p: Path(p).name or "installed")
def test_accelerate_killed_and_resumed(tmp_path: Path, accelerate: str) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    begin = functools.partial(launch, accelerate=accelerate) if accelerate else start
    assert begin(2, "train", killed, 4, 3, 1, 5) != 0
    steps = steps_of(killed)
    whole = plan_epoch(IDS, 4, world_size=2, epoch=1)
    first = plan_epoch(IDS, 4, world_size=2)
    assert len([s for e, s in steps if e == 0]) == first.steps
    assert max(steps) == (1, 5)
    assert [e[0]["length"] for e in entries(killed, "length")] == [first.steps] * 2
    trained = [i for (e, _), ranks in steps.items() if e == 1 for entry in ranks for i in entry["images"]]
    assert json.loads((killed / "position.json").read_text(encoding="utf-8"))["step"] == 5

    for ranks, batch_size in ((1, 8), (2, 4), (4, 4)):
        folder = tmp_path / f"on{ranks}"
        shutil.copytree(killed, folder, ignore=shutil.ignore_patterns("*.jsonl"))
        assert begin(ranks, "train", folder, batch_size, 3) == 0
        steps = steps_of(folder)
        rest = [i for (e, _), r in steps.items() if e == 1 for entry in r for i in entry["images"]]
        same = batch_size * ranks == 8
        if same:
            assert sorted(s for e, s in steps if e == 1) == list(range(6, whole.steps + 1))
        for remainder in ("pad", "keep"):
            whole = plan_epoch(IDS, batch_size, world_size=ranks, remainder=remainder)
            expected = [whole.step_indices(s).tolist() for s in range(whole.steps)]
            for rows in entries(folder, "gathered"):
                assert [row["together"] for row in rows if row["gathered"] == remainder] == expected
        plan = plan_epoch(IDS, batch_size, world_size=ranks, epoch=1, done=[(8, 5)])
        filled = plan.ledger().image.tolist()
        for image in filled:
            rest.remove(image)
        assert sorted(trained + rest) == list(range(len(IDS)))
        for (epoch, _), together in steps.items():
            assert len(together) == ranks
            assert len({b for e in together for b in e["buckets"]}) == 1, epoch
        check_plan(folder, ranks, batch_size, [2])
        check_plan(folder, ranks, batch_size, [5], skipped=4)
