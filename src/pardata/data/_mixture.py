"""Mixture: a dataset of several in fixed proportions, or of one whose samples have weights.

It stores no order: position, epoch and seed decide the sample, by integer arithmetic that is the
same on every platform.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pardata._pytree import content_hash
from pardata._validation import (
    FixedArguments,
    check_bool,
    check_int,
    check_map_style,
    type_with_article,
    vector_of,
)
from pardata.data._shuffle import Shuffle, random_words
from pardata.rng._seeds import mix

_MOST = 2**16  # the maximum number of positions in a block
_TOGETHER = 2**10  # positions whose samples are found in one call, because a call is expensive

_shuffle = lru_cache(maxsize=128)(Shuffle)  # a short one takes milliseconds to make


class Mixture(FixedArguments, Dataset[Any]):
    """A map-style dataset of several: ``Mixture({"code": (code, 0.7), "text": (text, 0.3)})``.

    Its positions are divided into blocks. Each block has a fixed number of samples of each dataset,
    in a random order: of each 10 positions here, 7 and 3. The block is the shortest one that has
    these proportions, if it has at most 65,536 positions. Otherwise numbers are rounded, in blocks
    of about that length, or of the whole length if that is less. Each dataset is shuffled and read
    to its end, and then again in another order. Each epoch begins all datasets anew.

    With `weights` it is one dataset. Each position draws one of its samples, with replacement.

    Pass it to `make_loader` without `shuffle`. The seed of the loader and the epoch decide the
    order, in constant memory, at every world size and number of workers. It resumes at any sample.
    A ``Subset`` or another dataset may hold it. Other readers call ``set_epoch``.

    Args:
        sources: datasets and weights by name. Datasets are map-style and not empty. Weights are
            above 0 and have any sum. With `weights` one dataset.
        weights: a number ≥ 0 for each sample of the dataset: a list, an array or a tensor.
        length: positions of an epoch. By default the length of the largest dataset over its
            proportion, rounded up; so it is read once.
        with_names: return ``(name, sample)`` in place of the sample.
        seed: decides the order, in place of the loader's seed. The same on every rank.

    Raises:
        TypeError: `sources` are no pairs by name, or `weights` no numbers.
        ValueError: a dataset is empty, a weight is not above 0 or not finite, or a block is too
            short to have a sample of each dataset.

    >>> mixture = Mixture({"odd": ([1, 3], 1), "even": ([0, 2, 4, 6], 2)})
    >>> len(mixture), sorted(mixture)
    (6, [0, 1, 2, 3, 4, 6])
    """

    _arguments = frozenset({"sources", "weights", "length", "with_names", "seed"})

    def __init__(
        self,
        sources: Any,
        *,
        weights: Any = None,
        length: int | None = None,
        with_names: bool = False,
        seed: int | None = None,
    ) -> None:
        shares = _shares(sources if weights is None else {"dataset": (sources, 1)})
        pairs = sources.values() if weights is None else [(sources, 1)]
        self.names, self.datasets = [*shares], [dataset for dataset, _ in pairs]
        self._lengths, self._shares = [*map(len, self.datasets)], [*shares.values()]
        self._sums = (
            weights if weights is None else _sums(vector_of("weights", weights, len(sources)))
        )
        largest = self._lengths.index(max(self._lengths))
        usual = math.ceil(self._lengths[largest] / self._shares[largest])
        self._length = check_int("length", usual if length is None else length, least=1)
        self._block = math.lcm(*(share.denominator for share in self._shares))
        if self._block > (most := min(self._length, _MOST)):
            self._block = most
        if 0 in (counts := self._before(self._length)):
            msg = f"`length` must have a position for each dataset, but {self._length} has none for"
            raise ValueError(f"{msg} {self.names[counts.index(0)]!r}: raise it, or that weight")
        self._chunk = self._block * max(1, _TOGETHER // self._block)
        self._kept: tuple[Any, Any] = None, None  # the newest chunk, and its indices
        check_bool("with_names", with_names)
        self._with_names = with_names
        self._seed = seed if seed is None else check_int("seed", seed)
        self.set_epoch(0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Any:
        if not -self._length <= position < self._length:
            raise IndexError(f"position {position} is out of range for {self._length} positions")
        chunk, offset = divmod(int(position) % self._length, self._chunk)
        index, number = int(self._indices(chunk, self._key)[offset]), 0
        while index >= self._lengths[number]:
            index, number = index - self._lengths[number], number + 1
        sample: Any = self.datasets[number][index]
        return (self.names[number], sample) if self._with_names else sample

    def set_epoch(self, epoch: int, seed: int = 0) -> None:
        """Begin the order of `epoch`, from `seed` if the mixture has none."""
        if (lengths := [*map(len, self.datasets)]) != self._lengths:
            msg = (
                f"datasets of a mixture must keep their lengths {self._lengths}, but have {lengths}"
            )
            raise ValueError(f"{msg}: make another mixture")
        self._key = self.key(epoch, seed)

    def key(self, epoch: int, seed: int) -> int:
        """Return the key of the order of an epoch."""
        return mix(seed if self._seed is None else self._seed, epoch)

    def facts(self) -> str:
        """Return a text of what decides the order, except the epoch and the loader's seed."""
        digest = None if self._sums is None else content_hash([self._sums])
        return repr((self.names, self._shares, self._length, self._seed, digest))

    def indices_at(self, positions: Tensor, key: int) -> Tensor:
        """Return the samples at `positions`, counted through all datasets, one after the other.

        Both are int64 tensors of shape (n,).
        """
        indices, chunks = torch.empty_like(positions), positions // self._chunk
        for chunk in chunks.unique().tolist():
            here = chunks == chunk
            indices[here] = self._indices(chunk, key)[positions[here] % self._chunk]
        return indices

    def _before(self, position: int) -> list[int]:
        """Return how many positions before this one, the start of a block, each dataset has."""
        counts = [math.floor(position * share) for share in self._shares]
        by_rest = sorted(range(len(counts)), key=lambda n: counts[n] - position * self._shares[n])
        if self._length > _MOST:  # so that no number falls from block to block
            by_rest = [self._shares.index(max(self._shares))] * len(counts)
        for source in by_rest[: position - sum(counts)]:
            counts[source] += 1
        return counts

    def _indices(self, chunk: int, key: int) -> Tensor:
        """Return the indices of the positions of a chunk, which is some blocks; keep the newest."""
        if self._kept[0] == (chunk, key):
            indices: Tensor = self._kept[1]
            return indices
        start = chunk * self._chunk
        before, after = self._before(start), self._before(start + self._block)
        counts = [end - first for first, end in zip(before, after, strict=True)]
        sources = torch.arange(len(counts), device="cpu").repeat_interleave(
            torch.tensor(counts, device="cpu")
        )
        positions = torch.arange(start, start + self._chunk, device="cpu")
        order = random_words(positions, key).view(-1, self._block).argsort(stable=True)
        # The random places of each dataset in a block, ascending, so that it is read in turn.
        places = (sources * self._block + order).sort().values % self._block
        found, offset = list[Tensor](), 0
        for source, (first, count) in enumerate(zip(before, counts, strict=True)):
            numbers = torch.arange(len(order) * count, device="cpu") + first
            length = self._lengths[source]
            drawn = offset + self._drawn(length, mix(key, source), numbers)
            found.append(drawn.view(len(order), count))
            offset += length
        indices = torch.empty_like(places).scatter_(1, places, torch.cat(found, 1)).flatten()
        self._kept = (chunk, key), indices
        return indices

    def _drawn(self, length: int, key: int, draws: Tensor) -> Tensor:
        """Return the indices in a dataset of draws by number; both are int64 of shape (n,)."""
        if (sums := self._sums) is not None:
            total = int(sums[-1])
            numbers = (random_words(draws, key).double() * (total / 2**62)).long()
            return torch.searchsorted(sums, numbers.clamp_(max=total - 1), right=True)
        indices, passes = torch.empty_like(draws), draws // length
        for number in passes.unique().tolist():
            here = passes == number
            indices[here] = _shuffle(length, mix(key, number)).at(draws[here] % length)
        return indices


