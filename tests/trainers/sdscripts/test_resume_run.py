"""A run that saves, stops and resumes, with a trainer and an accelerator in small around the real sampler."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kohya_bucket.trainers.sdscripts.resuming import TrainerResume
from tests.thinned import weekly
from tests.trainers.door.test_sampler_positions import sampler_of


class Accelerator:
    """Counts batches as accelerate does for gradient accumulation, and calls the hooks of saved states."""

    def __init__(self, accumulate):
        self.accumulate, self.step = accumulate, 0
        self.hooks = {}

    def register_save_state_pre_hook(self, hook):
        self.hooks["save"] = hook

    def register_load_state_pre_hook(self, hook):
        self.hooks["load"] = hook

    def skip_first_batches(self, loader, count):
        return list(loader)[count:]

    def sync(self, last):
        self.step = 0 if last else self.step + 1
        return last or self.step % self.accumulate == 0


def beginning(arguments, counted, per_epoch, batches):
    """(epoch, first batch, updates counted) at which `train_network.py` begins, as its arithmetic has it."""
    first = counted
    if arguments.initial_step is not None:
        first = arguments.initial_step
    elif arguments.initial_epoch is not None:
        first = (arguments.initial_epoch - 1) * per_epoch
    if not first:
        return 0, 0, 0
    assert arguments.max_train_steps > first
    if not arguments.skip_until_initial_step:
        return first // per_epoch, 0, 0
    first *= arguments.gradient_accumulation_steps
    epoch = first // per_epoch
    for _ in range(epoch):
        first -= batches
    return epoch, first, first


def train(
    folder,
    accumulate,
    total,
    *,
    resume=False,
    stop=None,
    seed=5,
    batch_size=2,
    begin=beginning,
    to_skip=lambda first: first - 1,
    **options,
):
    """(epoch, update number, images) of each update, by a trainer that keeps its own count in a file of its own.

    `begin` is its arithmetic, and `to_skip` what it asks to be skipped of the batches before the first one.
    """
    sampler = sampler_of({}, batch_size, epoch=0, seed=seed)
    epoch, current_step = sampler.current_epoch, 0
    given = {"initial_step": None, "initial_epoch": None, "skip_until_initial_step": False, **options}
    arguments = SimpleNamespace(
        gradient_accumulation_steps=accumulate, max_train_steps=total, resume=str(folder) if resume else None, **given
    )
    run, accelerator = TrainerResume(), Accelerator(accumulate)
    run.arguments = arguments
    run.watch(accelerator)
    run.attach(sampler)
    counted = 0
    if resume:
        accelerator.hooks["load"]([], str(folder))
        counted = json.loads((folder / "train_state.json").read_text(encoding="utf-8"))["current_step"]
        accelerator.step = 1  # accelerate loads what it was at, which need not be where this run begins
    per_epoch = -(-len(sampler) // accumulate)
    first, skip, updates = begin(arguments, counted, per_epoch, len(sampler))
    trained, images = [], []
    for number in range(first, -(-total // per_epoch)):
        epoch.value = number + 1
        batches = list(accelerator.skip_first_batches(sampler, to_skip(skip)) if skip > 0 else sampler)
        thrown_away, skip = int(skip > 0), 0
        for i, batch in enumerate(batches):
            current_step = updates
            if i < thrown_away:
                continue
            images += batch.images.tolist()
            if accelerator.sync(last=i == len(batches) - 1):
                updates += 1
                trained.append((number + 1, updates, sorted(images)))
                images = []
                if len(trained) == stop:
                    accelerator.hooks["save"]([], [], str(folder))
                    state = {"current_step": current_step + 1}
                    (folder / "train_state.json").write_text(json.dumps(state), encoding="utf-8")
                    return trained
            if updates >= total:
                return trained
    return trained


OPTIONS = st.sampled_from([{}, {"skip_until_initial_step": True}])


@pytest.mark.long
@given(st.integers(1, 5), st.integers(0, 60), st.integers(1, 60), OPTIONS, st.booleans())
def test_any_update_asked_for_by_its_number_is_the_uninterrupted_runs(
    tmp_path_factory, accumulate, step, more, skip, resume
):
    """`--initial_step` with and without `--skip_until_initial_step`, with and without a state of another place."""
    folder = tmp_path_factory.mktemp("run")
    whole = train(folder, accumulate, step + more)
    assert [update for _, update, _ in whole] == list(range(1, step + more + 1))
    train(folder, accumulate, 50, stop=4)
    seed = 77 if resume else 5
    rest = train(folder, accumulate, step + more, resume=resume, seed=seed, initial_step=step, **skip)
    assert rest == whole[step:]


@pytest.mark.parametrize("accumulate", [1, 3, *map(weekly, (2, 7))])
@pytest.mark.parametrize("epoch", [2, *map(weekly, (1, 3))])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("resume", [False, True])
def test_an_epoch_asked_for_by_its_number_begins_with_its_first_image(tmp_path, accumulate, epoch, skip, resume):
    per_epoch = -(-len(sampler_of({}, 2)) // accumulate)
    total = 3 * per_epoch + 1
    whole = train(tmp_path, accumulate, total)
    train(tmp_path, accumulate, total, stop=per_epoch - 1)
    rest = train(tmp_path, accumulate, total, resume=resume, initial_epoch=epoch, skip_until_initial_step=skip)
    assert rest == whole[(epoch - 1) * per_epoch :]


@pytest.mark.long
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 40), OPTIONS), min_size=1, max_size=3), st.integers(1, 40))
def test_stopped_and_resumed_goes_on_and_counts_on(tmp_path_factory, accumulate, stops, more):
    folder = tmp_path_factory.mktemp("run")
    total = sum(stop for stop, _ in stops) + more
    whole = train(folder, accumulate, total)
    parts = []
    for number, (stop, skip) in enumerate([*stops, (None, {})]):
        parts += train(folder, accumulate, total, resume=number > 0, stop=stop, seed=5 + 9 * number, **skip)
    assert parts == whole


@pytest.mark.long
@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 5), st.integers(1, 4))
@example(1, 2, 4, 3)
def test_with_another_batch_size_and_accumulation_the_epochs_end_where_they_should(
    tmp_path_factory, accumulate, stop, batch_size, then
):
    """Updates are counted in those of the present run: its epochs still end at multiples of an epoch's updates."""
    folder = tmp_path_factory.mktemp("run")
    before = train(folder, accumulate, 200, stop=stop)
    per_epoch = -(-len(sampler_of({}, batch_size)) // then)
    epoch = before[-1][0]
    total = (epoch + 2) * per_epoch
    rest = train(folder, then, total, resume=True, batch_size=batch_size, seed=9)
    assert rest[-1][:2] == (epoch + 2, total)
    assume(rest[0][0] == epoch)
    of_epoch = [i for e, _, images in [*before, *rest] if e == epoch for i in images]
    assert sorted(of_epoch) == list(range(60))
    assert max(update for e, update, _ in rest if e == epoch) == epoch * per_epoch


def test_a_place_other_than_the_states_is_said(tmp_path, caplog):
    with caplog.at_level("INFO", logger="kohya_bucket"):
        train(tmp_path, 2, 30, stop=4)
        train(tmp_path, 2, 30, resume=True, initial_step=6)
        train(tmp_path, 2, 30, resume=True, initial_step=4)
    lines = [record.message for record in caplog.records if record.message.startswith("going on")]
    assert (
        "after update 6, with batch 13 of epoch 1 as asked for, though the state was saved after update 4" in lines[0]
    )
    assert lines[1] == "going on after update 4, with batch 9 of epoch 1"


def test_a_state_without_a_place_goes_by_its_number_where_that_is_asked_for(tmp_path, caplog):
    whole = train(tmp_path, 2, 30)
    train(tmp_path, 2, 30, stop=20)
    (tmp_path / "kohya_bucket_state.json").unlink()
    assert train(tmp_path, 2, 30, resume=True, skip_until_initial_step=True) == whole[20:]
    assert train(tmp_path, 2, 30, resume=True, initial_step=23) == whole[23:]
    assert "starts again" not in caplog.text
    per_epoch = -(-len(sampler_of({}, 2)) // 2)
    assert train(tmp_path, 2, 30, resume=True)[0][2] == whole[20 // per_epoch * per_epoch][2]
    assert "was saved without kohya_bucket: the epoch starts again from its first image" in caplog.text


def another(change):
    """The arithmetic of a trainer that makes another number of the first batch."""

    def begin(arguments, counted, per_epoch, batches):
        epoch, first, updates = beginning(arguments, counted, per_epoch, batches)
        return *change(epoch, first), updates

    return begin


@pytest.mark.parametrize(
    "trainer",
    [
        {"begin": another(lambda epoch, first: (epoch, first + 0))},
        {"begin": another(lambda epoch, first: (epoch, first % 7))},
        {"begin": another(lambda epoch, first: (epoch + 1, first))},
        {"begin": another(lambda epoch, _: (epoch, 0))},
        {"to_skip": lambda first: first},
    ],
    ids=["added to", "rest", "another epoch", "nothing skipped", "none thrown away"],
)
@pytest.mark.parametrize("options", [{"resume": True}, {"initial_step": 13}])
def test_a_trainer_that_computes_otherwise_trains_nothing(tmp_path, capsys, trainer, options):
    train(tmp_path, 1, 40, stop=13)
    with pytest.raises(SystemExit):
        train(tmp_path, 1, 40, **trainer, **options)
    assert "computes with its initial step in a way that is not known" in capsys.readouterr().err
