"""The loader: the same steps at every world size, epochs that advance, shares without rows."""

import logging

import pytest
import torch
import torch.distributed as dist
from common_data import ERRORS, Count, Numbers, loader_of, place, rows, steps
from logged import log_of
from on_ranks import caught, run

# --- epochs ---


def loader_of_six(**options):
    return loader_of(6, 2, shuffle=True, **options)


def test_set_epoch_of_a_batch_samplers_sampler_sets_the_loaders_epoch():
    loader = loader_of_six()
    loader.batch_sampler.sampler.set_epoch(3)
    assert loader.epoch == 3
    assert not hasattr(loader, "sampler")


# --- epochs(n) ---


def _two_steps_of_each(data, state=None):
    """Leave each of three epochs after two steps; return those, and the states after them."""
    loader, taken, states = loader_of(data, 4), [], []
    if state is not None:
        loader.load_state_dict(state)
    with log_of("pardata", logging.WARNING) as log:
        for epoch in loader.epochs(3):
            for _, batch in zip(range(2), loader, strict=False):
                taken.append((epoch, rows(batch)))
            states.append(loader.state_dict())
    return taken, states, log.lines


@pytest.mark.parametrize("data", [16, Count(16)], ids=["map-style", "stream"])
def test_an_epoch_left_by_a_break_counts_as_done(data):
    (whole, (state, *_), (line,)), _ = run(_two_steps_of_each, data, world_size=2)
    assert [epoch for epoch, _ in whole] == [0, 0, 1, 1, 2, 2]
    assert "resumes in the next epoch: save it before `break`" in line
    (rest, *_), _ = run(_two_steps_of_each, data, state, world_size=2)
    assert rest == whole[2:]


def test_leaving_epochs_early_keeps_the_position_in_the_epoch():
    loader = loader_of_six()
    for _ in loader.epochs(2):
        try:
            for _ in loader:
                raise ValueError  # as a step may
        except ValueError:
            assert place(loader) == (0, 2)
        assert place(loader) == (1, 0)
        break
    assert place(loader) == (0, 2)


def _again(count):
    loader = loader_of_six()
    with log_of("pardata", logging.WARNING) as log:
        found = [sum(1 for _ in loader.epochs(count) for _ in loader) for _ in range(3)]
    return found, log.lines


def test_epochs_of_which_nothing_is_left_say_so_once_on_rank_0():
    (first, (line,)), (other, nothing) = run(_again, 2, world_size=2)
    assert first == other == [6, 0, 0]
    assert nothing == []
    assert "epochs(2) runs nothing: the run has done 2; to train longer, pass more" in line


# --- shares without rows ---


def _first_and_last_of_five():
    return [caught(list, loader_of(length, 4, collate_fn=len)) for length in (4, 5)]


def test_batches_of_any_type_work_while_every_rank_has_samples():
    assert [found[0] for found in run(_first_and_last_of_five, world_size=2)] == [[2]] * 2
    assert {found[1].type for found in run(_first_and_last_of_five, world_size=2)} == {"TypeError"}
    assert _first_and_last_of_five() == [[4], [4, 1]]


# --- microbatches, and what stands in for them ---


def _transformed_placeholder():
    seen = []

    def transform(part):
        seen.append(part.tolist())
        return part * 10

    loader = loader_of(9, 8, microbatch_size=4, batch_transform=transform)
    return [(len(step), step.placeholder.tolist()) for step in loader], seen


def test_what_stands_in_is_collated_and_transformed_as_any_other():
    first, second = run(_transformed_placeholder, world_size=2)
    assert first == ([(1, [0, 10, 20, 30]), (1, [80])], [[0, 1, 2, 3], [8]])
    assert second == ([(1, [40, 50, 60, 70]), (0, [80])], [[4, 5, 6, 7], [8]])


# --- errors in the dataset ---


class Failing(Numbers):
    """Its fifth sample cannot be read."""

    def __init__(self, error):
        super().__init__(6)
        self.error = error

    def __getitem__(self, index):
        if index == 4 and self.error is not None:
            raise self.error
        return index


def _reading_fails(workers):
    # In a process of its own: the workers of a loader that failed hang on its traceback.
    return {
        text: caught(steps, loader_of(Failing(error), 3, num_workers=workers))
        for text, error in ERRORS.items()
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_read_error_names_the_sample_the_rank_and_the_worker(workers):
    (found,) = run(_reading_fails, workers, world_size=1, fresh=True)
    for text, raised in found.items():
        where = "rank 0, worker 1" if workers else "rank 0"
        assert f"RuntimeError: sample 4 could not be read on {where}: {text}" in str(raised)


LEFT_ALONE = [
    (KeyboardInterrupt(), {}, None),
    (StopIteration("early"), {}, "sample 4 could not be read on rank 0: StopIteration: early"),
]


@pytest.mark.parametrize(("raises", "options", "text"), LEFT_ALONE, ids=["an interrupt", "a stop"])
def test_what_is_no_error_of_a_sample_is_left_as_it_is(raises, options, text):
    raised = caught(steps, loader_of(Failing(raises), 6, **options))
    told = ("RuntimeError", text) if text else (type(raises).__name__, "")
    assert (raised.type, raised.text) == told


class Stopping:
    """User code that asks an iterator at its end for more, at its third call on one rank."""

    def __init__(self, what, rank):
        self.what, self.rank, self.calls = what, rank, 0

    def options(self):
        if self.what == "sampler":
            return {"sampler": self, "drop_last": False}
        return {} if self.what == "set_epoch" else {self.what: self}

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index

    def __iter__(self):
        self(None)
        return iter(range(20))

    def set_epoch(self, epoch):
        if self.what == "set_epoch":
            self(None)

    def __call__(self, batch):
        self.calls += 1
        called_often = self.what in ("collate_fn", "batch_transform")
        if dist.get_rank() == self.rank and (self.calls == 3 or not called_often):
            next(iter(()))
        return torch.tensor(batch) if self.what == "collate_fn" else batch


STOPS = {
    ("collate_fn", 0): "`collate_fn` failed in step 2 of epoch 0 on rank 1: StopIteration",
    ("collate_fn", 1): "`collate_fn` failed in step 2 of epoch 0 on rank 1, worker 0: StopIterat",
    ("batch_transform", 1): "`batch_transform` failed in step 2 of epoch 0 on rank 1: StopIterat",
    ("set_epoch", 1): "`set_epoch` failed in step 0 of epoch 0 on rank 1, worker 0: StopIteration",
    ("worker_init_fn", 1): "`worker_init_fn` failed in worker 0: StopIteration",
    ("sampler", 0): "`sampler` failed in epoch 0 on rank 1: StopIteration",
}


def _stopped():
    def found(what, workers):
        user = Stopping(what, rank=1)
        data = user if what == "set_epoch" else 20
        return caught(steps, loader_of(data, 4, num_workers=workers, **user.options()))

    return [found(*case) for case in STOPS]


def test_a_stop_iteration_in_user_code_raises_a_runtime_error():
    ranks = run(_stopped, world_size=2, fresh=True)
    for (what, _), text, other, raised in zip(STOPS, STOPS.values(), *ranks, strict=True):
        assert f"RuntimeError: {text}" in str(raised)
        assert text in str(other) if what == "sampler" else len(other) == 5