def _shares(sources: Any) -> dict[Any, Fraction]:
    """Return the proportions of datasets by name."""
    if not isinstance(sources, Mapping) or not sources:
        msg = f"`sources` must be datasets and weights by name, but is {type_with_article(sources)}"
        raise TypeError(msg + ": pass {'code': (code, 0.7), 'text': (text, 0.3)}, or `weights`")
    weights: list[float] = []
    for name, pair in sources.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            msg = f"`sources[{name!r}]` must be a dataset and its weight, but is {pair!r:.60}"
            raise TypeError(f"{msg}: pass a tuple of both")
        check_map_style(pair[0], f" in `sources[{name!r}]`")
        weights += vector_of(f"sources[{name!r}][1]", [pair[1]], 1).tolist()
        if not len(pair[0]) or not weights[-1]:
            msg = f"`sources[{name!r}]` must have samples and a weight above 0, but has"
            raise ValueError(f"{msg} {len(pair[0])} and {weights[-1]:g}: leave it out")
    # By their text, because 0.7 as a float is no tenth.
    exact = [Fraction(str(weight)) for weight in weights]
    return {name: share / sum(exact) for name, share in zip(sources, exact, strict=True)}


def _sums(weights: Tensor) -> Tensor:
    """Return the sums of weights as int64, which do not depend on the order of additions."""
    if not weights.any():
        raise ValueError("`weights` must have one above 0, but all are 0: look at what made them")
    sums = (weights / weights.max()).mul_(2.0 ** (62 - len(weights).bit_length())).round_().long()
    return torch.cumsum(sums, 0, out=sums)
