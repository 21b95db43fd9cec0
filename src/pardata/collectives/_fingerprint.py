"""A sum over ranks that first makes sure that every rank brings the like.

gloo left to itself returns wrong sums, or ends the process, if sizes differ between ranks, and
others hang or continue. So the first collective always has one fixed size, and carries a hash of
the structure. Only if all ranks agree, they send what has a size that depends on the value.
"""

import functools
import hashlib
import reprlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pardata._pytree import TreePath, in_brackets, leaves, mapped
from pardata.collectives._consensus import agree, require_same
from pardata.collectives._forbidden import check_allowed
from pardata.environment._backend import runs_on_gpus
from pardata.environment._device import widest
from pardata.environment._world import World, require_world, way_of_counts

_T = TypeVar("_T")

# Places in the header of float64: hashes, their squares, the numbers that are summed.
HEADER = 64
_HASHES = 3
_FIRST = 2 * _HASHES
ROOM = HEADER - _FIRST

# A dense tensor or a real number (a bool and a NumPy scalar are numbers).
Leaf: TypeAlias = Tensor | float

Find: TypeAlias = Callable[[], dict[TreePath, Any]]
Describe: TypeAlias = Callable[[Any], str]

# What is summed: single numbers in a list, which takes less time, anything else in a vector.
Values: TypeAlias = list[float] | Tensor


class Matching:
    """The leaves of this rank's value, and a sum that insists on the like from every rank.

    Attributes:
        here: this rank.
        device: where the header is reduced: on the CPU wherever the world reduces there, so that
            nobody who reads it waits for a GPU.
        exact: whether whole numbers stay whole.
        leaves: what the value is made of.
        ways: of each leaf the dtype in which it travels apart, from GPU to GPU; None for one that
            travels as the header does.
    """

    def __init__(
        self,
        call: str,
        find: Find,
        describe: Describe,
        *,
        exact: bool = False,
        differentiable: bool = False,
    ) -> None:
        check_allowed(call, differentiable=differentiable)
        self.here, self._call, self.exact = require_world(call), call, exact
        # Chosen from the world and never from the values: ranks could be of two minds.
        self._group, self.device = way_of_counts(self.here)
        self._error: Exception | None = None
        found = self.guarded(find, {})
        self._paths, self.leaves = list(found), list(found.values())
        self._kinds = self.guarded(lambda: [describe(leaf) for leaf in self.leaves], [])
        apart = self.here.size == 1 or runs_on_gpus(self.here.backend)
        self.ways = [self._way(leaf) if apart else None for leaf in self.leaves]

    def guarded(self, work: Callable[[], Any], otherwise: Any) -> Any:
        """Return what `work` returns; if it fails, `all_reduce` raises that, on every rank."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks are waiting
            self._error = self._error or error
            return otherwise

    def all_reduce(self, pack: Callable[[], list[float]]) -> list[float]:
        """Return the sums of what `pack` returns, at most `ROOM` numbers, over all ranks.

        Where a leaf is on a GPU on some ranks only, nothing travels apart: `pack` is called again.

        Raises:
            RuntimeError: on every rank, if one refused its value or the structures differ; the
                rank that refused raises its own error.
        """
        numbers: list[float] = self.guarded(pack, [])
        if self.here.size == 1:
            if self._error is not None:
                raise self._error
            return numbers
        ways = self.ways
        sums = self.start(numbers, later=False)()  # takes 10 microseconds less
        return sums if ways is self.ways else self.all_reduce(pack)

    def start(self, numbers: list[float], *, later: bool = True) -> Callable[[], list[float]]:
        """Begin to sum a few numbers over all ranks, and return what waits for the sums.

        That raises as `all_reduce` does. It must be called once, on every rank.
        """
        # A rank that refused takes part all the same, with a structure that nobody shares.
        refused = None if self._error is None else self.here.rank
        text = f"{self._call} {self._paths} {self._kinds} {self.ways} {refused}"
        padding = [0.0] * (ROOM - len(numbers))
        said = array("d", [*hashes(text, self.here.size), *numbers, *padding])
        header = torch.frombuffer(said, dtype=torch.float64).to(self.device)  # faster than tensor
        work: Any = dist.all_reduce(header, group=self._group, async_op=later)

        def sums() -> list[float]:
            if later:
                work.wait()
            back: list[float] = header.tolist()
            if not all_equal(back[:_FIRST], self.here.size):
                refuse(self.here, self._call, self._facts)
                self.ways = [None] * len(self.leaves)  # they differ in these alone
            return back[_FIRST : _FIRST + len(numbers)]

        return sums

    def group(self, tensor: Tensor) -> Any:
        """Return the process group that takes `tensor`, once all ranks are known to agree."""
        return self._group if tensor.device == self.device else None

    def by(self, way: torch.dtype | None) -> list[Leaf]:
        """Return the leaves that travel in this way."""
        return [leaf for leaf, one in zip(self.leaves, self.ways, strict=True) if one is way]

    def vector(self, numbers: list[float]) -> Tensor:
        """Return numbers as they travel."""
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def rebuilt(self, value: _T, replacements: Iterable[Any], is_leaf: Any = None) -> _T:
        """Return a value like this rank's, of other leaves."""
        found = dict(zip(self._paths, replacements, strict=True))
        like: _T = mapped(value, lambda path, _: found[path], is_leaf=is_leaf)
        return like

    def _way(self, leaf: Any) -> torch.dtype | None:
        if not isinstance(leaf, Tensor) or leaf.is_cpu or widest(leaf.device) != torch.float64:
            return None
        return torch.int64 if self.exact and not leaf.is_floating_point() else torch.float64

    def _facts(self) -> str:
        if self._error is not None:
            raise self._error
        both = zip(self._paths, self._kinds, strict=True)
        return "; ".join(f"{in_brackets('value', path)}: {kind}" for path, kind in both)


