"""A sum over ranks that first makes sure that every rank brings the like.

gloo left to itself returns wrong sums, or ends the process, where sizes differ between ranks
(https://github.com/NVIDIA/nccl/issues/1394 shows it beside NCCL, which hangs or goes on). So the
first collective always has one fixed size, and carries a hash of the structure: only when all
ranks agree is anything sent whose size depends on the value.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.collective._agreement import agree, require_same
from pardata.collective._tree import Path, in_brackets, leaves, mapped
from pardata.ranks._backend import runs_on_gpus
from pardata.ranks._world import World, way_of_counts

_T = TypeVar("_T")
_R = TypeVar("_R")

# Places in the header of float64: hashes, their squares, the weight, the first values.
HEADER = 64
_HASHES = 3
_WEIGHT = 2 * _HASHES
_FIRST_VALUE = _WEIGHT + 1
_ROOM = HEADER - _FIRST_VALUE

Leaf: TypeAlias = Tensor | float
"""A dense tensor or a real number (a bool and a NumPy scalar are numbers)."""

Values: TypeAlias = list[float] | Tensor
"""What is summed: single numbers in a list, which takes less time, anything else in a vector."""


class Matching(Generic[_T]):
    """The leaves of this rank's value, and a sum that insists on the like from every rank."""

    def __init__(
        self, here: World, place: str, value: _T, describe_leaf: Callable[[Leaf], str]
    ) -> None:
        self._here, self._place, self._value = here, place, value
        # Chosen from the world and never from the values: ranks could be of two minds.
        self.device = here.device if runs_on_gpus(here.backend) else torch.device("cpu")
        self._error: Exception | None = None
        found: dict[Path, Leaf] = self.guarded(lambda: numbers_of(value), {})
        self._paths, self.leaves = list(found), list(found.values())
        texts = (f"{in_brackets('value', p)}: {describe_leaf(leaf)}" for p, leaf in found.items())
        self._text = self.guarded(lambda: "; ".join(texts), "")

    def guarded(self, work: Callable[[], _R], otherwise: _R) -> _R:
        """Return what `work` returns; where it fails, `all_reduce` raises that, on every rank."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks are waiting
            self._error = self._error or error
            return otherwise

    def all_reduce(self, pack: Callable[[], Values], weight: float) -> tuple[Values, float]:
        """Return the sums of what `pack` returns, and of `weight`, over all ranks.

        Raises:
            RuntimeError: on every rank, where one refused its value or the structures differ; the
                rank that refused raises its own error.
        """
        nothing: Values = []
        values = self.guarded(pack, nothing)
        if self._here.size == 1:
            if self._error is not None:
                raise self._error
            return values, weight
        if isinstance(values, list) and len(values) > _ROOM:
            values = torch.tensor(values, dtype=torch.float64, device=self.device)
        header = self._header(values, weight, self.device)
        dist.all_reduce(header)
        back = self._read(header)
        if isinstance(values, list):
            return back[_FIRST_VALUE : _FIRST_VALUE + len(values)], back[_WEIGHT]
        sums = header[_FIRST_VALUE : _FIRST_VALUE + len(values)]
        if len(values) > _ROOM:
            rest = values[_ROOM:].clone()
            dist.all_reduce(rest)
            sums = torch.cat([sums, rest])
        return sums, back[_WEIGHT]

    def start_all_reduce(self, values: list[float]) -> Callable[[], list[float]]:
        """Begin to sum a few numbers over all ranks, and return what waits for the sums.

        That raises as `all_reduce` does. It must be called once, on every rank.
        """
        # To read it there does not wait for a GPU.
        group, device = way_of_counts(self._here)
        header = self._header(values, 0.0, device)
        work: Any = dist.all_reduce(header, group=group, async_op=True)

        def sums() -> list[float]:
            work.wait()
            return self._read(header)[_FIRST_VALUE : _FIRST_VALUE + len(values)]

        return sums

    def rebuilt(self, replacements: Iterable[Leaf]) -> _T:
        """Return a value like this rank's, of other leaves."""
        found = dict(zip(self._paths, replacements, strict=True))
        like: _T = mapped(self._value, lambda path, _: found[path])
        return like

    def _header(self, values: Values, weight: float, device: torch.device) -> Tensor:
        # A rank that refused takes part all the same, with a structure that nobody shares.
        refused = "" if self._error is None else f"refused on rank {self._here.rank}"
        said = hashes(f"{self._place} {self._text} {refused}", self._here.size)
        front: list[float] = [*said, weight]
        padding = [0.0] * (_ROOM - len(values))
        if isinstance(values, list):
            return torch.tensor(front + values + padding, dtype=torch.float64, device=device)
        ends = torch.tensor(front + padding, dtype=torch.float64, device=device)
        return torch.cat([ends[:_FIRST_VALUE], values[:_ROOM], ends[_FIRST_VALUE:]])

    def _read(self, header: Tensor) -> list[float]:
        """Return the sums, or raise on every rank, each having seen that not all agree."""
        back: list[float] = header.tolist()
        if all_equal(back[:_WEIGHT], self._here.size):
            return back

        def facts() -> dict[str, object]:
            if self._error is not None:
                raise self._error
            return {"call": self._place, "structure": self._text}

        refuse(self._here, facts)
        return back


