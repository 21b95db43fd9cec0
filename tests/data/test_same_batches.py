"""The same global batches at every world size, stopped anywhere: against ten lines that say how."""

import json
import math
from itertools import pairwise

import torch
from common_data import Buffer, ByLength, Count, Permuted, Rotated, Sized, joined, loader_of, rows
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from on_ranks import caught, run
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pardata import Microbatches

EPOCHS = 2


def order_of(options, epoch):
    """Return the numbers of an epoch in their order: not cut into batches in any way."""
    data = options["data"]
    if options["shuffle"]:
        loader = loader_of(data, max(1, data), shuffle=True, drop_last=False)
        loader.set_epoch(epoch)
        return [number for batch in loader for number in batch.tolist()]
    length = data if isinstance(data, int) else data.length
    turn = 0 if options["sampler"] is None else epoch
    return [(number + turn) % length for number in range(length)]


def whole_steps(options, epoch):
    """Return the samples of each step, whoever gets them."""
    if options["batch_sampler"] is not None:
        return options["batch_sampler"]
    order, batch_size = order_of(options, epoch), options["batch_size"]
    whole = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return whole[:-1] if options["drop_last"] and len(order) % batch_size else whole


def reference(options, epoch, size):
    """Return what each of `size` ranks gets of each step."""

    def shares(step):
        starts = [math.ceil(rank * len(step) / size) for rank in range(size + 1)]
        return [step[start:end] for start, end in pairwise(starts)]

    whole = whole_steps(options, epoch)
    if (m := options["microbatch_size"]) is None:
        return [shares(step) for step in whole]
    found = []
    for number, step in enumerate(whole):
        pieces = [step[i : i + m] for i in range(0, len(step), m)]
        counts, first = tuple(map(len, pieces)), 0
        found.append([])
        for own in shares(pieces):
            where = epoch, number, first, counts, 1, size
            found[-1].append((where, own, (own or pieces)[0]))
            first += len(own)
    return found


def shown(batch):
    """Return what a rank has of a step, and what it knows of it."""
    if not isinstance(batch, Microbatches):
        return rows(batch)
    where = batch.epoch, batch.step, batch.first, batch.counts, batch.seed, batch.size
    return where, rows(batch), batch.placeholder.tolist()


def go_on(options, state, count):
    """Load, deliver `count` batches of the epochs left, and stop in the body of the last one."""
    loader = loader_of(**options)
    found = []

    def stopped():
        has_indices = not isinstance(loader.dataset, IterableDataset)
        return found, loader.state_dict(), loader.fingerprint() if has_indices else ""

    if state is not None:
        loader.load_state_dict(state)
    if count == 0:
        return stopped()
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            found.append((loader.epoch, shown(batch)))
            if len(found) == count:
                return stopped()
    return stopped()


def on_ranks_of(size, *args):
    return run(go_on, *args, world_size=size) if size > 1 else [go_on(*args)]


@st.composite
def loaders(draw):
    """Arguments of a loader that goes with up to 4 ranks."""
    length, batch_size = draw(st.integers(0, 30)), draw(st.integers(4, 9))
    kinds = ["ordered", "stream", "stream with a length", "shuffled", "sampled", "batches"]
    kind = draw(st.sampled_from(kinds if length else kinds[:3]))
    pieces = draw(st.sampled_from([None, 1, 2, 3, 4]))
    options = {"shuffle": kind == "shuffled", "microbatch_size": pieces, "batch_sampler": None}
    options["sampler"] = Rotated(length) if kind == "sampled" else None
    options["data"] = {"stream": Count, "stream with a length": Sized}.get(kind, int)(length)
    if kind == "batches":
        batch = st.lists(st.integers(0, length - 1), min_size=1 if pieces else 4, max_size=9)
        options["batch_sampler"] = draw(st.lists(batch, max_size=5))
        return {**options, "batch_size": None, "drop_last": None}
    no_share_is_empty = pieces is not None or length % batch_size in (0, 4, 5, 6, 7, 8)
    trains = kind in ("shuffled", "sampled")
    keeps = [] if trains and not no_share_is_empty else [False]
    drops = [True] if batch_size <= length or kind == "stream" else []
    assume(keeps or drops)
    return {**options, "batch_size": batch_size, "drop_last": draw(st.sampled_from(keeps + drops))}


