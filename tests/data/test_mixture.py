"""A mixture: proportions, order and weights, alone and in a loader at any size."""

import math
import pickle
from collections import Counter

import pytest
import torch
from common_data import Drawing, Numbers, flat, joined, loader_of, rows
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import run, run_caught
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from pardata import Mixture, make_loader, world
from pardata.rng._seeds import mix


def mixture(**options):
    """Return a mixture of 70 numbers and of 10 from 1000 on, of which each is read thrice."""
    return Mixture({"code": (range(70), 0.7), "text": (range(1000, 1010), 0.3)}, **options)


def names(made):
    return [name for name, _ in made]


# --- proportions ---


def test_each_block_has_its_quotas_and_a_random_order():
    made = mixture(length=200, named=True)
    blocks = [names(made)[start : start + 10] for start in range(0, 200, 10)]
    assert all(Counter(block) == {"code": 7, "text": 3} for block in blocks)
    assert len(set(map(tuple, blocks))) > 10


WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(1, 400))
def test_any_weights_are_kept_to_less_than_one_in_a_short_epoch(weights, length):
    sources = {str(n): (range(5), weight) for n, weight in enumerate(weights)}
    try:
        made = Mixture(sources, length=length, named=True)
    except ValueError as error:  # a weight that has less than a position
        assert min(weights) / sum(weights) * length < 1
        assert "must have a position for each dataset" in str(error)  # noqa: PT017  # may not raise
        return
    found = Counter(names(made))
    assert sum(found.values()) == length
    if made._block == length:
        assert all(
            abs(found[name] - length * weight / sum(weights)) < 1
            for name, (_, weight) in sources.items()
        )


def counts_of(made, start, stop):
    ends = torch.tensor([len(dataset) for dataset in made.datasets]).cumsum(0)
    indices = made.indices_at(torch.arange(start, stop), mix(0, 0))
    return torch.searchsorted(ends, indices, right=True).bincount(minlength=len(ends)).tolist()


@pytest.mark.parametrize(
    "weights",
    [[123457, 987654.5, math.pi, 10], [10_000] * 299 + [123], [1.0001] + [1] * 199],
    ids=["uneven", "files", "equal"],
)
def test_weights_that_no_short_block_has_are_rounded_in_each_block(weights):
    made = Mixture({n: (range(2000 + n), weight) for n, weight in enumerate(weights)}, length=10**6)
    block = made._block
    for start in (0, block):
        for count, weight in zip(counts_of(made, start, start + block), weights, strict=True):
            assert abs(count - block * weight / sum(weights)) < 1
    # The incomplete block at the end has its part of each.
    start = 10**6 // block * block
    for count, weight in zip(counts_of(made, start, 10**6), weights, strict=True):
        assert abs(count - (10**6 - start) * weight / sum(weights)) < 1


@pytest.mark.parametrize(
    ("sources", "length"),
    [
        ({"a": ([0] * 70, 0.7), "b": ([0] * 10, 0.3)}, 100),
        ({"a": ([0] * 7, 2), "b": ([0] * 7, 1)}, 11),
        ({"a": ([0], 1)}, 1),
    ],
)
def test_the_usual_length_reads_the_largest_dataset_once(sources, length):
    made = Mixture(sources)
    assert len(made) == length
    assert counts_of(made, 0, length)[0] == len(made.datasets[0])


# --- the order in a dataset ---


