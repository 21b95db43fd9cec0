"""The loader: the same steps at every world size, epochs that advance, shares without rows."""

from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from data_zoo import ERRORS, Numbers, loader_of, steps
from on_ranks import Raised, caught, run
from torch.utils.data import TensorDataset

from pardata import make_loader

Point = namedtuple("Point", ["x", "name"])  # noqa: PYI024  # the untyped kind must work too


class Samples(Numbers):
    """Of one kind, of which a batch is recognised."""

    def __init__(self, length, kind="number"):
        self.length, self.kind = length, kind

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {
            "number": index,
            "float": index / 2,
            "tensor": torch.full((2, 3), float(index)),
            "numpy": np.full(2, index),
            "dict": {"x": torch.tensor([index]), "name": f"n{index}"},
            "strings": f"n{index}",
            "tuple": (torch.tensor([index]), index, f"n{index}"),
            "namedtuple": Point(torch.tensor(index), f"n{index}"),
            "custom": torch.tensor(index),
        }[self.kind]


class OwnBatch:
    def __init__(self, samples):
        self.samples = samples


def on_every_rank(fn, size, *args):
    """Run `fn` on ranks; at size 1 without any group, as a single process has none."""
    return run(fn, *args, world_size=size) if size > 1 else [fn(*args)]


# --- epochs ---


def loader_of_six(**options):
    return make_loader(Samples(6), 2, shuffle=True, seed=0, num_workers=0, **options)


def leave_by_an_exception(loader):
    for _ in loader:
        msg = f"in epoch {loader.epoch}"
        raise LookupError(msg)


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


def test_a_loop_over_the_epochs_left_runs_each_of_them():
    loader = loader_of_six()
    loader.set_epoch(3)
    ran = []
    for _ in range(loader.epoch, 6):
        for _ in loader:
            ran.append(loader.epoch)
            break
    assert ran == [3, 4, 5]


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
    loader = make_loader(data, 2, num_workers=0)
    with pytest.raises(RuntimeError):
        steps(loader)
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


# --- shares without rows ---

KINDS = ["number", "float", "tensor", "numpy", "dict", "strings", "tuple", "namedtuple"]


def _last_batches(length):
    return {kind: list(make_loader(Samples(length, kind), 4, num_workers=0))[-1] for kind in KINDS}


@pytest.mark.parametrize(("size", "length"), [(2, 1), (3, 5), (4, 2)])
def test_a_rank_without_samples_gets_a_batch_like_the_others_without_rows(size, length):
    ranks = run(_last_batches, length, world_size=size)
    rows = [rank < (length % 4) for rank in range(size)]
    assert not all(rows)
    for has, batch in zip(rows, ranks, strict=True):
        assert (batch["number"].shape, batch["number"].dtype) == ((has,), torch.int64)
        assert (batch["float"].shape, batch["float"].dtype) == ((has,), torch.float64)
        assert (batch["tensor"].shape, batch["tensor"].dtype) == ((has, 2, 3), torch.float32)
        assert batch["numpy"].shape == (has, 2)
        assert batch["dict"]["x"].shape == (has, 1)
        assert len(batch["dict"]["name"]) == len(batch["strings"]) == has
        assert [len(part) for part in batch["tuple"]] == [has] * 3
        assert type(batch["namedtuple"]) is Point
        assert [len(part) for part in batch["namedtuple"]] == [has] * 2


def _cannot_be_emptied(kind):
    collate = {"custom": OwnBatch, "count": len}[kind]
    loader = make_loader(Samples(5), 4, collate_fn=collate, num_workers=0)
    batches = iter(loader)
    first = next(batches)
    return type(first).__name__, caught(next, batches), caught(next, batches)


@pytest.mark.parametrize(("kind", "name"), [("custom", "OwnBatch"), ("count", "int")])
def test_a_batch_that_cannot_be_emptied_raises_on_every_rank(kind, name):
    for first, raised, _ in run(_cannot_be_emptied, kind, world_size=2):
        assert first == name  # as long as everybody has a sample it is anybody's batch
        assert isinstance(raised, Raised)
        assert raised.type == "TypeError"
        assert f"but this one holds a {name}: use drop_last=True, or" in raised.text


def test_alone_any_batch_will_do():
    loader = make_loader(Samples(5), 4, collate_fn=OwnBatch, num_workers=0)
    assert [batch.samples for batch in loader] == [[0, 1, 2, 3], [4]]


# --- microbatches, and what stands in for them ---


class Spoken(Samples):
    """Augments, and tells how many it read."""

    read = 0

    def __getitem__(self, index):
        self.read += 1
        return torch.tensor([index, torch.rand(()).item()])


