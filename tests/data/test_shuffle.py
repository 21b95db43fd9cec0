"""The order that is computed: a bijection, fair, without a pattern, and the same everywhere."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardata.data._shuffle import Shuffle
from pardata.rng._seeds import mix

DRAWN = 2**16  # up to here the whole order is drawn, above it each number is computed
BOTH = pytest.mark.parametrize("drawn", [DRAWN, 0], ids=["drawn", "computed"])
FAR = pytest.mark.parametrize("length", [10**9, 10**12, 2**62])

keys = st.integers(0, 2**63 - 1)


def order(length, seed=0, epoch=0, positions=None):
    shuffle = Shuffle(length, mix(seed, epoch))
    return shuffle.at(torch.arange(length) if positions is None else positions)


def assert_bijective(length, key):
    found = Shuffle(length, key).at(torch.arange(length))
    assert found.dtype == torch.int64
    assert torch.equal(found.sort().values, torch.arange(length))


# --- a bijection ---


@BOTH
@given(length=st.integers(1, 3000), key=keys)
def test_every_number_comes_once(drawn, length, key):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pardata.data._shuffle._DRAWN", drawn)
        assert_bijective(length, key)


@pytest.mark.parametrize("length", [DRAWN - 1, DRAWN, DRAWN + 1, 317**2, 317**2 + 1])
def test_every_number_comes_once_at_the_edges(length):
    assert_bijective(length, 0)


@FAR
def test_what_is_far_too_long_to_draw_stays_in_range_and_distinct(length):
    # Runs and columns of the grid are where a round that is no bijection would collide.
    side = math.isqrt(length - 1) + 1
    spread = torch.randint(length, (100_000,), generator=torch.Generator().manual_seed(0))
    runs = [torch.arange(100_000), torch.arange(length - 100_000, length)]
    column = torch.arange(min(side, 100_000) - 1) * side + 7
    positions = torch.cat([spread, *runs, column]).unique()
    found = Shuffle(length, 3).at(positions)
    assert found.min() >= 0
    assert found.max() < length
    assert len(found.unique()) == len(positions)


# --- fair: no statistic is beyond what chance exceeds once in a million ---


def limit(freedom):
    """Return what chi-square exceeds once in a million, within a per cent (Wilson, Hilferty)."""
    ninth = 2 / (9 * freedom)
    return freedom * (1 - ninth + 4.7534 * math.sqrt(ninth)) ** 3


def seeds(some, many):
    """Let a test look at some seeds, and in the long run at many."""
    return pytest.mark.parametrize("seeds", [some, pytest.param(many, marks=pytest.mark.soak)])


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize(
    ("length", "drawn"),
    [(1000, DRAWN), (1000, 0), (10**9, DRAWN)],
    ids=["drawn", "computed", "10**9"],
)
@seeds(1000, 5000)
def test_where_two_positions_go_says_nothing_of_each_other(monkeypatch, seeds, length, drawn):
    # The second of a pair is next to the first in the grid of rows and columns, or far away.
    monkeypatch.setattr("pardata.data._shuffle._DRAWN", drawn)
    side, bins = math.isqrt(length - 1) + 1, 10
    others = [1, side, side + 1, length // 2, length - 1]
    counts = torch.zeros(len(others), bins, bins)
    for seed in range(seeds):
        where = order(length, seed, 0, torch.tensor([0, *others]))
        first, *rest = (where * bins // length).tolist()
        for number, second in enumerate(rest):
            counts[number, first, second] += 1
    starts = torch.tensor([-(-b * length // bins) for b in range(bins + 1)])
    sizes = starts.diff().double()
    pairs = sizes[:, None] * sizes - sizes.diag()  # no number comes twice
    expected = pairs / pairs.sum() * seeds
    for number, other in enumerate(others):
        assert chi_square(counts[number], expected) < limit(bins**2 - 1), other
    firsts = counts[0].sum(1)
    assert chi_square(firsts, sizes / length * seeds) < limit(bins - 1)


# --- without a pattern ---


def correlation(one, other):
    return torch.corrcoef(torch.stack([one, other]).double())[0, 1].item()


FEW = [(1000, DRAWN, 60), (60_000, 0, 1), (10**9, DRAWN, 1)]


@pytest.mark.parametrize(("length", "drawn", "orders"), FEW)
def test_nothing_correlates(monkeypatch, length, drawn, orders):
    monkeypatch.setattr("pardata.data._shuffle._DRAWN", drawn)
    if length <= 10**6:
        positions = torch.arange(length)
    else:
        sampled = torch.Generator().manual_seed(0)
        positions = torch.randint(length, (300_000,), generator=sampled).unique()
    after = (positions + 1) % length
    side = math.isqrt(length - 1) + 1

    def every(seed=0, epoch=0, at=positions):
        found = [order(length, 100 * number + seed, epoch, at) for number in range(orders)]
        return torch.cat(found)

    here = every()
    others = {
        "position": positions.repeat(orders),
        "neighbor": every(at=after),
        "neighbor in the column": every(at=(positions + side) % length),
        "next epoch": every(epoch=1),
        "next seed": every(seed=1),
        "next seed and epoch": every(seed=1, epoch=1),
    }
    for name, other in others.items():
        # Five standard deviations: chance is beyond them once in a million and a half.
        assert abs(correlation(here, other)) < 5 / math.sqrt(len(here)), name
        assert abs(correlation(here % 2, other % 2)) < 5 / math.sqrt(len(here)), name


@given(st.integers(-(2**70), 2**70), st.integers(0, 10_000))
def test_an_order_differs_by_epoch_and_by_seed_and_not_by_call(seed, epoch):
    found = order(50, seed, epoch).tolist()
    assert found == order(50, seed, epoch).tolist()
    assert found != order(50, seed, epoch + 1).tolist()
    assert found != order(50, seed + 1, epoch).tolist()


# --- the same everywhere ---
# What stands at the first three positions, in the middle and at the end; of up to ten, all.
GOLDEN = [
    ((10, 0, 0), [2, 4, 6, 1, 8, 0, 7, 5, 9, 3]),
    ((10, 0, 1), [0, 8, 1, 6, 5, 7, 4, 9, 3, 2]),
    ((1000, 0, 1), [698, 633, 658, 88, 503]),
    ((65536, 0, 0), [14816, 35256, 19443, 58240, 22771]),
    ((65537, 0, 0), [33804, 2624, 52228, 9469, 44953]),
    ((10**6, 0, 1), [200077, 597083, 660205, 897117, 788448]),
    ((10**9, 0, 0), [696_810_904, 679_178_506, 877_580_882, 266_555_817, 974_946_566]),
]


@pytest.mark.parametrize(("which", "numbers"), GOLDEN, ids=str)
def test_golden_values(which, numbers):
    # A run that goes on under a newer release must go on in the same order.
    length, seed, epoch = which
    positions = [*range(length)] if length <= 10 else [0, 1, 2, length // 2, length - 1]
    assert order(length, seed, epoch, torch.tensor(positions)).tolist() == numbers


@pytest.mark.parametrize("length", [DRAWN, 10**9])
def test_the_order_does_not_depend_on_the_number_of_threads(length):
    # Long enough for PyTorch to share the work out among them.
    positions, before = torch.arange(DRAWN), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(order(length, 1, 2, positions))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