def test_a_dataset_is_read_to_its_end_before_it_begins_again():
    made = mixture()
    found = list(made)
    assert Counter(found) == Counter([*range(70), *[*range(1000, 1010)] * 3])
    text = [sample for sample in found if sample >= 1000]
    passes = [text[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(one) == [*range(1000, 1010)] for one in passes)
    assert len(set(map(tuple, passes))) == 3  # each in another order


def test_each_epoch_and_seed_has_another_order():
    orders = []
    for epoch, seed in [(0, 0), (1, 0), (0, 1)]:
        made = mixture()
        made.set_epoch(epoch, seed)
        orders.append(tuple(made))
    assert len(set(orders)) == 3
    assert len({frozenset(Counter(order).items()) for order in orders}) == 1


GOLDEN = [3, 10, 4, 1, 5, 11, 2, 0, 12]


def test_golden_order():
    made = Mixture({"a": (range(6), 2), "b": (range(10, 13), 1)})
    made.set_epoch(0, seed=1)
    assert list(made) == GOLDEN
    assert [pickle.loads(pickle.dumps(made))[-n] for n in range(9, 0, -1)] == GOLDEN


def test_positions_are_those_of_a_sequence():
    made = mixture()
    assert made[-1] == made[99]
    assert made[torch.tensor(3)] == made[3]
    for outside in (100, -101):
        with pytest.raises(IndexError, match=f"position {outside} is out of range for 100"):
            made[outside]


# --- weights ---


def test_draws_follow_the_weights():
    weights = torch.tensor([0, 1, 2, 3, 0.5, 0, 4])
    made = Mixture("abcdefg", weights=weights, length=10**6)
    found = made.indices_at(torch.arange(10**6), mix(7, 0)).bincount(minlength=7)
    expected = weights.double() / weights.sum() * 10**6
    assert found[weights == 0].tolist() == [0, 0]
    possible = weights > 0
    chi_squared = ((found - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_squared < 18.5  # 4 degrees of freedom: 0.1 %; the seed is fixed


def test_more_weights_than_multinomial_takes():
    weights = torch.zeros(2**24 + 5)
    weights[[3, -1]] = 1
    made = Mixture(range(len(weights)), weights=weights)
    assert {made[position] for position in range(50)} == {3, 2**24 + 4}


def test_equal_weights_draw_with_replacement():
    made = Mixture(range(1000), weights=[1] * 1000)
    assert len(made) == 1000
    assert 560 < len(set(made)) < 700  # 1 - 1/e of them


# --- in a loader ---


class Pair(Dataset):
    """A dataset around another, as one that tokenizes."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index], 0


class Slots:
    """A dataset that nobody looks into."""

    __slots__ = ("read",)

    def __init__(self, inner):
        self.read = inner.__getitem__

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return self.read(index)


WAYS = {
    "itself": lambda inner: inner,
    "slots": Slots,
    "stacked": lambda inner: StackDataset(inner, range(100)),
    "list": lambda inner: Pair(Slots(inner)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_seed_and_epoch_decide_however_a_dataset_holds_it(way, workers):
    orders = []
    for seed in (1, 2):
        loader = loader_of(WAYS[way](mixture()), 100, seed=seed, num_workers=workers)
        for _ in range(2):
            (batch,) = loader
            orders.append(tuple((batch if torch.is_tensor(batch) else batch[0]).tolist()))
    assert len(set(orders)) == 4
    plain = mixture()
    plain.set_epoch(1, seed=2)
    assert orders[3] == tuple(plain)


class Packed(Dataset):
    """Reads the mixture at the beginning of each epoch."""

    def __init__(self):
        self.inner = mixture()

    def set_epoch(self, epoch):
        self.samples = [epoch, *self.inner]

    def __len__(self):
        return 101

    def __getitem__(self, index):
        return self.samples[index]


class Epoch(Numbers):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch


def test_set_epoch_of_datasets_around_it_and_in_it_is_called():
    for workers in (0, 1):
        packed = loader_of(Packed(), 101, seed=3, num_workers=workers)
        for epoch in range(2):
            plain = mixture()
            plain.set_epoch(epoch, seed=3)
            (batch,) = packed
            assert batch.tolist() == [epoch, *plain]
        loader = loader_of(Mixture({"a": (Epoch(3), 1)}), 3, num_workers=workers)
        assert [batch.tolist() for _ in range(2) for batch in loader] == [[0] * 3, [1] * 3]


def drawing():
    return {"a": (Drawing(50), 0.7), "b": (Drawing(9), 0.3)}


KINDS = {
    "mixture": lambda: Mixture(drawing()),
    "weights": lambda: Mixture(Drawing(40), weights=[n % 5 for n in range(40)]),
    "subset": lambda: Subset(Mixture(drawing()), range(60)),
    "concatenated": lambda: ConcatDataset([Mixture(drawing()), Drawing(9)]),
    "held": lambda: Pair(Mixture(drawing())),
}


def epochs(kind, batch_size=8, state=None, stop=None, **options):
    """Return what this rank gets of two epochs, or of `stop` steps, and the state."""
    loader = loader_of(KINDS[kind](), batch_size, **options)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for _ in loader.epochs(2):
        for batch in loader:
            found.append(rows(batch))
            if len(found) == stop:
                return found, loader.state_dict(), loader.fingerprint()
    return found, loader.state_dict(), loader.fingerprint()


def steps_of(ranks):
    return joined([found for found, *_ in ranks])


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_the_same_at_every_size_and_after_a_stop(kind):
    (one,) = run(epochs, kind, world_size=1)
    expected = one[0]
    half = len(expected) // 2
    assert flat(expected[:half]) != flat(expected[half:])
    for size in (2, 3):
        found = run(epochs, kind, world_size=size)
        assert steps_of(found) == expected
        assert {each[2] for each in found} == {one[2]}
    stopped = run(epochs, kind, 8, None, 3)
    resumed = run(epochs, kind, 5, stopped[0][1], world_size=3)
    assert flat(steps_of(stopped)) + flat(steps_of(resumed)) == flat(expected)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same(method):
    options = {"num_workers": 2, "multiprocessing_context": method}
    for kind in ("mixture", "held"):
        assert epochs(kind, **options)[0] == epochs(kind)[0]


def test_two_loaders_of_one_mixture_do_not_disturb_each_other():
    made = mixture()
    expected = [list(loader_of(mixture(), 10, seed=seed)) for seed in (1, 2)]
    loaders = [loader_of(made, 10, seed=seed) for seed in (1, 2)]
    found = list(zip(*loaders, strict=True))
    assert [[each.tolist() for each in pair] for pair in found] == [
        [one.tolist(), other.tolist()] for one, other in zip(*expected, strict=True)
    ]


def test_fingerprints_are_those_of_the_samples():
    marks = set()
    for seed, weight in [(1, 0.7), (2, 0.7), (1, 0.6)]:
        made = Mixture({"a": (range(20), weight), "b": (range(20), 1 - weight)}, length=20)
        loader = loader_of(made, 5, seed=seed)
        list(loader)
        marks.add(loader.fingerprint())
    assert len(marks) == 3


def test_positions_from_the_end_are_those_from_the_start():
    made = mixture()
    ends = torch.tensor([-1, -100, 99])
    assert made.indices_at(ends, 5).tolist() == made.indices_at(ends % 100, 5).tolist()


def cost_of_shares():
    cost = [1] * 70 + [100] * 10  # of the samples of "code", then of "text"
    loader = make_loader(mixture(), 20, cost=cost, seed=0, num_workers=0)
    return [sum(100 if n >= 1000 else 1 for n in batch.tolist()) for batch in loader]


def test_costs_are_those_of_the_samples_of_all_datasets():
    for step in zip(*run(cost_of_shares), strict=True):
        assert step == (300 + step[0] % 100, 300 + step[1] % 100)


def test_whole_samples_are_collated_with_their_names():
    data = TensorDataset(torch.arange(4), torch.arange(4))
    made = Mixture({"x": (data, 1), "y": (data, 1)}, named=True)
    labels, (first, second) = next(iter(DataLoader(made, batch_size=8)))
    assert Counter(labels) == {"x": 4, "y": 4}
    assert torch.equal(first, second)


# --- errors ---


def differing(length, weight, hold):
    here = world().rank
    sources = {"a": (range(50), 2), "b": (range(5 + length * here), 1 + weight * here)}
    loader_of(hold(Mixture(sources, length=100)))


@pytest.mark.parametrize("hold", [Pair, StackDataset])
@pytest.mark.parametrize(("length", "weight"), [(1, 0), (0, 1)])
def test_ranks_with_other_datasets_or_weights_raise_at_the_call(length, weight, hold):
    for error in run_caught(differing, length, weight, hold, world_size=2):
        assert "`the listed samples` differs" in error.text


def test_a_state_of_other_weights_is_an_error():
    state = loader_of(mixture()).state_dict()
    with pytest.raises(ValueError, match="samples was"):
        loader_of(
            Mixture({"code": (range(70), 1), "text": (range(10), 1)}, length=100)
        ).load_state_dict(state)


def test_a_dataset_that_has_grown_is_an_error():
    data = [1, 2, 3]
    loader = loader_of(Mixture({"a": (data, 1)}))
    data.append(4)
    with pytest.raises(RuntimeError, match=r"must keep their lengths \[3\], not \[4\]"):
        list(loader)


def assigned():
    mixture().length = 5


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: Mixture([1, 2]), r"must be datasets and weights by name, but is \[1, 2\]"),
        (lambda: Mixture({}), "must be datasets and weights by name"),
        (lambda: Mixture({"a": [1]}), r"`sources\['a'\]` must be a dataset and its weight"),
        (lambda: Mixture({"a": (iter([1]), 1)}), "must have `__getitem__` and `__len__`"),
        (lambda: Mixture({"a": ([1], 0)}), r"a weight above 0, but has 1 and 0: leave it out"),
        (lambda: Mixture({"a": ([], 1)}), r"must have samples .* but has 0 and 1"),
        (lambda: Mixture({"a": ([1], -1)}), "finite numbers of at least 0.*from -1 up"),
        (lambda: Mixture({"a": ([1], math.inf)}), "finite numbers"),
        (lambda: Mixture({"a": ([1], "much")}), "could not convert string to float"),
        (lambda: Mixture({"a": ([1], 1)}, length=0), "`length` must be an integer of at least 1"),
        (lambda: mixture(length=1), "`length` must have a position for each dataset"),
        (lambda: mixture(named=1), "`named` must be True or False"),
        (lambda: Mixture([1, 2], weights=[1]), r"of shape \(2,\), but is of shape \(1,\)"),
        (lambda: Mixture([1, 2], weights=[0, 0]), "`weights` must have one above 0"),
        (lambda: Mixture([1, 2], weights=[1, math.nan]), "with the sum nan"),
        (
            lambda: Mixture({"a": [1], "b": [2]}, weights=[1, 1]),
            "`sources` must be one dataset with",
        ),
        (
            lambda: make_loader(Pair(mixture()), 2, cost=[1] * 100),
            "for a dataset that holds a Mixture",
        ),
        (lambda: make_loader(mixture(), 2, shuffle=True), "`shuffle` must be False with a Mixture"),
        (assigned, "`length` of a mixture must not change to 5: make another mixture"),
    ],
)
def test_wrong_arguments_are_errors(wrong, text):
    with pytest.raises((TypeError, ValueError, AttributeError), match=text):
        wrong()


def test_numbers_of_a_dataset_are_read_through_getitem():
    assert Counter(Mixture({"a": (Numbers(3), 1)})) == {0: 1, 1: 1, 2: 1}