def _plain(microbatches):
    return [part[:, 0].int().tolist() for part in microbatches]


def _microbatched(workers, length=11, batch_size=8, **options):
    data = Spoken(length)
    loader = make_loader(
        data, batch_size, microbatch_size=3, seed=5, num_workers=workers, **options
    )
    found = [
        (m.epoch, m.step, m.first, m.counts, m.seed, m.size, _plain(m), m.stand_in.tolist())
        for m in loader
    ]
    return found, loader.stats()["samples"], loader.state_dict(), loader.fingerprint()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_microbatches_gets_none_and_the_first_of_the_step_to_stand_in(workers):
    (alone,) = on_every_rank(_microbatched, 1, workers)
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

    loader = make_loader(Samples(9), 8, microbatch_size=4, num_workers=0, batch_transform=transform)
    return [(len(step), step.stand_in.tolist()) for step in loader], seen


def test_what_stands_in_is_collated_and_transformed_as_any_other():
    first, second = run(_transformed_stand_in, world_size=2)
    assert first == ([(1, [0, 10, 20, 30]), (1, [80])], [[0, 1, 2, 3], [8]])
    assert second == ([(1, [40, 50, 60, 70]), (0, [80])], [[4, 5, 6, 7], [8]])


# --- errors in the data set ---


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
    loader = make_loader(
        Failing(ValueError("torn")), 6, distributed=distributed, num_workers=dist.get_rank()
    )
    return caught(steps, loader)


def test_the_rank_is_that_of_the_process_shared_or_not():
    shared = run(_rank_that_fails, "auto", world_size=2, fresh=True)
    assert shared[0] == [[0, 1, 2]]
    assert "sample 4 could not be read on rank 1, worker 0: ValueError: torn" in shared[1].text
    one, other = run(_rank_that_fails, False, world_size=2, fresh=True)
    assert "sample 4 could not be read on rank 0: ValueError: torn" in one.text
    assert "sample 4 could not be read on rank 1, worker 0: ValueError: torn" in other.text


# --- stats ---


class FakeTime:
    """A clock that moves only where the test says."""

    now = 100.0

    def perf_counter(self):
        return self.now


class Slow(Numbers):
    """Takes a second a sample."""

    clock: FakeTime

    def __getitem__(self, index):
        self.clock.now += 1
        return index


@pytest.fixture
def clock(monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr("pardata.data._loader.time", clock)
    return clock


def slow_loader(clock):
    data = Slow(5)
    data.clock = clock
    # A reproducible one takes longer once, to read a sample twice and compare.
    return make_loader(data, 2, num_workers=0, reproducible=False)


def test_stats_tell_waiting_from_computing(clock):
    loader = slow_loader(clock)
    for _ in loader:
        clock.now += 3
    assert loader.stats() == {
        "seconds": 14.0,
        "wait_seconds": 5.0,
        "wait_share": 5 / 14,
        "samples": 5,
        "samples_per_second": 5 / 14,
    }
    clock.now += 1000  # an evaluation, say: no part of the epoch
    assert loader.stats()["seconds"] == 14.0


def test_stats_may_be_asked_for_in_the_loop_and_begin_anew_with_each_epoch(clock):
    loader = slow_loader(clock)
    for _ in range(2):
        found = []
        for _ in loader:
            clock.now += 1
            found.append((loader.stats()["seconds"], loader.stats()["samples"]))
        assert found == [(3.0, 2), (6.0, 4), (8.0, 5)]


def test_the_clock_of_an_epoch_that_was_left_stands_still(clock):
    loader = slow_loader(clock)
    for _ in loader:
        break
    clock.now += 1000
    assert loader.stats()["seconds"] == 2.0
    assert loader.stats()["samples"] == 2


def test_starting_an_epoch_counts_as_waiting(clock):
    class Sampler:
        def __len__(self):
            return 4

        def __iter__(self):
            clock.now += 10
            return iter(range(4))

    loader = make_loader(Samples(4), 2, sampler=Sampler(), num_workers=0)
    steps(loader)
    # Twice: of its first epoch a sampler is asked for the order again.
    assert loader.stats()["wait_seconds"] == loader.stats()["seconds"] == 20.0


def test_stats_before_the_first_epoch_are_zero():
    found = make_loader(TensorDataset(torch.ones(2)), 1).stats()
    assert (found["samples"], found["wait_seconds"], found["wait_share"]) == (0, 0, 0)
    assert found["samples_per_second"] == 0 < found["seconds"]
