"""The loader: the same steps at every world size, epochs that advance, shares without rows."""

from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from data_zoo import ERRORS, Numbers, at, loader_of, place, steps
from on_ranks import caught, run

Point = namedtuple("Point", ["x", "name"])  # noqa: PYI024  # the untyped kind must work too


class OfAllKinds(Numbers):
    def __getitem__(self, index):
        return {
            "number": index,
            "float": index / 2,
            "tensor": torch.full((2, 3), float(index)),
            "numpy": np.full(2, index),
            "text": f"n{index}",
            "tuple": (torch.tensor([index]), index, f"n{index}"),
            "namedtuple": Point(torch.tensor(index), f"n{index}"),
        }


# --- epochs ---


def loader_of_six(**options):
    return loader_of(6, 2, shuffle=True, **options)


def leave_by_an_exception(loader):
    for _ in loader:
        raise LookupError(f"in epoch {loader.epoch}")


def test_the_epoch_is_the_one_in_progress_else_the_next():
    loader = loader_of_six()
    assert loader.epoch == 0
    for _ in loader:
        assert loader.epoch == 0
    assert loader.epoch == 1
    for _ in loader:
        assert loader.epoch == 1
        break
    assert loader.epoch == 2
    assert caught(leave_by_an_exception, loader).text == "in epoch 2"
    assert loader.epoch == 3


def test_set_epoch_goes_back_to_the_same_order_and_changes_no_epoch_in_progress():
    loader = loader_of_six()
    epochs = [steps(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert loader.epoch == 1
    found = []
    for batch in loader:
        loader.set_epoch(0)
        assert loader.epoch == 1
        found.append(batch.tolist())
    assert found == epochs[1]
    assert loader.epoch == 0
    assert steps(loader) == epochs[0]


def test_a_sample_that_cannot_be_read_ends_the_epoch_and_not_the_loader():
    data = Failing(ValueError("torn"))
    loader = loader_of(data, 2)
    assert caught(steps, loader).type == "RuntimeError"
    assert loader.epoch == 1
    data.error = None
    assert next(iter(loader)).tolist() == [0, 1]


def test_a_loop_inside_a_loop_over_the_same_loader_raises():
    loader = loader_of_six()
    for raised in (
        caught(lambda: [(one, other) for one in loader for other in loader]),
        caught(lambda: list(zip(loader, loader, strict=True))),
    ):
        assert raised.text == (
            "a loader must run one epoch at a time, but a newer iter() has begun: make another "
            "loader for the loop inside"
        )


def test_beginning_the_next_epoch_leaves_the_newer_one_alone():
    loader = loader_of_six()
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(RuntimeError, match="one epoch at a time"):
        next(old)
    assert loader.epoch == 1
    assert len(list(new)) == 3


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
    loop("from 1 on", at(nine(), 0, 9))
    loop("from 1 on", at(nine(), 1))
    loop("in the middle", at(nine(), 0, 6))
    loop("nothing", at(nine(), 2, 9))
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
    assert found["from 1 on"] == [(whole[1:], end, after)] * 3
    assert found["in the middle"] == [([(0, 1, *whole[0][2:]), *whole[1:]], end, after)]
    assert found["nothing"] == [([], end, after)] * 2 + [([], (7, 0), 7)]
    ((short, end, after),) = found["left early"]
    assert [step[3] for step in short] == [(0, 6), (1, 6), (2, 6)]
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


def _last_batch(length):
    return list(loader_of(OfAllKinds(length), 4))[-1]


@pytest.mark.parametrize(("size", "length"), [(2, 1), (3, 5), (4, 2)])
def test_a_rank_without_samples_gets_a_batch_like_the_others_without_rows(size, length):
    ranks = run(_last_batch, length, world_size=size)
    rows = [rank < (length % 4) for rank in range(size)]
    assert not all(rows)
    for has, batch in zip(rows, ranks, strict=True):
        assert (batch["number"].shape, batch["number"].dtype) == ((has,), torch.int64)
        assert (batch["float"].shape, batch["float"].dtype) == ((has,), torch.float64)
        assert (batch["tensor"].shape, batch["tensor"].dtype) == ((has, 2, 3), torch.float32)
        assert (batch["numpy"].shape, len(batch["text"])) == ((has, 2), has)
        assert [len(part) for part in batch["tuple"]] == [has] * 3
        assert type(batch["namedtuple"]) is Point
        assert [len(part) for part in batch["namedtuple"]] == [has] * 2


def _first_and_last_of_five():
    return [caught(list, loader_of(length, 4, collate_fn=len)) for length in (4, 5)]


def test_a_batch_of_any_kind_will_do_as_long_as_everybody_has_a_sample():
    assert [found[0] for found in run(_first_and_last_of_five, world_size=2)] == [[2]] * 2
    assert {found[1].type for found in run(_first_and_last_of_five, world_size=2)} == {"TypeError"}
    assert _first_and_last_of_five() == [[4], [4, 1]]


# --- microbatches, and what stands in for them ---


class Spoken(Numbers):
    """Augments."""

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item()])


