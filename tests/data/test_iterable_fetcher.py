"""Streams: each sample on one rank and one worker, in the same steps at every size."""

import itertools
import json
import logging
import random
import weakref

import pytest
import torch
import torch.distributed as dist
from common_data import ERRORS, Buffer, Count, at, flat, joined, loader_of, rows, steps
from logged import log_of
from on_ranks import caught, run
from torch.utils.data import IterableDataset, get_worker_info

from pardata import make_loader


class Own(IterableDataset):
    """Yields its own to each rank and worker: so many as it has, of rank and worker."""

    def __init__(self, *lengths, draws=False):
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.lengths, self.draws = lengths, draws

    def __iter__(self):
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        for i in range(self.lengths[self.rank]):
            if i * i % 7 % workers == number:
                yield 1000 * self.rank + i + (torch.rand(()).item() if self.draws else 0)


# What each rank yields of a stream that is not the same for all.
UNLIKE = {
    "split by rank": lambda rank: range(rank, 20, 2),
    **{number: lambda rank, n=number: range(12 - n * rank) for number in (1, 3, 4)},
}


class Unlike(IterableDataset):
    def __init__(self, name):
        self.name = name

    def __iter__(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return iter(UNLIKE[self.name](rank))


class FromTo(IterableDataset):
    """As in PyTorch's documentation: a worker_init_fn says from where to where."""

    start, stop = 0, 12

    def __iter__(self):
        return iter(range(self.start, self.stop))


def each_its_own(number):
    data = get_worker_info().dataset
    data.start, data.stop = data.start + 6 * number, data.start + 6 * (number + 1)


class Failing(Count):
    def __init__(self, length, error, at, rank=None):
        super().__init__(length)
        self.error, self.at, self.rank = error, at, rank

    def __iter__(self):
        here = dist.get_rank() if dist.is_initialized() else 0
        if self.at is None and self.rank in (None, here):
            raise self.error
        return self._numbers(here)

    def _numbers(self, here):
        for number in range(self.length):
            if number == self.at and self.rank in (None, here):
                raise self.error
            yield number


class Waiting(Count):
    """On rank 1 does not read the second step before rank 0 has begun with the first."""

    def __iter__(self):
        for number in range(self.length):
            if number == 4 and dist.get_rank() == 1:
                dist.recv(torch.zeros(1), src=0)
            yield number


# --- the same at every size ---


def test_set_epoch_and_a_state_reach_workers_that_live_on():
    whole = steps(at(loader_of(Buffer(13)), 3))
    loader = loader_of(Buffer(13), num_workers=1)
    steps(loader)
    loader.set_epoch(3)
    assert steps(loader) == whole
    assert steps(at(loader, 3, 5)) == whole[1:]


def test_a_stream_without_end_is_left_by_a_break():
    class Endless(IterableDataset):
        def __iter__(self):
            return itertools.count()

    loader = loader_of(Endless())
    for _ in range(2):
        assert [rows(batch) for batch, _ in zip(loader, range(2), strict=False)] == [
            [0, 1, 2, 3, 4],
            [5, 6, 7, 8, 9],
        ]


def _runs_ahead():
    found = []
    for batch in loader_of(Waiting(8), 4):
        if not found and dist.get_rank() == 0:
            dist.send(torch.zeros(1), dst=1)
        found.append(batch.tolist())
    return found


def test_a_rank_does_not_wait_for_reads_of_later_steps():
    assert joined(run(_runs_ahead, world_size=2, timeout=60)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- stopping and going on ---


class Longer(Count):
    """Has four samples more than it says."""

    def __len__(self):
        return self.length - 4


def test_where_a_stream_ends_is_not_for_its_length_to_say():
    loader = loader_of(Longer(27))
    at(loader, 0, 27)
    assert steps(loader) == []


def _no_such_place(workers):
    loader = loader_of(Own(2, 2, 2), num_workers=workers, sharded=True)
    return caught(list, at(loader, 0, 100))


# Of a stream that is shared: tests/promises/misuse_data.py.
@pytest.mark.parametrize(("size", "workers"), [(1, 2), (3, 0)])
def test_resuming_beyond_the_end_of_a_stream_raises_on_every_rank(size, workers):
    text = "ValueError: `state` must be of this iterable dataset, but its `delivered` is 100 sam"
    for raised in run(_no_such_place, workers, world_size=size):
        assert str(raised).startswith(text)
        assert "samples, and the first" in raised.text


def test_reading_a_stream_again_is_logged_and_keeps_no_samples():
    alive, most = weakref.WeakSet(), []

    class Heavy(IterableDataset):
        def __iter__(self):
            for _ in range(103):
                sample = Count(0)
                alive.add(sample)
                most.append(len(alive))
                yield sample

    with log_of("pardata.data._loader", logging.INFO) as log:
        loader = at(loader_of(Heavy(), collate_fn=len), 0)
        assert log.lines == []
        at(loader, 0, 100)
    assert log.lines == ["the loader reads 100 samples again, to resume after them"]
    assert list(loader) == [3]
    assert max(most) <= 10  # one step, and the one before it


# --- streams that are not the same everywhere, without `sharded` ---


def _all_of(data, workers=0, **options):
    return steps(loader_of(data, 4, num_workers=workers, **options))


def test_one_worker_reads_what_is_not_sharded_so_that_none_is_lost():
    with log_of("pardata.data._config", logging.INFO) as log:
        assert flat(_all_of(ByWorker(), 2)) == [*range(40)]
    assert log.lines == [
        "one worker reads ByWorker, because each would read all of it, without sharded=True"
    ]


def _split_by_rank():
    return [caught(_all_of, Unlike("split by rank"), workers) for workers in (0, 1)]


def test_a_stream_that_splits_itself_by_rank_is_found_out():
    for found in run(_split_by_rank, world_size=2):
        for raised in found:
            assert raised.type == "RuntimeError"
            start, first, second, cure = raised.text.split("\n")
            assert "to `make_loader(IterableDataset)`, but `first samples` differs" in start
            assert first.startswith("  rank 0: first samples='")
            assert second.startswith("  rank 1: first samples='")
            assert cure.startswith("Yield the same samples on every rank, or pass sharded=True ")


def until_it_raises(data, **options):
    """Return what a loop got, and the error that it ended in."""
    seen, loader = [], loader_of(data, 4, **options)
    return seen, caught(lambda: seen.extend(batch.tolist() for batch in loader))


def _left_by_early_ends(less):
    return [until_it_raises(Unlike(number)) for number in less]


def test_streams_that_end_differently_raise_on_every_rank():
    # By less than a batch and by more; 12, 9 and 6 have a mean that one of them is.
    less = [1, 3, 4]
    for found in run(_left_by_early_ends, less, world_size=3):
        for number, (seen, raised) in zip(less, found, strict=True):
            assert len(seen) == (12 - number * 2) // 4
            # Of 12, 11 and 10 samples the third batch is short on two; else the second on the last.
            first = "ranks 1, 2" if number == 1 else "rank 2"
            assert str(raised) == (
                f"RuntimeError: every rank must have samples for this step, but they ended "
                f"early on {first} of 3: yield the same everywhere, or pass sharded=True and give "
                f"each rank some"
            )


# --- sharded ---


def own_steps(lengths, workers, *, draws=False, epochs=2, **options):
    data = Own(*lengths, draws=draws)
    loader = make_loader(data, 6, sharded=True, seed=1, num_workers=workers, **options)
    return [steps(loader) for _ in range(epochs)]


UNEQUAL = {1: [(20,)], 2: [(20, 5)], 3: [(3, 17, 12), (1, 1, 30)]}


def _unequal(cases):
    return [own_steps(lengths, workers, drop_last=drops) for lengths, workers, drops in cases]


@pytest.mark.parametrize("size", UNEQUAL)
def test_each_sample_of_unequal_streams_is_seen_once_and_ranks_stop_together(size):
    cases = [*itertools.product(UNEQUAL[size], (0, 2), (False, True))]
    found = zip(*run(_unequal, cases, world_size=size), strict=True)
    for (lengths, workers, drops), ranks in zip(cases, found, strict=True):
        everything = [1000 * rank + i for rank in range(size) for i in range(lengths[rank])]
        for shares in zip(*ranks, strict=True):
            (count,) = {len(steps) for steps in shares}
            every = [step for steps in shares for step in steps]
            seen, own = sorted(flat(every)), 6 // size
            if drops:  # all stop where one has no whole share
                assert sorted(set(seen)) == seen
                assert {len(step) for step in every} <= {own}
            else:
                assert seen == everything
                assert max(map(len, every)) <= own
            if not workers:
                assert count == (min(lengths) // own if drops else -(-max(lengths) // own))


class ByWorker(IterableDataset):
    """As in PyTorch's documentation: split by worker alone. Its samples are made of numbers."""

    def __init__(self, sample=int):
        self.sample = sample

    def __iter__(self):
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        return map(self.sample, range(number, 40, workers))


class Object:
    def __init__(self, number):
        self.number = number + 100 * dist.get_rank()


def _by_worker(workers):
    shares = {"sharded": True, "num_workers": workers}
    alike = caught(steps, loader_of(ByWorker(), 8, **shares))
    objects = loader_of(ByWorker(Object), 8, collate_fn=len, **shares)
    return alike, [*objects], caught(steps, loader_of(ByWorker(), 8, distributed=False, **shares))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sharded_stream_with_equal_samples_on_all_ranks_raises(workers):
    for raised, objects, alone in run(_by_worker, workers, world_size=2, fresh=True):
        assert str(raised).split("\n\n")[0] == (
            "RuntimeError: each rank must have its own samples with sharded=True, but all 2 begin "
            "alike: split by world().rank too, or omit sharded=True"
        )
        assert sum(objects) == 40  # what is in them is not known
        assert sum(map(len, alone)) == 40


class Once(IterableDataset):
    """Can be read once."""

    def __init__(self):
        self.numbers = None

    def __iter__(self):
        if self.numbers is None:
            rank = dist.get_rank() if self.is_sharded and dist.is_initialized() else 0
            self.numbers = iter(range(100 * rank, 100 * rank + 40))
        return self.numbers

    is_sharded = False


class OnceSharded(Once):
    is_sharded = True


def _three_epochs(kind, workers):
    sharded = kind is OnceSharded
    persists = True if workers else None  # new workers would read it again
    options = {"num_workers": workers, "persistent_workers": persists}
    loader = loader_of(kind(), 8, sharded=sharded, **options)
    return [caught(steps, loader) for _ in range(3)]


@pytest.mark.parametrize(("kind", "workers"), [(Once, 1), (OnceSharded, 0)])
def test_a_stream_that_yields_once_raises_in_the_second_epoch(kind, workers):
    for size in (1, 2):
        for first, *others in run(_three_epochs, kind, workers, world_size=size, fresh=workers):
            assert len(first) == (10 if kind is OnceSharded and size == 2 else 5)
            for number, raised in enumerate(others, 1):
                assert str(raised) == (
                    f"RuntimeError: {kind.__name__} yielded nothing in epoch {number}: let "
                    f"__iter__ make a new iterator"
                )


def _nothing():
    return [caught(own_steps, lengths, 0) for lengths in ((6, 0, 6), (0, 4, 0))]


def test_a_rank_with_nothing_at_all_raises_on_every_rank():
    for found in run(_nothing, world_size=3):
        for raised, ranks in zip(found, ("rank 1", "ranks 0, 2"), strict=True):
            assert str(raised).startswith(
                f"RuntimeError: every rank must have samples for this step, but they ended "
                f"early on {ranks} of 3: "
            )


def _drawn():
    return [own_steps((8, 8), 2, draws=True) for _ in range(2)]


def test_each_rank_and_worker_draws_its_own_numbers_and_the_same_again():
    ranks = run(_drawn, world_size=2)
    assert all(first == again for first, again in ranks)
    parts = [row % 1 for rank, _ in ranks for steps in rank for step in steps for row in step]
    assert len(parts) == len(set(parts)) == 32


def test_a_worker_init_fn_says_to_each_worker_what_is_its_own():
    loader = make_loader(
        FromTo(), 4, sharded=True, num_workers=2, worker_init_fn=each_its_own, seed=1
    )
    whole = [[0, 1, 2, 3], [6, 7, 8, 9], [4, 5], [10, 11]]
    assert [steps(loader) for _ in range(2)] == [whole, whole]


def _own_rests(workers, lengths, options):
    def loader():
        data = Own(*lengths, draws=True)
        return make_loader(data, 6, sharded=True, seed=1, num_workers=workers, **options)

    whole, rests = steps(loader()), []
    for count in range(1, len(whole) + 1, 2):
        saved, later = loader(), loader()
        for _ in zip(range(count), saved, strict=False):
            state = json.loads(json.dumps(saved.state_dict()))
        later.load_state_dict(state)
        rests.append((count, steps(later), later.epoch, steps(later)))
    return whole, rests


def numbers(steps):
    """Return the samples without what was drawn."""
    return [[int(row) for row in step] for step in steps]


@pytest.mark.parametrize(
    ("workers", "lengths", "options"),
    [(0, (20, 5), {}), (3, (31,), {}), (2, (28, 20), {"drop_last": True})],
)
def test_sharded_streams_of_any_length_resume_after_the_last_step(workers, lengths, options):
    for whole, rests in run(_own_rests, workers, lengths, options, world_size=len(lengths)):
        assert len(whole) >= 3
        for count, rest, epoch, second in rests:
            assert rest == whole[count:]
            assert epoch == 1
            assert numbers(second) == numbers(whole) != whole


# --- streams with an epoch, a state or randomness of their own ---


class Told(Count):
    """Knows its epoch, as those of Hugging Face do."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(random.Random(f"7 {self.epoch}").sample(range(self.length), self.length))


class Shuffled(Count):
    """Draws its order from a generator of its own, which nobody seeds for it."""

    def __init__(self, length, seed):
        super().__init__(length)
        self.generator = random.Random(seed)

    def __iter__(self):
        return iter(self.generator.sample(range(self.length), self.length))


class Stateful(Shuffled):
    """… and can tell where it is, and go on there without reading anything again."""

    left = None  # before an epoch; nothing is left at its end

    def __iter__(self):
        self.left = list(super().__iter__()) if self.left is None else self.left
        while self.left:
            yield self.left.pop()
        self.left = None

    def state_dict(self):
        return {"left": self.left, "generator": self.generator.getstate()}  # no copy: it goes on

    def load_state_dict(self, state):
        self.left = state["left"]
        version, numbers, gauss = state["generator"]
        self.generator.setstate((version, tuple(numbers), gauss))


OWN = {
    "told its epoch": (Told, (), {}),
    "told its epoch, sharded": (Told, (), {"sharded": True}),
    "with a state": (Stateful, (3,), {}),
}


def _own_epochs(name, states, workers, stop):
    """Run three epochs of each, or what is left of them."""
    kind, seeds, options = OWN[name]
    seeds = [seed + bool(states) for seed in seeds]  # another one, as after another start
    loader = loader_of(kind(23, *seeds), 6, num_workers=workers, **options)
    seen = []
    for state in [loader.state_dict(), *states]:
        loader.load_state_dict(state)
    for epoch in loader.epochs(3):
        for batch in loader:
            seen.append((epoch, rows(batch)))
            if len(seen) == stop:
                return seen, json.loads(json.dumps(loader.state_dict()))
    return seen, None


def in_steps(ranks):
    return joined([[row for _, row in found] for found, _ in ranks])


# Sharded, each of two workers would read all of it.
@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, n) for name in OWN for n in (0, 2) if "sharded" not in name or not n],
)
def test_a_stream_with_set_epoch_or_a_state_resumes_exactly(name, workers):
    sharded = "sharded" in name
    whole, _ = _own_epochs(name, [], workers, None)
    assert len({str(row) for _, row in whole}) == len(whole) == 12
    for size in [1] if sharded else [1, 3]:
        begun = run(_own_epochs, name, [], workers, 6, world_size=size)
        states = [begun[0][1]]
        assert all(state == states[0] for _, state in begun)
        rest = run(_own_epochs, name, states, workers, None, world_size=size if sharded else 2)
        left = in_steps(begun) + in_steps(rest)
        expected = [row for _, row in whole]
        # The order of an epoch is no part of the state at its start, but of the generator then.
        within = len(expected) if name != "with a state" else 8
        assert left[:within] == expected[:within]
        assert [sorted(flat(left[i : i + 4])) for i in (0, 4, 8)] == [list(range(23))] * 3


class AsDatasets(Told):
    """Resumes as those of Hugging Face: one dict that changes while it reads, and an own start."""

    def __init__(self, length):
        super().__init__(length)
        self.place, self.start = {"read": 0}, None

    def __iter__(self):
        self.place = {"read": 0} if self.start is None else self.start
        self.start = None
        for number in [*super().__iter__()][self.place["read"] :]:
            self.place["read"] += 1
            yield number

    def state_dict(self):
        return self.place

    def load_state_dict(self, state):
        self.start = state


class OtherState(Told):
    """Has a state_dict for somebody else, as litdata's StreamingDataset."""

    def state_dict(self, num_samples_yielded, num_workers):
        raise AssertionError

    def load_state_dict(self, state):
        raise AssertionError


def _step_by_step(kind, seeds, workers):
    """Run two epochs, each step by a new loader that resumes from the one before."""
    seen, state = [], None
    for number in range(9):
        data = kind(23, *[seed + number for seed in seeds])
        loader = loader_of(data, 6, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
            assert json.loads(json.dumps(loader.state_dict())) == state  # it was not used up
        for epoch in loader.epochs(2):
            batch = next(iter(loader), None)
            if batch is not None:
                seen.append((epoch, rows(batch)))
                break
        state = json.loads(json.dumps(loader.state_dict()))
    return seen, None


@pytest.mark.parametrize(
    ("kind", "seeds", "workers", "size"),
    [
        *[(AsDatasets, (), *place) for place in ((0, 1), (2, 1), (0, 3))],
        *[(Stateful, (3,), *place) for place in ((0, 1), (0, 2))],
        (OtherState, (), 0, 1),
    ],
)
def test_a_state_survives_as_many_resumes_as_there_are_steps(kind, seeds, workers, size):
    ranks = run(_step_by_step, kind, seeds, workers, world_size=size)
    epochs, found = [epoch for epoch, _ in ranks[0][0]], in_steps(ranks)
    assert epochs == [0] * 4 + [1] * 4
    whole = loader_of(kind(23, *seeds), 6)
    # Each dataset with randomness of its own has another order for the second epoch.
    count = 4 if seeds else 8
    assert found[:count] == (steps(whole) + steps(whole))[:count]
    assert [sorted(flat(found[i : i + 4])) for i in (0, 4)] == [list(range(23))] * 2


def test_the_state_of_a_stream_of_hugging_face_survives_them_too():
    datasets = pytest.importorskip("datasets")

    def stream():
        rows = datasets.Dataset.from_dict({"n": list(range(23))})
        return rows.to_iterable_dataset(num_shards=3)

    seen, state = [], None
    while len(seen) < 8:
        loader = loader_of(stream(), 6)
        if state is not None:
            loader.load_state_dict(state)
        for _ in loader.epochs(2):
            if (batch := next(iter(loader), None)) is not None:
                seen.append(batch["n"].tolist())
                break
        state = json.loads(json.dumps(loader.state_dict()))
    assert seen == [[*range(i, min(i + 6, 23))] for i in (0, 6, 12, 18)] * 2


def _own_randomness():
    options = {"sharded": True, "num_workers": 0}
    first = 1 + 10 * dist.get_rank()
    loader, again = (loader_of(Shuffled(24, seed), 6, **options) for seed in (first, first + 1))
    next(iter(loader))
    again.load_state_dict(loader.state_dict())
    same = loader_of(Shuffled(24, first), 6, **options)
    same.load_state_dict(loader.state_dict())
    return caught(steps, again), len(steps(same))


# Of a stream that is shared: tests/promises/misuse_data.py.
@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_that_changes_between_reads_raises(size):
    for raised, left in run(_own_randomness, world_size=size):
        assert str(raised) == (
            "ValueError: `dataset` must yield the same samples again to resume: use the "
            "default generators alone, or, without `sharded`, give it state_dict() and "
            "load_state_dict()"
        )
        assert left == 4 * size - 1


# --- errors in the stream ---


def _each_error(workers):
    # In a process of its own: the workers of a loader that failed hang on its traceback.
    return {
        text: until_it_raises(Failing(20, error, 9), num_workers=workers)
        for text, error in ERRORS.items()
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_sample_the_rank_and_what_it_was(workers):
    (found,) = run(_each_error, workers, world_size=1, fresh=True)
    for text, (seen, raised) in found.items():
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]
        where = "on rank 0, worker 0" if workers else "on rank 0"
        said = f"sample 9 of the iterable dataset could not be read {where}: {text}"
        assert f"RuntimeError: {said}" in str(raised)


def test_an_error_at_the_start_says_that_there_is_no_stream():
    _, raised = until_it_raises(Failing(20, OSError("no such file"), None))
    assert raised.text == "the iterable dataset could not be read on rank 0: OSError: no such file"


def _failing_on_rank_1():
    return [until_it_raises(Failing(20, ValueError("torn"), at, 1)) for at in (None, 0, 9)]


def test_a_read_error_raises_on_every_rank_after_the_same_step():
    ranks = run(_failing_on_rank_1, world_size=3)
    for number, where in enumerate([None, 0, 9]):
        what = "the iterable dataset"
        what = what if where is None else f"sample {where} of {what}"
        own = f"{what} could not be read on rank 1: ValueError: torn"
        seen, raised = zip(*(rank[number] for rank in ranks), strict=True)
        assert joined(seen) == [[0, 1, 2, 3], [4, 5, 6, 7]][: 2 * bool(where)]
        assert {error.type for error in raised} == {"RuntimeError"}
        assert raised[1].text == own
        for rank in (0, 2):
            assert raised[rank].text == (
                f"rank 1 failed in `the next step of an IterableDataset`: RuntimeError: {own}\n"
                f"(seen on rank {rank}, which did nothing wrong)"
            )


def _after_an_error():
    data = Failing(8, ValueError("torn"), 5)
    loader = loader_of(data, 4)
    raised = caught(steps, loader)
    data.at = -1
    return raised.type, loader.epoch, steps(loader)


def test_an_error_ends_the_epoch_and_not_the_loader():
    ranks = run(_after_an_error, world_size=2)
    assert [rank[:2] for rank in ranks] == [("RuntimeError", 1)] * 2
    assert joined([rank[2] for rank in ranks]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