interruptions = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=4)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(loaders(), interruptions)
def test_every_step_is_the_same_samples_at_every_size_wherever_it_stopped(options, plan):
    left = {
        size: [(epoch, step) for epoch in range(EPOCHS) for step in reference(options, epoch, size)]
        for size in (1, 2, 3, 4)
    }
    length = caught(len, loader_of(**options))
    assert type(options["data"]) is Count or length == len(left[1]) // EPOCHS
    seen, state = 0, None
    for size, count in [*plan, (1, None)]:
        found, states, fingerprints = zip(*on_ranks_of(size, options, state, count), strict=True)
        until = None if count is None else seen + count
        expected = left[size][seen:until]
        for rank, batches in enumerate(found):
            assert batches == [(epoch, shares[rank]) for epoch, shares in expected]
        seen += len(expected)
        assert len({json.dumps(told) for told in states}) == 1
        state = json.loads(json.dumps(states[0]))
        if expected and state["delivered"] and isinstance(options["data"], int):
            alone = loader_of(**options)
            alone.load_state_dict(state)
            assert set(fingerprints) == {alone.fingerprint()}  # of what was delivered, to whomever
    assert (state["epoch"], state["delivered"]) == (max(EPOCHS, state["epoch"]), 0)


# --- by workers ---

WEIGHTS = [0.0, *range(1, 23)]
KINDS = {
    "ordered": {},
    "dropped": {"drop_last": True},
    "shuffled": {"shuffle": True},
    "microbatches": {"shuffle": True, "drop_last": False, "microbatch_size": 2},
    "sampled": {"sampler": RandomSampler(range(23))},
    "weighted": {"sampler": WeightedRandomSampler(WEIGHTS, 23)},
    "tensors": {"shuffle": True, "data": TensorDataset(torch.arange(23))},
    "batches by length": {"data": 28, "batch_size": None, "batch_sampler": ByLength(28, 20)},
    "batches of a sampler": {
        "batch_size": None,
        "batch_sampler": BatchSampler(RandomSampler(range(23)), 4, drop_last=True),
    },
    "a list of batches": {
        "batch_size": None,
        "batch_sampler": [[3, 1, 2], torch.tensor([0, 5, 5, 7]), (22, 21, 20), [9] * 3, [8] * 7],
    },
    "stream": {"data": Count(23)},
    "stream in microbatches": {"data": Count(23), "microbatch_size": 2},
    "shuffled inside": {"data": Buffer(23)},
    "shuffled at the start": {"data": Permuted(23)},
    "not reproducible": {"data": Buffer(23), "reproducible": False},
}


def _all_kinds(states, workers, count):
    found = {}
    for kind, own in KINDS.items():
        options = {"data": 23, "batch_size": 4, "num_workers": workers, **own}
        steps, state, _ = go_on(options, states.get(kind), count)
        found[kind] = [(n, s[1] if isinstance(s, tuple) else s) for n, s in steps], state
    return found


def test_real_ranks_and_workers_go_on_where_others_stopped():
    before, whole = torch.get_rng_state(), _all_kinds({}, 0, None)
    assert torch.equal(torch.get_rng_state(), before)
    states, seen = {}, {kind: [] for kind in KINDS}
    for size, workers, count in [(1, 2, 3), (3, 0, 4), (2, 2, 3), (1, 0, None)]:
        ranks = run(_all_kinds, states, workers, count, world_size=size)
        for kind in KINDS:
            assert len({json.dumps(rank[kind][1]) for rank in ranks}) == 1
            states[kind] = json.loads(json.dumps(ranks[0][kind][1]))
            epochs = [epoch for epoch, _ in ranks[0][kind][0]]
            shares = joined([[share for _, share in rank[kind][0]] for rank in ranks])
            seen[kind] += zip(epochs, shares, strict=True)
    for kind in KINDS:
        assert seen[kind] == whole[kind][0], kind
        epochs = [[step for epoch, step in seen[kind] if epoch == number] for number in range(2)]
        is_fixed = kind in ("ordered", "dropped", "a list of batches") or "stream" in kind
        assert (epochs[0] == epochs[1]) is is_fixed, kind
    weighted = [number for _, step in seen["weighted"] for number in step]
    assert 0 not in weighted
    assert sum(weighted) / len(weighted) > 12  # that of equal weights is 11