def refuse(here: World, call: str, facts: Callable[[], str]) -> None:
    """Raise on every rank, with a table of the calls or of the structures in which they are."""
    cure = "Make the same call with the same structure on every rank."
    state = lambda: {"structure": facts()}  # noqa: E731  # a name says what it is
    agree(here, call, state, lambda all_facts: require_same(call, all_facts, cure))


def numbers_of(value: object, name: str = "value") -> dict[TreePath, Any]:
    """Return the leaves of `value` by their paths, in the same order on every rank.

    Raises:
        TypeError: for a leaf that is no number, naming its path, as ``value['loss'][2]``.
    """
    return {path: number_of(leaf, path, name) for path, leaf in leaves(value, by_text=True)}


def plain(leaf: Any) -> Any:
    """Return what NumPy calls a scalar as a number of Python: its bool is no Real."""
    is_scalar = getattr(leaf, "ndim", None) == 0 and hasattr(leaf, "item")
    return leaf.item() if is_scalar else leaf


def number_of(leaf: Any, path: TreePath, name: str = "value") -> Leaf:
    """Return a leaf that is a number; see `numbers_of`."""
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
        leaf = plain(leaf)
        if isinstance(leaf, Real):
            return leaf  # type: ignore[return-value]  # Real is what numbers have in common
        must, but = "a number or a tensor", f"{reprlib.repr(leaf)} ({type(leaf).__name__})"
    raise TypeError(f"`{in_brackets(name, path)}` must be {must}, but is {but}")


@functools.lru_cache(maxsize=64)  # a training loop reduces the same few structures
def hashes(text: str, size: int) -> list[int]:
    """Return hashes of `text` and then their squares, whose sums tell whether all ranks agree.

    They are so small that float64 adds the squares of all ranks without rounding.
    """
    bits = min(20, (53 - (size - 1).bit_length()) // 2)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    hashed = [digest >> bits * n & (2**bits - 1) for n in range(_HASHES)]
    return [*hashed, *(h * h for h in hashed)]


def all_equal(sums: Sequence[float], size: int) -> bool:
    """Decide from the sums of all ranks' `hashes` whether they are of the same text.

    By Cauchy and Schwarz, W times the sum of squares is the square of the sum exactly if all
    terms are equal. In integers, so without rounding.
    """
    half = len(sums) // 2
    pairs = zip(sums[:half], sums[half:], strict=True)
    return all(size * int(square) == int(first) ** 2 for first, square in pairs)
