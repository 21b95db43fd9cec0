"""The same global batches at every world size, stopped anywhere: against ten lines that say how."""

import json

import torch
from data_zoo import Rotated, joined, loader_of, rows
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from on_ranks import run
from torch.utils.data import RandomSampler, TensorDataset

EPOCHS = 2


def order_of(options, epoch):
    """Return the numbers of an epoch in their order: not cut into batches in any way."""
    length = options["data"]
    if options["shuffle"]:
        loader = loader_of(length, max(1, length), shuffle=True, drop_last=False)
        loader.set_epoch(epoch)
        return [number for batch in loader for number in batch.tolist()]
    turn = 0 if options["sampler"] is None else epoch
    return [(number + turn) % length for number in range(length)]


def reference(options, epoch, size):
    """Return what each of `size` ranks gets of each step."""
    order, batch_size = order_of(options, epoch), options["batch_size"]
    whole = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    if options["drop_last"] and whole and len(whole[-1]) < batch_size:
        whole.pop()
    pieces = whole
    if (m := options["microbatch_size"]) is not None:
        pieces = [[step[i : i + m] for i in range(0, len(step), m)] for step in whole]
    return [
        [[step[i] for i in own.tolist()] for own in torch.arange(len(step)).tensor_split(size)]
        for step in pieces
    ]


def go_on(options, state, count):
    """Load, deliver `count` batches of the epochs left, and stop in the body of the last one."""
    loader = loader_of(**options)
    found = []

    def stopped():
        return found, loader.state_dict(), loader.fingerprint()

    if state is not None:
        loader.load_state_dict(state)
    if count == 0:
        return stopped()
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            found.append((loader.epoch, rows(batch)))
            if len(found) == count:
                return stopped()
    return stopped()


def on_ranks_of(size, *args):
    return run(go_on, *args, world_size=size) if size > 1 else [go_on(*args)]


@st.composite
def loaders(draw):
    """Arguments of a loader that goes with up to 4 ranks."""
    length, batch_size = draw(st.integers(0, 30)), draw(st.integers(4, 9))
    order = draw(st.sampled_from(["ordered", "shuffled", "sampled"] if length else ["ordered"]))
    pieces = draw(st.sampled_from([None, 1, 2, 3, 4]))
    no_share_is_empty = pieces is not None or length % batch_size in (0, 4, 5, 6, 7, 8)
    keeps = [False] if order == "ordered" or no_share_is_empty else []
    drops = [True] if batch_size <= length else []
    assume(keeps or drops)
    return {
        "data": length,
        "batch_size": batch_size,
        "shuffle": order == "shuffled",
        "drop_last": draw(st.sampled_from([*keeps, *drops])),
        "microbatch_size": pieces,
        "sampler": Rotated(length) if order == "sampled" else None,
    }


interruptions = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=4)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(loaders(), interruptions)
def test_every_step_is_the_same_samples_at_every_size_wherever_it_stopped(options, plan):
    left = {
        size: [(epoch, step) for epoch in range(EPOCHS) for step in reference(options, epoch, size)]
        for size in (1, 2, 3, 4)
    }
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
        alone = loader_of(**options)
        alone.load_state_dict(state)
        if expected and state["delivered"]:  # what was delivered, whoever got it
            assert set(fingerprints) == {alone.fingerprint()}
    assert (state["epoch"], state["delivered"]) == (max(EPOCHS, state["epoch"]), 0)


# --- by workers ---

KINDS = {
    "ordered": {},
    "dropped": {"drop_last": True},
    "shuffled": {"shuffle": True},
    "microbatches": {"shuffle": True, "drop_last": False, "microbatch_size": 2},
    "sampled": {"sampler": RandomSampler(range(23))},
    "tensors": {"shuffle": True, "data": TensorDataset(torch.arange(23))},
}


def _all_kinds(states, workers, count):
    found = {}
    for kind, own in KINDS.items():
        options = {"data": 23, "batch_size": 4, "num_workers": workers, **own}
        found[kind] = go_on(options, states.get(kind), count)
    return found


def test_real_ranks_and_workers_go_on_where_others_stopped():
    whole = _all_kinds({}, 0, None)
    states, seen = {}, {kind: [] for kind in KINDS}
    for size, workers, count in [(1, 2, 3), (3, 0, 4), (2, 2, 3), (1, 0, None)]:
        ranks = run(_all_kinds, states, workers, count, world_size=size)
        for kind in KINDS:
            states[kind] = ranks[0][kind][1]
            epochs = [epoch for epoch, _ in ranks[0][kind][0]]
            shares = joined([[share for _, share in rank[kind][0]] for rank in ranks])
            seen[kind] += zip(epochs, shares, strict=True)
    for kind in KINDS:
        assert seen[kind] == whole[kind][0], kind
