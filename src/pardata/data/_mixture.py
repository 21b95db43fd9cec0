"""Mixture: a dataset of several in fixed proportions, or of one whose samples have weights.

It stores no order: position, epoch and seed decide the sample, by integer arithmetic that is the
same on every platform.
"""

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pardata._pytree import content_hash
from pardata._validation import FixedArguments, check_bool, check_int, check_map_style, vector_of
from pardata.data._shuffle import Shuffle, random_words
from pardata.rng._seeds import mix

_MOST = 2**16  # the maximum number of positions in a block
_TOGETHER = 2**10  # positions whose samples are found in one call, because a call is expensive

_shuffle = lru_cache(maxsize=256)(Shuffle)  # it takes milliseconds to make


class _Reading(threading.local):
    """The key of the order in which a loader reads now, however its dataset holds a mixture."""

    key: int | None = None


reading = _Reading()


class Mixture(FixedArguments, Dataset[Any]):
    """A map-style dataset of several: ``Mixture({"code": (code, 0.7), "text": (text, 0.3)})``.

    Its positions are divided into blocks. Each block has a fixed number of samples of each dataset,
    in a random order: of each 10 positions here, 7 and 3. The block is the shortest one that has
    these proportions, if it has at most 65,536 positions. Otherwise numbers are rounded, in blocks
    of that length, of the whole length if that is less, or longer if a dataset would have none.
    Each dataset is shuffled and read to its end, and then again in another order. Each epoch begins
    all datasets anew.

    With `weights` it is one dataset. Each position draws one of its samples, with replacement.

    Pass it to `make_loader` without `shuffle`. The seed of the loader and the epoch decide the
    order, in constant memory, at every world size and number of workers. It resumes at any sample.
    Any other dataset may hold it. Split its datasets, not the mixture: the sample at a position
    changes with the epoch. Other readers call ``set_epoch``.

    Args:
        sources: datasets and weights by name. Datasets are map-style and not empty. Weights are
            above 0 and have any sum. With `weights` one dataset.
        weights: a number ≥ 0 for each sample of the dataset: a list, an array or a tensor.
        length: positions of an epoch. By default the length of the largest dataset over its
            proportion, rounded up: so it is read once, up to the rounding of numbers.
        named: return ``(name, sample)`` in place of the sample.

    Raises:
        TypeError: `sources` are no pairs by name, or `weights` no numbers.
        ValueError: a dataset is empty, a weight is not above 0 or not finite, or `length` has no
            position for a dataset.

    >>> mixture = Mixture({"odd": ([1, 3], 1), "even": ([0, 2, 4, 6], 2)})
    >>> len(mixture), sorted(mixture)
    (6, [0, 1, 2, 3, 4, 6])
    """

    _arguments = frozenset({"sources", "weights", "length", "named"})

    def __init__(
        self,
        sources: Mapping[Any, tuple[Any, float]] | Dataset[Any] | Sequence[Any],
        *,
        weights: Iterable[Any] | None = None,
        length: int | None = None,
        named: bool = False,
    ) -> None:
        check_bool("named", named)
        pairs: Any = sources if weights is None else {"dataset": (sources, 1)}
        if weights is not None and isinstance(sources, Mapping):
            msg = "`sources` must be one dataset with `weights`, which are of its samples, but are"
            raise TypeError(f"{msg} several: pass {{'code': (code, 0.7), 'text': (text, 0.3)}}")
        self._named, self._shares = named, _shares(pairs)
        self.names: list[Any] = [*pairs]
        self.datasets: list[Any] = [dataset for dataset, _ in pairs.values()]
        self._lengths = [*map(len, self.datasets)]
        largest, share = max(zip(self._lengths, self._shares, strict=True))
        usual = math.ceil(largest / share)
        self._length = check_int("length", usual if length is None else length, least=1)
        self._sums = None if weights is None else _sums(vector_of("weights", weights, usual))
        least = math.ceil(1 / min(self._shares))
        if least > self._length:
            name = self.names[self._shares.index(min(self._shares))]
            msg = f"`length` must have a position for each dataset, but {self._length} has none for"
            raise ValueError(f"{msg} {name!r}: raise it to {least}, or that weight")
        exact = math.lcm(*(share.denominator for share in self._shares))
        self._block = min(exact, self._length, max(least, _MOST))
        self._quotas = self._counts(self._block)
        self._chunk = self._block * max(1, _TOGETHER // self._block)
        self._last = self._length - self._length % self._block  # the start of an incomplete block
        self._kept: tuple[Any, Tensor] = None, torch.empty(0)  # the newest chunk and its indices
        self.set_epoch(0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Any:
        if not -self._length <= position < self._length:
            raise IndexError(f"position {position} is out of range for {self._length} positions")
        place = int(position) % self._length
        start = self._last if place >= self._last else place // self._chunk * self._chunk
        key = self._key if reading.key is None else reading.key
        index, number = int(self._indices(start, key)[place - start]), 0
        while index >= self._lengths[number]:
            index, number = index - self._lengths[number], number + 1
        sample: Any = self.datasets[number][index]
        return (self.names[number], sample) if self._named else sample

    def set_epoch(self, epoch: int, seed: int = 0) -> None:
        """Begin the order of `epoch` and `seed`."""
        if (lengths := [*map(len, self.datasets)]) != self._lengths:
            msg = f"a mixture's datasets must keep their lengths {self._lengths}, not {lengths}"
            raise ValueError(f"{msg}: make another mixture")
        self._key = mix(seed, epoch)
        for dataset in self.datasets:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

    def facts(self) -> str:
        """Return a text of what decides the order, except the epoch and the seed."""
        sizes = self.names, self._shares, self._lengths, self._length
        return repr((*sizes, content_hash([self._sums])))

    def indices_at(self, positions: Tensor, key: int) -> Tensor:
        """Return the samples at `positions`, counted through all datasets, one after the other.

        Both are int64 tensors of shape (n,).
        """
        positions = positions % self._length
        indices, starts = torch.empty_like(positions), positions // self._chunk * self._chunk
        starts[positions >= self._last] = self._last
        for start in starts.unique().tolist():
            inside = starts == start
            indices[inside] = self._indices(start, key)[positions[inside] - start]
        return indices

    def _indices(self, start: int, key: int) -> Tensor:
        """Return the indices of the chunk at `start`, which is some blocks; keep the newest."""
        if self._kept[0] != (start, key):
            block = min(self._block, self._length - start)
            count = max(1, min(self._chunk, self._last - start) // block)
            self._kept = (start, key), self._blocks(start, block, count, key)
        return self._kept[1]

    def _counts(self, block: int) -> list[int]:
        """Return how many of the positions of a block each dataset has."""
        counts = [math.floor(block * share) for share in self._shares]
        by_rest = sorted(range(len(counts)), key=lambda n: counts[n] - block * self._shares[n])
        for source in by_rest[: block - sum(counts)]:
            counts[source] += 1
        return counts

    def _blocks(self, start: int, block: int, count: int, key: int) -> Tensor:
        """Return the indices of the positions of `count` blocks from `start` on."""
        counts = self._counts(block)
        positions = torch.arange(start, start + count * block, device="cpu")
        order = random_words(positions, key).view(count, block).argsort(stable=True)
        # The random places of each dataset in a block, ascending, so that it is read in turn.
        sources = torch.repeat_interleave(torch.tensor(counts, device="cpu"))
        places = (sources * block + order).sort().values % block
        found, offset = list[Tensor](), 0
        for source, length in enumerate(self._lengths):
            draws = torch.arange(count * counts[source], device="cpu")
            draws += start // self._block * self._quotas[source]
            drawn = offset + self._drawn(length, mix(key, source), draws)
            found.append(drawn.view(count, -1) if counts[source] else drawn.view(count, 0))
            offset += length
        return torch.empty_like(places).scatter_(1, places, torch.cat(found, 1)).flatten()

    def _drawn(self, length: int, key: int, draws: Tensor) -> Tensor:
        """Return the indices in a dataset of consecutive draws; both are int64 of shape (n,)."""
        if (sums := self._sums) is not None:
            total = int(sums[-1])
            numbers = (random_words(draws, key).double() * (total / 2**62)).long()
            return torch.searchsorted(sums, numbers.clamp_(max=total - 1), right=True)
        indices, passes = torch.empty_like(draws), draws // length
        for number in passes.unique().tolist():
            inside = passes == number
            shuffle = _shuffle(length, mix(key, number))
            indices[inside] = shuffle.at(draws[inside] % length)
        return indices


def _shares(sources: Any) -> list[Fraction]:
    """Return the proportions of datasets."""
    if not isinstance(sources, Mapping) or not sources:
        msg = f"`sources` must be datasets and weights by name, but is {sources!r:.60}: pass "
        raise TypeError(msg + "{'code': (code, 0.7), 'text': (text, 0.3)}, or `weights`")
    exact: list[Fraction] = []
    for name, pair in sources.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            msg = f"`sources[{name!r}]` must be a dataset and its weight, but is {pair!r:.60}"
            raise TypeError(f"{msg}: pass a tuple of both")
        check_map_style(pair[0], f" in `sources[{name!r}]`")
        (weight,) = vector_of(f"sources[{name!r}][1]", [pair[1]], 1).tolist()
        if not len(pair[0]) or not weight:
            msg = f"`sources[{name!r}]` must have samples and a weight above 0, but has"
            raise ValueError(f"{msg} {len(pair[0])} and {weight:g}: leave it out")
        exact.append(Fraction(str(weight)))  # by its text, because 0.7 as a float is no tenth
    return [share / sum(exact) for share in exact]


def _sums(weights: Tensor) -> Tensor:
    """Return the sums of weights as int64, which do not depend on the order of additions."""
    if not weights.any():
        raise ValueError("`weights` must have one above 0, but all are 0: look at what made them")
    sums = (weights / weights.max()).mul_(2.0 ** (62 - len(weights).bit_length())).round_().long()
    return torch.cumsum(sums, 0, out=sums)