def refuse(here: World, facts: Callable[[], object]) -> None:
    """Raise on every rank, with a table of the calls and structures in which they are."""
    # One name for all of them: the ranks may be in different calls.
    place = "all_reduce or all_gather"
    cure = "Make the same call with the same structure on every rank."
    agree(here, place, facts, lambda told: require_same(place, told, cure))


def numbers_of(value: object, name: str = "value") -> dict[Path, Leaf]:
    """Return the leaves of `value` by their paths, in the same order on every rank.

    Raises:
        TypeError: for a leaf that is no number, naming its path, as ``value['loss'][2]``.
    """
    return {path: _number(leaf, path, name) for path, leaf in leaves(value, by_text=True)}


def _number(leaf: Any, path: Path, name: str) -> Leaf:
    # By exact type first: metrics are reduced often, and an abstract class takes a microsecond.
    if type(leaf) is float or type(leaf) is int:
        return leaf
    if isinstance(leaf, Tensor):
        must, but = "a dense tensor of real numbers", "complex: convert it first"
        if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
            but = f"a {leaf.layout} {type(leaf).__name__}: convert it first"
        elif not leaf.is_complex():
            return leaf
    else:
        if getattr(leaf, "ndim", None) == 0 and hasattr(leaf, "item"):
            leaf = leaf.item()  # a NumPy scalar: its bool is no Real
        if isinstance(leaf, Real):
            return leaf  # type: ignore[return-value]  # Real is what numbers have in common
        must, but = "a number or a tensor", f"{leaf!r} ({type(leaf).__name__})"
    raise TypeError(f"`{in_brackets(name, path)}` must be {must}, but is {but}")


@functools.lru_cache(maxsize=64)  # a training loop reduces the same few structures
def hashes(text: str, size: int, number: int = _HASHES, mantissa: int = 53) -> list[int]:
    """Return hashes of `text` and then their squares, whose sums tell whether all ranks agree.

    They are so small that floats with such a mantissa add the squares of all ranks without
    rounding.
    """
    bits = min(20, (mantissa - (size - 1).bit_length()) // 2)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    found = [digest >> bits * place & (2**bits - 1) for place in range(number)]
    return [*found, *(h * h for h in found)]


def all_equal(sums: list[float], size: int) -> bool:
    """Decide from the sums of all ranks' `hashes` whether they are of the same text.

    By Cauchy and Schwarz, W times the sum of squares is the square of the sum exactly if all
    terms are equal. In integers, so without rounding.
    """
    half = len(sums) // 2
    pairs = zip(sums[:half], sums[half:], strict=True)
    return all(size * int(square) == int(first) ** 2 for first, square in pairs)
