"""The loader: the same steps at every world size, epochs that advance, shares without rows."""

import logging

import pytest
import torch
import torch.distributed as dist
from data_zoo import ERRORS, Count, Numbers, at, loader_of, place, rows, steps
from hypothesis import given
from hypothesis import strategies as st
from logged import log_of
from on_ranks import caught, run

# --- epochs ---


def loader_of_six(**options):
    return loader_of(6, 2, shuffle=True, **options)


def led(loader, going, order):
    """Lead the loader to an epoch, or to a place in one; return where its next iter() begins."""
    epoch, delivered = order
    if delivered is not None:
        at(loader, epoch, delivered)
        return order
    loader.set_epoch(epoch)
    return going if epoch == going[0] else (epoch, 0)


orders = st.tuples(st.integers(0, 4), st.none() | st.sampled_from([0, 5, 10, 15, 20]))
runs = st.tuples(st.none() | orders, st.integers(0, 5), st.integers(1, 4), st.none() | orders)


@given(st.lists(runs, max_size=6))
def test_an_iter_runs_the_next_epoch_or_what_it_is_led_to_and_a_break_keeps_the_place(runs):
    loader, reference, going = loader_of(20, shuffle=True), loader_of(20, shuffle=True), (0, 0)
    for before, stop, number, inside in runs:
        if before is not None:
            going = led(loader, going, before)
            assert place(loader) == going
        (epoch, delivered), found = going, []
        batches, going = iter(loader), (epoch + 1, 0)
        state = epoch, delivered
        assert (loader.epoch, place(loader)) == (epoch, state)
        for batch in batches:
            found.append(batch.tolist())
            state = epoch, delivered + 5 * len(found)
            assert (loader.epoch, place(loader)) == (epoch, state)
            if inside is not None and len(found) == number:
                going = led(loader, going, inside)
                state = state if inside[1] is None else going
                assert place(loader) == state
            if len(found) == stop:
                break
        else:
            state = going
        del batches
        assert (loader.epoch, place(loader)) == (going[0], state)
        reference.set_epoch(epoch)
        whole = steps(reference)[delivered // 5 :]
        assert found == (whole[:stop] if stop else whole)


def test_a_loop_inside_a_loop_over_the_same_loader_raises_and_leaves_the_newer_one_alone():
    loader = loader_of_six()
    old, new = iter(loader), iter(loader)
    raised = [caught(next, old)]
    assert len(list(new)) == 3
    raised.append(caught(lambda: [(one, other) for one in loader for other in loader]))
    raised.append(caught(lambda: list(zip(loader, loader, strict=True))))
    text = "must run one epoch at a time, but a newer iter() has begun: make another"
    assert {each.text for each in raised} == {f"a loader {text}"}


def test_an_iter_that_nobody_asks_for_a_batch_uses_up_no_epoch_and_can_still_be_led():
    loader, whole = loader_of_six(), [steps(loader_of_six())]
    loader.set_epoch(2)
    iter(loader), iter(loader)
    assert (loader.epoch, place(loader)) == (2, (2, 0))
    batches = iter(loader)
    loader.set_epoch(0)  # as Lightning does, between iter() and the first batch
    assert (loader.epoch, place(loader)) == (0, (0, 0))
    assert [[batch.tolist() for batch in batches]] == whole
    assert (loader.epoch, place(loader)) == (1, (1, 0))
    batches = iter(loader)
    at(loader, 0, 4)
    assert [batch.tolist() for batch in batches] == whole[0][2:]


def test_a_trainer_that_tells_a_batch_samplers_sampler_the_epoch_tells_the_loader():
    loader = loader_of_six()
    loader.batch_sampler.sampler.set_epoch(3)
    assert loader.epoch == 3
    assert not hasattr(loader, "sampler")


# --- epochs(n) ---


def ran(loader, count=3, stop=None, passes=1):
    """Return each epoch of the loop, and the steps of each pass through it, left after `stop`."""
    found = []
    for epoch in loader.epochs(count):
        assert loader.epoch == epoch
        for _ in range(passes):
            number = sum(1 for _ in zip(range(stop or 9), loader, strict=False))
            found.append((epoch, number, loader.fingerprint()[:4], place(loader)))
    return found, place(loader), loader.epoch


def nine():
    return loader_of(9, 3, shuffle=True)


def _all_ways():
    """Each way to begin and to leave epochs, by the whole run that is the same as it."""
    whole = ran(nine())
    found = {"anew": [whole]}

    def loop(name, loader, **options):
        found.setdefault(name, []).append(ran(loader, **options))
        return loader

    looked, used = nine(), nine()
    _ = next(iter(looked)), next(iter(looked))
    loop("anew", looked)
    loop("nothing", looked)
    list(used)
    next(iter(used))
    loop("from 1 on", used)
    loop("from the end of 0 on", at(nine(), 0, 9))
    loop("from 1 on", at(nine(), 1))
    loop("in the middle", at(nine(), 0, 6))
    loop("the end of 2", at(nine(), 2, 9))
    loop("nothing", at(nine(), 7))
    loop("left early", nine(), stop=2)
    loop("two passes", at(nine(), 1, 3), passes=2)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_epochs_runs_what_is_left_however_it_begins(size):
    team = run(_all_ways, world_size=size)
    assert all(found == team[0] for found in team)
    found = team[0]
    (whole, end, after), again = found["anew"]
    assert again == (whole, end, after)
    assert [step[:2] for step in whole] == [(0, 3), (1, 3), (2, 3)]
    assert [step[3] for step in whole] == [(1, 0), (2, 0), (3, 0)]
    assert len({step[2] for step in whole}) == 3
    assert (end, after) == ((3, 0), 3)
    assert found["from 1 on"] == [(whole[1:], end, after)] * 2
    rest, last = [(epoch, 0, *whole[epoch][2:]) for epoch in (0, 2)]
    assert found["from the end of 0 on"] == [([rest, *whole[1:]], end, after)]
    assert found["the end of 2"] == [([last], end, after)]
    assert found["in the middle"] == [([(0, 1, *whole[0][2:]), *whole[1:]], end, after)]
    assert found["nothing"] == [([], end, after), ([], (7, 0), 7)]
    ((short, end, after),) = found["left early"]
    assert [step[3] for step in short] == [(1, 0), (2, 0), (3, 0)]  # as after a whole epoch
    assert (end, after) == ((3, 0), 3)
    ((passes, *_),) = found["two passes"]  # the second one through the whole epoch
    assert [step[:2] for step in passes] == [(1, 2), (1, 3), (2, 3), (2, 3)]
    assert [step[2:] for step in passes] == [step[2:] for step in whole[1:] for _ in range(2)]


def test_a_look_in_the_body_of_epochs_uses_up_nothing_and_a_break_keeps_the_place():
    loader = at(loader_of_six(), 0, 2)
    for _ in loader.epochs(2):
        next(iter(loader))
        assert len(list(loader)) == 2
        next(iter(loader))  # also after its end: a state saved here does not go back
        assert place(loader) == (1, 0)
        break
    for _ in loader.epochs(2):
        for _ in loader:
            break
        break
    assert (place(loader), loader.epoch) == ((1, 2), 1)
    assert ran(loader, 2)[0][0][:2] == (1, 3)


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
def test_an_epoch_left_by_a_break_counts_as_done_and_a_state_after_it_resumes_in_the_next(data):
    (whole, (state, *_), (line,)), _ = run(_two_steps_of_each, data, world_size=2)
    assert [epoch for epoch, _ in whole] == [0, 0, 1, 1, 2, 2]
    assert "save before the `break` to resume in this" in line
    (rest, *_), _ = run(_two_steps_of_each, data, state, world_size=2)
    assert rest == whole[2:]


@pytest.mark.parametrize("data", [8, Count(8)], ids=["map-style", "stream"])
def test_a_state_of_the_last_step_resumes_in_its_body_which_ends_as_any_other(data):
    loader, again = loader_of(data, 4), loader_of(data, 4)
    for _ in loader.epochs(3):
        for _ in loader:
            state = loader.state_dict()
        break
    again.load_state_dict(state)
    assert [(epoch, len(list(again))) for epoch in again.epochs(3)] == [(0, 0), (1, 2), (2, 2)]


def test_a_state_after_the_loop_of_epochs_was_left_or_in_an_error_is_in_the_middle():
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
    assert "epochs(2) runs nothing, because it counts from the start of the run, and 2 are" in line


def test_a_state_loaded_or_an_epoch_set_in_the_body_of_epochs_is_where_it_goes_on():
    loader, seen = loader_of_six(), []
    for epoch in loader.epochs(4):
        loader.set_epoch(epoch)  # by habit
        seen.append((epoch, len(list(loader))))
        loader.set_epoch(epoch)
        if len(seen) == 2:
            at(loader, 0, 4)
        if len(seen) == 4:
            loader.set_epoch(3)
    assert seen == [(0, 3), (1, 3), (0, 1), (1, 3), (3, 3)]


# --- shares without rows ---


def _first_and_last_of_five():
    return [caught(list, loader_of(length, 4, collate_fn=len)) for length in (4, 5)]


def test_a_batch_of_any_kind_will_do_as_long_as_everybody_has_a_sample():
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
def test_an_error_in_the_data_set_names_the_sample_the_rank_the_worker_and_what_it_was(workers):
    (found,) = run(_reading_fails, workers, world_size=1, fresh=True)
    for text, raised in found.items():
        where = "rank 0, worker 1" if workers else "rank 0"
        assert f"RuntimeError: sample 4 could not be read on {where}: {text}" in str(raised)


LEFT_ALONE = [
    (KeyboardInterrupt(), {}, None),
    (StopIteration("early"), {}, "sample 4 could not be read on rank 0: StopIteration: early"),
    (None, {"collate_fn": {}.__getitem__}, None),
]


@pytest.mark.parametrize(
    ("raises", "options", "text"), LEFT_ALONE, ids=["an interrupt", "a stop", "in collate_fn"]
)
def test_what_is_no_error_of_a_sample_is_left_as_it_is(raises, options, text):
    raised = caught(steps, loader_of(Failing(raises), 6, **options))
    kind = type(raises).__name__ if raises is not None else "TypeError"
    assert (raised.type, raised.text) == ("RuntimeError", text) if text else raised.type == kind


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


def test_a_stop_iteration_of_user_code_is_an_error_and_ends_no_epoch():
    ranks = run(_stopped, world_size=2, fresh=True)
    for (what, _), text, other, raised in zip(STOPS, STOPS.values(), *ranks, strict=True):
        assert f"RuntimeError: {text}" in str(raised)
        assert text in str(other) if what == "sampler" else len(other) == 5


def _rank_that_fails(distributed):
    data, options = Failing(ValueError("torn")), {"distributed": distributed}
    return caught(steps, loader_of(data, 6, num_workers=dist.get_rank(), **options))


def test_the_rank_is_that_of_the_process_shared_or_not():
    shared = run(_rank_that_fails, "auto", world_size=2, fresh=True)
    assert shared[0] == [[0, 1, 2]]
    assert "sample 4 could not be read on rank 1, worker 0: ValueError: torn" in shared[1].text
    one, other = run(_rank_that_fails, False, world_size=2, fresh=True)
    assert "sample 4 could not be read on rank 0: ValueError: torn" in one.text
    assert "sample 4 could not be read on rank 1, worker 0: ValueError: torn" in other.text