def _plain(microbatches):
    return [part[:, 0].int().tolist() for part in microbatches]


def _microbatched(workers):
    loader = loader_of(Spoken(11), 8, microbatch_size=3, num_workers=workers)
    found = [
        (m.epoch, m.step, m.first, m.counts, m.seed, m.size, _plain(m), m.stand_in.tolist())
        for m in loader
    ]
    return found, loader.stats()["samples"], loader.state_dict(), loader.fingerprint()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_microbatches_gets_none_and_the_first_of_the_step_to_stand_in(workers):
    alone = _microbatched(workers)
    for size in (2, 3, 4):
        ranks = run(_microbatched, workers, world_size=size)
        for batches, *told in ranks:
            assert told == list(alone[1:])  # what stands in is not counted as delivered
            assert [step[:2] + step[3:5] for step in batches] == [s[:2] + s[3:5] for s in alone[0]]
            assert {step[5] for step in batches} == {size}
        for k, whole in enumerate(alone[0]):
            assert [part for batches, *_ in ranks for part in batches[k][6]] == whole[6]
            for batches, *_ in ranks:
                first, own, stand_in = batches[k][2], *batches[k][6:]
                rows = [int(row[0]) for row in stand_in]
                assert rows == (own or whole[6])[0]
                if not own:  # the very samples that the first rank has, augmentation included
                    assert first == len(whole[3])
                    assert stand_in == whole[7]


def _transformed_stand_in():
    seen = []

    def transform(part):
        seen.append(part.tolist())
        return part * 10

    loader = loader_of(9, 8, microbatch_size=4, batch_transform=transform)
    return [(len(step), step.stand_in.tolist()) for step in loader], seen


def test_what_stands_in_is_collated_and_transformed_as_any_other():
    first, second = run(_transformed_stand_in, world_size=2)
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
        assert raised.type == "RuntimeError"
        where = "rank 0, worker 1" if workers else "rank 0"
        assert f"sample 4 could not be read on {where}: {text}" in raised.text


@pytest.mark.parametrize(
    ("raises", "options", "text"),
    [
        (KeyboardInterrupt(), {}, None),
        (StopIteration("early"), {}, "sample 4 could not be read on rank 0: StopIteration: early"),
        (None, {"collate_fn": {}.__getitem__}, None),
    ],
    ids=["an interrupt", "a stop", "in collate_fn"],
)
def test_what_is_no_error_of_a_sample_is_left_as_it_is(raises, options, text):
    raised = caught(steps, loader_of(Failing(raises), 6, **options))
    kind = type(raises).__name__ if raises is not None else "TypeError"
    assert (raised.type, raised.text) == ("RuntimeError", text) if text else raised.type == kind


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
