"""What each rank reads of an epoch, from any step on, and the hash of what was delivered."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import run
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from pardata import world
from pardata.data._order import Order, Requests
from pardata.data._plan import Plan
from pardata.data._shuffle import Shuffle
from pardata.seeds._mix import mix

SEED = 5


class Rotated(Sampler):
    """Knows its epoch, as a DistributedSampler does, and how often it was drawn."""

    def __init__(self, length):
        self.length, self.epoch, self.drawn = length, 0, 0

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.drawn += 1
        return iter([(i + self.epoch) % self.length for i in range(self.length)])


def order_of(length, kind="shuffle", seed=SEED):
    sampler = kind if isinstance(kind, Sampler) else None
    return Order(world(), length, seed, kind == "shuffle", sampler)


def indices(length, kind, epoch):
    """Return the whole order of an epoch, from first principles."""
    if kind == "shuffle":
        return Shuffle(length, mix(SEED, epoch)).at(torch.arange(length)).tolist()
    if isinstance(kind, Rotated):
        return [(i + epoch) % length for i in range(length)]
    return list(range(length))


def requests(plan, kind="shuffle", epoch=0, step=0, *, to_workers=False):
    found = Requests(plan, order_of(plan.length, kind), to_workers=to_workers)
    found.start_at(epoch, step * plan.batch_size)
    return list(found)


def plain(part):
    return part.tolist() if isinstance(part, torch.Tensor) else part


@st.composite
def plans(draw):
    """Draw the plans of all ranks."""
    length, batch_size = draw(st.integers(0, 80)), draw(st.integers(1, 20))
    microbatch_size = draw(st.none() | st.integers(1, batch_size))
    size, drop_last = draw(st.integers(1, 5)), draw(st.booleans())
    return [
        Plan(length, batch_size, drop_last, microbatch_size, rank, size) for rank in range(size)
    ]


KINDS = st.sampled_from(["shuffle", "ordered", "sampler"])
WINDOWS = st.sampled_from([1, 7, 2**14])  # positions that are looked up together


# --- requests ---


@given(st.data(), plans(), KINDS, WINDOWS, st.integers(0, 3))
def test_from_any_step_on_the_ranks_together_read_the_rest_of_the_epoch(
    data, team, kind, window, epoch
):
    alone = team[0]
    step = data.draw(st.integers(0, len(alone)))
    kind = Rotated(alone.length) if kind == "sampler" else kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pardata.data._order._AHEAD", window)
        ranks = [requests(plan, kind, epoch, step) for plan in team]
    whole = indices(alone.length, kind, epoch)
    assert {len(found) for found in ranks} == {len(alone) - step}
    for number, shares in enumerate(zip(*ranks, strict=True), step):
        positions = alone.step(number)
        read = [index for share in shares if share.rows for part in share.parts for index in part]
        assert read == [whole[position] for position in positions]
        assert sum(share.rows for share in shares) == len(positions)
        for share, plan in zip(shares, team, strict=True):
            assert (share.epoch, share.step) == (epoch, number)
            assert share.first == plan.microbatches(number).start
            assert share.counts == alone.counts(number)
            assert share.rows == sum(map(len, plan.parts(number)))


@given(plans(), KINDS)
def test_each_part_is_a_microbatch_or_else_the_share(team, kind):
    for plan in team:
        for request in requests(plan, Rotated(plan.length) if kind == "sampler" else kind):
            if plan.microbatch_size is None:
                assert [len(part) for part in request.parts] == [max(request.rows, 1)]
            elif not request.rows:  # the step's first, to stand in where all ranks must run one
                assert [len(part) for part in request.parts] == [request.counts[0]]
            else:
                last = request.first + len(request.parts)
                counts = tuple(len(part) for part in request.parts)
                assert counts == request.counts[request.first : last]


@pytest.mark.parametrize("to_workers", [True, False])
def test_a_rank_without_samples_reads_the_first_of_the_step(to_workers):
    for rank, rows in enumerate([1, 1, 0]):
        *_, last = requests(Plan(12, 5, False, None, rank, 3), to_workers=to_workers)
        whole = indices(12, "shuffle", 0)
        assert last.rows == rows
        assert [plain(part) for part in last.parts] == [[whole[11] if rank == 1 else whole[10]]]


@given(plans(), KINDS)
def test_a_rank_without_microbatches_reads_the_first_of_the_step(team, kind):
    kind = Rotated(team[0].length) if kind == "sampler" else kind
    whole = indices(team[0].length, kind, 0)
    for plan in team:
        for request in requests(plan, kind):
            if plan.microbatch_size is not None and not request.rows:
                first = plan.step(request.step)[: plan.microbatch_size]
                assert request.first == len(request.counts)
                assert [plain(part) for part in request.parts] == [[whole[i] for i in first]]


def test_an_example_of_ranks_without_microbatches():
    # 12 samples, global batches of 5: the last step has 2, one microbatch, which all three read.
    ranks = [requests(Plan(12, 5, False, 2, rank, 3), "ordered")[-1] for rank in range(3)]
    assert [(found.rows, found.first) for found in ranks] == [(2, 0), (0, 1), (0, 1)]
    assert [[plain(part) for part in found.parts] for found in ranks] == [[[10, 11]]] * 3


@pytest.mark.parametrize("kind", ["shuffle", "ordered", Rotated(9)])
def test_to_workers_go_lists_of_numbers(kind):
    for request in requests(Plan(9, 4, False, 3), kind, to_workers=True):
        for part in request.parts:
            assert type(part) is list
            assert {type(index) for index in part} == {int}


@pytest.mark.parametrize("kind", ["shuffle", "ordered"])
def test_without_workers_the_indices_stay_a_tensor(kind):
    # Ready to index with: no number of its own for each sample.
    for request in requests(Plan(9, 4, False), kind):
        assert {part.dtype for part in request.parts} == {torch.int64}


def test_a_sampler_may_yield_indices_of_any_kind():
    sampler = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    found = requests(Plan(3, 2, False), sampler)
    assert [request.parts for request in found] == [[[[0, 1], [2, 3]]], [[[4]]]]


def test_an_iterator_keeps_the_epoch_it_began_with():
    # DataLoader asks for the first steps at once, and for others while the next epoch is set.
    sampler = Rotated(4)
    for kind in ("shuffle", sampler):
        source = Requests(Plan(4, 2, False), order_of(4, kind), to_workers=True)
        source.start_at(2, 2)
        old = iter(source)
        source.start_at(7, 0)
        new = iter(source)
        assert [(r.epoch, r.step, r.parts) for r in old] == [
            (2, 1, [indices(4, kind, 2)[2:]]),
        ]
        assert [(r.epoch, r.step, r.parts) for r in new] == [
            (7, 0, [indices(4, kind, 7)[:2]]),
            (7, 1, [indices(4, kind, 7)[2:]]),
        ]
    assert sampler.drawn == 3  # twice for the first epoch


def test_before_it_is_told_anything_it_begins_at_the_beginning():
    source = Requests(Plan(4, 2, False), order_of(4), to_workers=False)
    assert [(request.epoch, request.step) for request in source] == [(0, 0), (0, 1)]
    assert len(source) == 2


@pytest.mark.parametrize("epoch", [0, 3])
def test_of_a_billion_samples_only_those_to_come_are_looked_up(monkeypatch, epoch):
    looked_up = []

    def at(shuffle, positions):
        looked_up.append(len(positions))
        return look_up(shuffle, positions)

    look_up = Shuffle.at
    monkeypatch.setattr(Shuffle, "at", at)
    plan = Plan(10**9, 100, True, None, 1, 2)
    source = Requests(plan, order_of(10**9), to_workers=False)
    source.start_at(epoch, 700_000_000)
    first, second = (request for request, _ in zip(source, range(2), strict=False))
    assert looked_up == [2**14 // 50 * 50]
    assert (first.step, second.step) == (7_000_000, 7_000_001)
    positions = torch.arange(700_000_150, 700_000_200)
    assert torch.equal(second.parts[0], look_up(Shuffle(10**9, mix(SEED, epoch)), positions))


@pytest.mark.parametrize("batch_size", [3, 2**14, 2**15 + 1])
def test_steps_larger_than_a_window_are_looked_up_one_by_one(batch_size):
    found = requests(Plan(2 * batch_size, batch_size, True))
    assert [len(request.parts[0]) for request in found] == [batch_size] * 2
    together = torch.cat([request.parts[0] for request in found])
    assert together.tolist() == indices(2 * batch_size, "shuffle", 0)


# --- samplers ---


class Endless(Sampler):
    def __init__(self):
        self.yielded = 0

    def __len__(self):
        return 4

    def __iter__(self):
        while True:
            self.yielded += 1
            assert self.yielded < 100
            yield 0


def test_of_an_endless_sampler_no_more_is_drawn_than_shows_that_it_is():
    sampler = Endless()
    with pytest.raises(
        ValueError, match="as its length, 4, but yielded more: let its __iter__ end"
    ):
        order_of(4, sampler)(0)
    assert sampler.yielded == 5


class CountsItself(Sampler):
    """Takes each time that it is asked for another epoch."""

    def __init__(self, is_told):
        self.epoch = -1
        if is_told:
            self.set_epoch = lambda epoch: setattr(self, "epoch", epoch - 1)

    def __len__(self):
        return 4

    def __iter__(self):
        self.epoch += 1
        return iter([(i + self.epoch) % 4 for i in range(4)])


def of_its_own():
    return RandomSampler(range(30), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [of_its_own, lambda: CountsItself(is_told=False)])
def test_a_sampler_that_would_yield_another_order_when_asked_again_is_refused(make):
    sampler = make()
    text = (
        rf"^`sampler` must yield the same order whenever it is asked for that of an epoch, or no "
        rf"run could go on where it was, but {type(sampler).__name__} yielded another for epoch 2 "
        rf"when asked again: let it draw from the default generators, .*\(generator=None\)"
    )
    with pytest.raises(ValueError, match=text):
        order_of(len(sampler), sampler)(2)
    with pytest.raises(ValueError, match=text):
        order_of(len(sampler), sampler).fingerprint(2, 1)


def test_a_sampler_is_drawn_twice_in_its_first_epoch_only():
    sampler = Rotated(4)
    order = order_of(4, sampler)
    drawn = []
    for epoch in range(3):
        order(epoch)
        drawn.append(sampler.drawn)
    assert drawn == [2, 3, 4]
    assert order_of(4, CountsItself(is_told=True)).fingerprint(3, 4) == hash_of(4, [3, 0, 1, 2])


# --- the fingerprint ---


def hash_of(length, whole):
    return hashlib.sha256(f"{length}:{''.join(f'{i},' for i in whole)}".encode()).hexdigest()


@given(st.data(), st.integers(0, 100), KINDS, WINDOWS, st.integers(0, 3))
def test_a_fingerprint_is_the_hash_of_the_indices(data, length, kind, window, epoch):
    delivered = data.draw(st.integers(0, length))
    kind = Rotated(length) if kind == "sampler" else kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pardata.data._order._AHEAD", window)
        found = order_of(length, kind).fingerprint(epoch, delivered)
    assert found == hash_of(length, indices(length, kind, epoch)[:delivered])


def test_a_fingerprint_tells_orders_apart():
    found = [
        order_of(length, kind, seed).fingerprint(epoch, delivered)
        for length in (20, 21)
        for kind in ("shuffle", Rotated(length))
        for seed in (SEED, SEED + 1)
        for epoch in (0, 1)
        for delivered in (0, 5, 20)
    ]
    # Nothing delivered is the same whatever the order, and the sampler has no seed.
    assert len(set(found)) == 2 * (1 + 2 * 2 * 2 + 2 * 2)


def _fingerprints():
    sampler = RandomSampler(range(10))
    return [order_of(10, kind).fingerprint(1, 6) for kind in (sampler, "shuffle", "ordered")]


def test_a_fingerprint_is_the_same_on_every_rank_at_every_size():
    alone = _fingerprints()
    for size in (1, 2, 3):
        assert run(_fingerprints, world_size=size) == [alone] * size
